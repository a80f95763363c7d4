"""Gymnasium's door: importing this module registers `relaxion/Relax-v0` and `relaxion/RelaxPadded-v0`.

Gymnasium 1.0 gave up entry points, so a package cannot be found by its installation alone:
`gymnasium.make("relaxion.train.experience.gym:relaxion/Relax-v0")` imports this module first.

Light on purpose: the environments themselves, and torch with them, are loaded by the first `gymnasium.make`.
"""

from __future__ import annotations

ENVIRONMENTS = {
    "relaxion/Relax-v0": "relaxion.train.experience.gym_environments:RelaxGraph",
    "relaxion/RelaxPadded-v0": "relaxion.train.experience.gym_environments:RelaxPadded",
}


def register_environments() -> None:
    """Make the environments known to Gymnasium; calling it again does no harm."""
    from gymnasium.envs.registration import register, registry

    for name, place in ENVIRONMENTS.items():
        if name not in registry:
            register(id=name, entry_point=place)


register_environments()
