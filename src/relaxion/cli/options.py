"""The table of commands and the options that several of them share. Loads neither torch nor ASE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar

from typer import Argument, Option

from relaxion.cli import completion
from relaxion.errors import PolicyError, SettingsError, UnknownPotentialError

TYPER = "typer"  # in a field's metadata: its argument or option
AS_IN_RELAX = "As in 'relax'."
RELAXING = (SettingsError, UnknownPotentialError, PolicyError)  # wrong --calc and --policy are wrong usage


@dataclass(frozen=True)
class Command:
    """One command: its request, the function that answers it, and what is the same whatever was asked."""

    request: type[Any]  # its fields are the options, its docstring is the help
    module: str  # of this package; loaded when the command runs
    function: str  # in it: (request, interrupts) -> exit code
    interrupted: str  # said where Ctrl-C or SIGTERM found nothing to save
    usage: tuple[type[Exception], ...]  # errors that end with exit code 2
    one_thread: bool  # set before NumPy and torch are loaded: on small structures more threads only make times worse

    @property
    def name(self) -> str:
        return self.function.replace("_", "-")


COMMANDS: list[Command] = []
Request = TypeVar("Request", bound=type[Any])


def command(
    where: str,
    *,
    interrupted: str = "interrupted",
    usage: tuple[type[Exception], ...] = (SettingsError,),
    one_thread: bool = False,
) -> Callable[[Request], Request]:
    """Make a frozen dataclass of it and enter it into the table; `where` is `module:function`."""

    def enter(request: Request) -> Request:
        made, (module, function) = dataclass(frozen=True)(request), where.split(":")
        COMMANDS.append(Command(made, module, function, interrupted, usage, one_thread))
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
    return field(default=False, metadata={TYPER: Option(name, *short, help=words)})


def unseen_flag() -> Any:
    words = "Let the policy speak about elements it was not trained on; the guard watches it all the same."
    return flag("--allow-unseen", words)


def quiet_flag(words: str) -> Any:
    return flag("--quiet", words, "-q")


def calc_option(words: str = AS_IN_RELAX) -> Any:
    return option("SPEC", words, default="emt", autocompletion=completion.calculators)


def policy_option(words: str = AS_IN_RELAX, default: str | None = "auto") -> Any:
    return option("NAME|FILE", words, default=default, autocompletion=completion.policies)


def memory_option() -> Any:
    return option("DIR", "Keep every evaluated geometry there, to learn from; see 'learn'.", default=None)


def optimizers_option(words: str, *names: str, default: str) -> Any:
    return option("NAMES", words, *names, default=default, autocompletion=completion.optimizers)


def rattle_option() -> Any:
    return option("Å", "Move the atoms at random by so much along each axis first.", default=0.0)


def recipe_argument(words: str) -> Any:
    return argument("RECIPE", words, autocompletion=completion.recipes)


def agent_option() -> Any:
    return option("NAME", "ddpg, td3, d4pg or sac.", default=None, autocompletion=completion.agents)


def set_option(words: str = "Another value for a setting; may be repeated.") -> Any:
    return option("KEY=VALUE", words, "--set", default=None)
