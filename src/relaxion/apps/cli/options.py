"""Options that several commands have, each declared once, what the shell completes, and checks of values.

Loads neither torch nor ASE: completion must be quick.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Context, Option

from relaxion.errors import SettingsError
from relaxion.paths import check_file, without_slice
from relaxion.settings import assignment, nearest, strain_mask

AS_IN_RELAX = "As in 'relax'."
FITTING = "emt for its metals, else the first installed of chgnet, sevennet, mace; for molecules gfn2"
QUIET = "No progress on stderr."
QUIET_AND_NO_HINTS = "No progress and no hints on stderr."


# ---- what the shell offers after TAB; a test holds the words to the truth

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


def complete_optimizers(incomplete: str) -> list[str]:
    """Of a list with commas, the last word; those named already are not offered again."""
    *named, last = incomplete.split(",")
    taken = {name.lower() for name in named}
    offered = among(lambda: [name for name in OPTIMIZERS if name.lower() not in taken])(last)
    return [",".join([*named, name]) for name in offered]


def _shipped(folder: str, suffix: str) -> list[str]:
    return sorted(file.name.removesuffix(suffix) for file in (PACKAGE / folder).glob(f"*{suffix}"))


def trainable() -> dict[str, str]:
    """Recipes that `train` takes, and the first line of each; one that lists kinds of starts has no task."""
    names = _shipped("train/recipes", ".toml")
    texts = {name: (PACKAGE / "train" / "recipes" / f"{name}.toml").read_text(encoding="utf-8") for name in names}
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in texts.items() if "\ntask" in text}


complete_calculators = among(lambda: CALCULATORS)
complete_agents = among(lambda: AGENTS)
complete_recipes = among(lambda: _shipped("train/recipes", ".toml"))
complete_policies = among(lambda: ["auto", "none", *_shipped("policies", ".safetensors")])


# ---- declarations


def argument(metavar: str, words: str, **more: Any) -> Any:
    """An argument; readable=False: our own sentence says what is wrong with a file."""
    return Argument(metavar=metavar, help=words, readable=False, **{"show_default": False, **more})


def option(metavar: str, words: str, *names: str, **more: Any) -> Any:
    """An option with a value, called as the parameter is unless named."""
    return Option(*names, metavar=metavar, help=words, readable=False, **more)


def flag(name: str, words: str, *short: str) -> Any:
    return Option(name, *short, help=words, metavar="")


def from_file(context: Context, file: Path | None) -> Path | None:
    """Settings of a TOML file become the defaults of a command, so that its options, where given, still win."""
    if file is None:
        return None
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadParameter(f"{file} cannot be read: {error}") from error
    known = {name: param for param in context.command.params for name in _names(param)}
    for name in table:
        if name not in known:
            raise BadParameter(f"{file}: unknown setting '{name}': {nearest(name, known, '--help')}")
    options = table.get("calc_options")
    if isinstance(options, dict):
        if nested := [name for name, value in options.items() if isinstance(value, dict)]:
            plain = "a number, true, false, text or a list of them"
            raise BadParameter(f"{file}: option '{nested[0]}' of a calculator is {plain}")
        table["calc_options"] = [assignment(name, value) for name, value in options.items()]
    context.default_map = {known[name].name or name: value for name, value in table.items()}
    return file


def _names(param: Any) -> list[str]:
    """As on the command line, with - or _, and as the parameter is called: calc_options, cell_mask, cell-mask."""
    if param.name in ("settings", "help"):
        return []
    long = [word.removeprefix("--") for word in param.opts if word.startswith("--")]
    return [param.name, *long, *(word.replace("-", "_") for word in long)]


# how structures are relaxed: the same in `relax` and `relax-many`, some of it elsewhere too
CalculatorOption = Annotated[
    str,
    option(
        "SPEC",
        "emt, eam, eam:FILE, lj, morse, chgnet, sevennet, gfn2, mace, module:factory; see 'calculators'.",
        autocompletion=complete_calculators,
        show_default=FITTING,
    ),
]
CalculatorAsInRelaxOption = Annotated[
    str, option("SPEC", AS_IN_RELAX, autocompletion=complete_calculators, show_default=FITTING)
]
CalculatorSettingOption = Annotated[
    list[str] | None,
    option("KEY=VALUE", "An option of the calculator, such as dispersion=true; may be repeated.", "--calc-option"),
]
PolicyOption = Annotated[
    str,
    option(
        "NAME|FILE",
        "auto: a shipped policy that covers all elements, else the classical optimizer; none: the classical "
        "optimizer; NAME or FILE: that policy. See 'policies'.",
        autocompletion=complete_policies,
    ),
]
PolicyAsInRelaxOption = Annotated[str, option("NAME|FILE", AS_IN_RELAX, autocompletion=complete_policies)]
DeviceOption = Annotated[
    str | None,
    option("NAME", "Device of the networks of policies and named calculators: cuda, cuda:1.", show_default="cpu"),
]
AllowUnseenOption = Annotated[
    bool,
    flag("--allow-unseen", "Use the policy also for elements it was not trained on; every step is still checked."),
]
ModelOption = Annotated[
    str | None,
    option(
        "NAME",
        "A cheaper calculator that plans the steps of --calc; auto: an installed one.",
        show_default="none",
    ),
]
FmaxOption = Annotated[
    float,
    option("eV/Å", "Converged when the largest force (with a free cell also the stress term) is below this."),
]
StepsOption = Annotated[int, option("N", "Maximum number of steps per structure; each is one force call.")]
FreeCellOption = Annotated[bool, flag("--cell", "Relax the cell too.")]
PressureOption = Annotated[float, option("GPa", "External pressure, for --cell.")]
CellMaskOption = Annotated[
    str,
    option(
        "AXES",
        "Strain components that may change, for --cell: some of xx,yy,zz,yz,xz,xy.",
        show_default="all six",
    ),
]
KeepSymmetryOption = Annotated[
    bool, flag("--keep-symmetry", "Keep the space group of the start (within 0.01 Å); needs spglib.")
]
DatabaseOption = Annotated[
    Path | None, option("DIR", "Keep every evaluated structure in this relaxation database; see 'learn'.")
]
SettingsFileOption = Annotated[
    Path | None,
    option(
        "FILE.toml",
        "Read options from a file (fmax = 0.01, cell = true); the command line overrides them.",
        is_eager=True,
        callback=from_file,
    ),
]
RattleOption = Annotated[
    float, option("Å", "First displace the atoms at random with this standard deviation along each axis.")
]
RattleSeedOption = Annotated[int, option("N", "Seed of --rattle.", min=0)]

# training
AgentOption = Annotated[str | None, option("NAME", "ddpg, td3, d4pg or sac.", autocompletion=complete_agents)]
AssignmentsOption = Annotated[list[str] | None, option("KEY=VALUE", "Change a setting; may be repeated.", "--set")]

# results, progress
DatabaseArgument = Annotated[Path, argument("DIR", "The --database of 'relax' or 'relax-many'.")]
ManyArgument = Annotated[Path, argument("DIR", "The --out of 'relax-many'.")]
JsonResultOption = Annotated[bool, flag("--json", "The result as one JSON object on stdout.")]
JsonEverythingOption = Annotated[bool, flag("--json", "Everything as one JSON object.")]
QuietOption = Annotated[bool, flag("--quiet", QUIET, "-q")]
QuietWithoutHintsOption = Annotated[bool, flag("--quiet", QUIET_AND_NO_HINTS, "-q")]


# refused before torch is loaded: what needs no structure and no potential to be seen wrong


def check_numbers(fmax: float, steps: int, *, fewest_steps: int = 0, rattle: float = 0.0) -> None:
    """Refuse options that make no sense, before anything is read."""
    if not (math.isfinite(fmax) and fmax > 0):
        raise SettingsError(f"--fmax is a force in eV/Å above 0, got {fmax}; try --fmax 0.05")
    if steps < fewest_steps:
        raise SettingsError(f"--steps is {fewest_steps} or more, got {steps}; try --steps 500")
    if not (math.isfinite(rattle) and rattle >= 0):
        raise SettingsError(f"--rattle is a length in Å, 0 or more, got {rattle}; try --rattle 0.05")


def check_cell_options(cell: bool, pressure: float, cell_mask: str) -> None:
    """Refuse what has no meaning without a free cell, and what cannot be read."""
    if not math.isfinite(pressure):
        raise SettingsError(f"--pressure is a number in GPa, got {pressure}; try --pressure 10")
    if not cell and (pressure or cell_mask):
        raise SettingsError("--pressure and --cell-mask are for a free cell; add --cell")
    strain_mask(cell_mask)


def check_structure_files(files: Sequence[Path]) -> None:
    for file in files:
        check_file(without_slice(file)[0])


def check_recipe(word: str) -> None:
    known = complete_recipes("")
    if word not in known and not Path(word).exists():
        raise SettingsError(f"no recipe '{word}', neither shipped nor a file: {nearest(word, known)}")
