"""What commands have in common: options, each declared once, what the shell completes; how they begin and end.

Loads neither torch nor ASE, because completion must be quick: a command loads what it needs when it runs.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import cleandoc
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import typer
from typer import Argument, BadParameter, Context, Option
from typer.core import TyperCommand

from relaxion.errors import PolicyError, RelaxionError, SettingsError, UnknownPotentialError
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


# ---- how commands are registered with typer, begin and end

# exit codes; 130 or 143 where a signal ended it: Interrupts
DONE = 0
ERROR = 1
USAGE = 2
INCOMPLETE = 3  # not all converged, or not all is there
RELAXING = (SettingsError, UnknownPotentialError, PolicyError)  # wrong --calc and --policy are wrong usage
UNITS = "[bold]Units[/bold]: lengths Å, energies eV, forces eV/Å, stresses eV/Å³, times s."
THREADS = "OMP_NUM_THREADS"

app = typer.Typer(
    name="relaxion",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Plain(TyperCommand):
    """A command whose --help shows no <bool>."""

    def get_help_option(self, ctx: Any) -> Any:
        found = super().get_help_option(ctx)
        if found is not None:
            found.metavar = ""
        return found


def command(
    *,
    usage: tuple[type[Exception], ...] = (SettingsError,),
    interrupted: str = "interrupted",
    one_thread: bool = True,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function with typer; what it returns is the exit code.

    usage: errors that end with exit code 2.
    interrupted: said where Ctrl-C or SIGTERM found nothing to save.
    one_thread: unless OMP_NUM_THREADS says otherwise; `doctor` shows what scripts would get.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def run(**options: Any) -> None:
            if one_thread:
                use_one_thread()
            raise typer.Exit(_exit_code(lambda: function(**options), usage, interrupted))

        words, epilog = help_of(function)
        app.command(function.__name__.replace("_", "-"), cls=Plain, help=words, epilog=epilog)(run)
        return function

    return register


def help_of(function: Callable[..., int]) -> tuple[str, str]:
    """The first line of a docstring; what stands below it as examples, units and exit codes."""
    first, _, below = cleandoc(function.__doc__ or "").partition("\n\n")
    parts = ["[bold]Examples[/bold]", *re.findall(r"^relaxion .*", below, re.MULTILINE)]
    if "Units." in below:
        parts.append(UNITS)
    if {"recipe", "agent"} <= set(function.__annotations__):  # recipes with a task, as `train` and `tune` take them
        parts.append(f"[bold]Recipes[/bold]: {', '.join(trainable())}")
    codes = re.search(r"Exit codes(: .*)", below, re.DOTALL)
    if codes:
        parts.append(f"[bold]Exit codes[/bold]{codes[1]}")
    return first, "\n\n".join(["", *parts, ""])


def use_one_thread() -> None:
    """One thread for NumPy, torch and whatever this process starts, unless the user has said otherwise.

    On small structures and networks more threads gain nothing, and lose much where processes share the cores.
    """
    if THREADS in os.environ:
        return
    os.environ[THREADS] = "1"
    if "torch" in sys.modules:  # it has read the variable already
        sys.modules["torch"].set_num_threads(1)


def _exit_code(work: Callable[[], int], usage: tuple[type[Exception], ...], interrupted: str) -> int:
    """Do it, and say in one sentence what went wrong."""
    from relaxion.apps.cli.progress import say  # rich draws a random number when it is loaded

    with interrupts:
        try:
            return work()
        except usage as error:
            say(f"relaxion: {error}")
            return USAGE
        except (RelaxionError, OSError) as error:
            say(f"relaxion: {error}")
            return ERROR
        except KeyboardInterrupt:
            if interrupted:
                say(f"relaxion: {interrupted}")
            return interrupts.exit_code


@contextmanager
def as_usage(*kinds: type[RelaxionError]) -> Iterator[None]:
    """These errors are the user's here: what was asked for does not exist or cannot be read."""
    try:
        yield
    except kinds as error:
        raise SettingsError(str(error)) from error


class Interrupts:
    """Ctrl-C, and the SIGTERM by which batch systems end a job, as one thing.

    Within it both signals raise KeyboardInterrupt, except while they are held; `exit_code` tells them apart.
    """

    def __init__(self) -> None:
        self.noticed = False  # one came while they were held
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}
        self._first: int = signal.SIGINT
        self._pipe: tuple[int, int] | None = None  # to read from, to write into

    def __enter__(self) -> Self:
        self.__init__()
        if threading.current_thread() is not threading.main_thread():  # no other may listen to signals
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup and the like stay in force
                self._before[number] = signal.signal(number, self._receive)
        # whoever listens inside, as a training run does, takes our place; into this pipe every signal is written
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._pipe_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._pipe_before)
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    @property
    def exit_code(self) -> int:
        """Of the signal that came first, as shells count: 130, or 143 after SIGTERM."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                came = [number for number in os.read(self._pipe[0], 4096) if number in self._before]
                self._first = came[0] if came else self._first
        return 128 + self._first

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._holding and not self.noticed:
            self.noticed = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """While results are written: the first one is only noticed, a second one stops at once."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False


interrupts = Interrupts()  # signals belong to the process, so there is one
