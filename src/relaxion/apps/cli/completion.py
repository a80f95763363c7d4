"""What the shell offers after TAB. Nothing heavy is loaded: it must be quick. A test holds the words to the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

CALCULATORS = (
    "emt", "eam", "eam:", "lj", "morse", "chgnet", "sevennet", "gfn2", "mace", "mace:", "orb", "mattersim", "uma",
    "fairchem", "nequip:", "matgl", "lammps:", "gpaw",
)  # fmt: skip
OPTIMIZERS = ("BFGS", "BFGSLineSearch", "LBFGS", "FIRE", "FIRE2", "GPMin", "MDMin", "CG", "GoodOldQuasiNewton")
AGENTS = ("ddpg", "td3", "d4pg", "sac")
PACKAGE = Path(__file__).parents[2]


def among(find: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What begins like the word that is being typed."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in find() if word.lower().startswith(incomplete.lower())]

    return complete


def optimizers(incomplete: str) -> list[str]:
    """Of a list with commas, the last word; those named already are not offered again."""
    *named, last = incomplete.split(",")
    taken = {name.lower() for name in named}
    offered = among(lambda: [name for name in OPTIMIZERS if name.lower() not in taken])(last)
    return [",".join([*named, name]) for name in offered]


def _shipped(folder: str, suffix: str) -> list[str]:
    return sorted(file.name.removesuffix(suffix) for file in (PACKAGE / folder).glob(f"*{suffix}"))


def trainable() -> dict[str, str]:
    """Recipes that `train` takes, and the first line of each; those of `collect` name kinds in place of a task."""
    names = _shipped("train/recipes", ".toml")
    texts = {name: (PACKAGE / "train" / "recipes" / f"{name}.toml").read_text(encoding="utf-8") for name in names}
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in texts.items() if "\ntask" in text}


calculators = among(lambda: CALCULATORS)
agents = among(lambda: AGENTS)
recipes = among(lambda: _shipped("train/recipes", ".toml"))
policies = among(lambda: ["auto", "none", *_shipped("policies", ".safetensors")])
