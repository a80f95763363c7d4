"""What the shell offers after TAB. Nothing heavy is loaded: it must be quick. A test holds the words to the truth."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CALCULATORS = (
    "emt", "eam", "eam:", "lj", "morse", "chgnet", "sevennet", "gfn2", "mace", "mace:", "orb", "mattersim", "uma",
    "fairchem", "nequip:", "matgl", "lammps:", "gpaw",
)  # fmt: skip
OPTIMIZERS = ("BFGS", "BFGSLineSearch", "LBFGS", "FIRE", "FIRE2", "GPMin", "MDMin", "CG", "GoodOldQuasiNewton")
AGENTS = ("ddpg", "td3", "d4pg", "sac")
RECIPES = Path(__file__).parent.parent / "recipes"
POLICIES = Path(__file__).parent.parent / "bundles" / "policies"
SUFFIX = ".safetensors"


def calculators(incomplete: str) -> list[str]:
    return _beginning(incomplete, CALCULATORS)


def optimizers(incomplete: str) -> list[str]:
    """Of a list with commas, the last word; those named already are not offered again."""
    *named, last = incomplete.split(",")
    taken = {name.lower() for name in named}
    offered = _beginning(last, (name for name in OPTIMIZERS if name.lower() not in taken))
    return [",".join([*named, name]) for name in offered]


def agents(incomplete: str) -> list[str]:
    return _beginning(incomplete, AGENTS)


def recipes(incomplete: str) -> list[str]:
    return _beginning(incomplete, sorted(file.stem for file in RECIPES.glob("*.toml")))


def policies(incomplete: str) -> list[str]:
    shipped = sorted(file.name.removesuffix(SUFFIX) for file in POLICIES.glob(f"*{SUFFIX}"))
    return _beginning(incomplete, ["auto", "none", *shipped])


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.lower().startswith(incomplete.lower())]
