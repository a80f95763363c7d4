"""Everything that learns.

`relaxion.train.TD3`, `SAC`, `DDPG` and `D4PG` are agents with a task around them, for scripts and notebooks: `learn`,
`predict`, `save`, `load`. They are loaded when first used.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.isupper():
        from relaxion.train.agents import AGENTS
        from relaxion.train.runs.loop import learner

        if name.lower() in AGENTS:
            return learner(name.lower())
    raise AttributeError(f"module 'relaxion.train' has no attribute '{name}'")
