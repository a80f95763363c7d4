"""Everything that learns.

`relaxion.train.TD3`, `SAC`, `DDPG` and `D4PG` are agents with a task around them, for scripts and notebooks: `learn`,
`predict`, `save`, `load`. They are loaded when first used.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("DDPG", "TD3", "D4PG", "SAC"):
        raise AttributeError(f"module 'relaxion.train' has no attribute '{name}'")
    from relaxion.train.tasks.facade import learner

    return learner(name.lower())
