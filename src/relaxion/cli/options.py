"""How a command and its options are described, and the options that several commands have.

`requests` and `showing_requests` describe all commands with it. Loads neither torch nor ASE.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typer import Argument, BadParameter, Context, Option

from relaxion.cli import completion
from relaxion.errors import PolicyError, SettingsError, UnknownPotentialError
from relaxion.settings import assignment, nearest

TYPER = "typer"  # in a field's metadata: its argument or option
AS_IN_RELAX = "As in 'relax'."
RELAXING = (SettingsError, UnknownPotentialError, PolicyError)  # wrong --calc and --policy are wrong usage


@dataclass(frozen=True)
class Command:
    """One command: its request, the function that answers it, and what is the same whatever was asked."""

    request: type[Any]  # its fields are the options, its docstring is the help
    module: str  # of this package; loaded when the command runs
    function: str  # in it: (request, interrupts) -> exit code
    interrupted: str = "interrupted"  # said where Ctrl-C or SIGTERM found nothing to save
    usage: tuple[type[Exception], ...] = (SettingsError,)  # errors that end with exit code 2
    one_thread: bool = True  # unless OMP_NUM_THREADS says otherwise; doctor shows what scripts would get

    @property
    def name(self) -> str:
        return self.function.replace("_", "-")


Request = TypeVar("Request", bound=type[Any])
Asked = TypeVar("Asked")


def changed(request: Asked, **values: Any) -> Asked:
    """The same request with other values; pyright does not see that `command` makes dataclasses."""
    made: Any = request
    return replace(made, **values)


def shared(request: Request) -> Request:
    """Fields that several requests inherit."""
    return dataclass(frozen=True, kw_only=True)(request)


def command(table: list[Command], where: str, **more: Any) -> Callable[[Request], Request]:
    """Make a frozen dataclass of it and enter it into the table; `where` is `module:function`."""

    def enter(request: Request) -> Request:
        made, (module, function) = shared(request), where.split(":")
        table.append(Command(made, module, function, **more))
        return made

    return enter


def argument(metavar: str, words: str, *, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an argument; readable=False: our own sentence says what is wrong with a file."""
    made = Argument(metavar=metavar, help=words, readable=False, **{"show_default": False, **more})
    return field(default=default, metadata={TYPER: made})


def option(metavar: str, words: str, *names: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option with a value, called as the field is unless named."""
    made = Option(*names, metavar=metavar, help=words, readable=False, **more)
    return field(default=default, metadata={TYPER: made})


def flag(name: str, words: str, *short: str) -> Any:
    return field(default=False, metadata={TYPER: Option(name, *short, help=words, metavar="")})


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
    """As on the command line, with - or _, and as the field is called: calc_options, cell_mask, cell-mask."""
    if param.name in ("settings", "help"):
        return []
    long = [word.removeprefix("--") for word in param.opts if word.startswith("--")]
    return [param.name, *long, *(word.replace("-", "_") for word in long)]


# what several commands have; those with words left out say them of their own
optional = partial(option, default=None)
UNSEEN = "Use the policy also for elements it was not trained on; every step is still checked."
unseen_flag = partial(flag, "--allow-unseen", UNSEEN)
calc_option = partial(option, "SPEC", default="emt", autocompletion=completion.calculators)
calc_options_option = partial(
    option, "KEY=VALUE", "An option of the calculator, such as dispersion=true; may be repeated.", "--calc-option",
    default=None,
)  # fmt: skip
settings_option = partial(
    option, "FILE.toml", "Read options from a file (fmax = 0.01, cell = true); those on the command line win.",
    default=None, is_eager=True, callback=from_file,
)  # fmt: skip
FITTING: dict[str, Any] = {
    "default": "auto",
    "show_default": "emt for its metals, else the first installed of chgnet, sevennet, mace; for molecules gfn2",
}
policy_option = partial(option, "NAME|FILE", default="auto", autocompletion=completion.policies)
DEVICE = "Device of the networks of policies and named calculators: cuda, cuda:1."
device_option = partial(option, "NAME", DEVICE, default=None, show_default="cpu")
optimizers_option = partial(option, "NAMES", autocompletion=completion.optimizers)
rattle_option = partial(
    option, "Å", "First displace the atoms at random with this standard deviation along each axis.", default=0.0
)
rattle_seed_option = partial(option, "N", "Seed of --rattle.", default=0, min=0)
recipe_argument = partial(argument, "RECIPE", autocompletion=completion.recipes)
agent_option = partial(option, "NAME", "ddpg, td3, d4pg or sac.", default=None, autocompletion=completion.agents)

memory_option = partial(option, "DIR", "Keep every evaluated geometry there, to learn from; see 'learn'.", default=None)


def quiet_flag(words: str = "No progress on stderr.") -> Any:
    return flag("--quiet", words, "-q")


def set_option(words: str = "Change a setting; may be repeated.") -> Any:
    return option("KEY=VALUE", words, "--set", default=None)
