"""Potentials: energies, forces and stresses of many structures at once, and adapters from and to ASE.

The names below are loaded when first used.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AsePotential": "base",
    "Emt": "emt",
    "LennardJones": "pairwise",
    "Morse": "pairwise",
    "PairGraphPotential": "base",
    "Potential": "base",
    "PotentialCalculator": "base",
    "PotentialEntry": "registry",
    "TabulatedEam": "eam",
    "ZhouEam": "eam",
    "known_potentials": "registry",
    "potential": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relaxion.potentials' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
