"""The `relaxion` command: every request becomes a command of typer. torch and ASE are loaded by what needs them."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature, cleandoc
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from relaxion.cli import completion, requests, showing_requests
from relaxion.cli.early import use_one_thread
from relaxion.cli.options import TYPER, Command
from relaxion.version import __version__

FIRST_STEPS = """
[bold]First steps[/bold]

relaxion doctor                        check the installation

relaxion relax alloy.cif               relax it, 0.05 eV/Å

relaxion race alloy.cif --with BFGS    watch it beside BFGS

relaxion --install-completion          completion with TAB in your shell"""
UNITS = "[bold]Units[/bold]: lengths Å, energies eV, forces eV/Å, stresses eV/Å³, times s."


def help_of(request: type[Any]) -> tuple[str, str]:
    """The first line of a docstring; what stands below it as examples, units and exit codes."""
    first, _, below = cleandoc(request.__doc__ or "").partition("\n\n")
    examples = re.findall(r"^relaxion .*", below, re.MULTILINE)
    parts = ["[bold]Examples[/bold]", *examples, *([UNITS] if "Units." in below else [])]
    parts += [f"[bold]Recipes[/bold]: {', '.join(completion.trainable())}"] if _trains(request) else []
    codes = re.search(r"Exit codes(: .*)", below, re.DOTALL)
    parts += [f"[bold]Exit codes[/bold]{codes[1]}"] if codes else []
    return first, "\n\n".join(["", *parts, ""])


def _trains(request: type[Any]) -> bool:
    """Whether it takes recipes with a task, as `train` and `tune` do."""
    return {"recipe", "agent"} <= set(get_type_hints(request))


class Plain(TyperCommand):
    """A command whose --help shows no <bool>."""

    def get_help_option(self, ctx: Any) -> Any:
        found = super().get_help_option(ctx)
        if found is not None:
            found.metavar = ""
        return found


app = typer.Typer(
    name="relaxion",
    help="Relax atomic structures with few force calls.",
    epilog=FIRST_STEPS + help_of(requests.RelaxRequest)[1],
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relaxion {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Relax atomic structures with few force calls."""


def _is_option(declared: Any) -> bool:
    """Arguments come first, also where a request inherits options."""
    return isinstance(declared, OptionInfo)


def _callback(command: Command) -> Callable[..., None]:
    """What typer calls: its parameters are the fields of the request."""

    def run(**values: Any) -> None:
        if command.one_thread:
            use_one_thread()
        from relaxion.cli.ending import exit_code

        raise typer.Exit(exit_code(command, command.request(**values)))

    hints = get_type_hints(command.request)
    run.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=Annotated[hints[field.name], field.metadata[TYPER]],
            )
            for field in sorted(fields(command.request), key=lambda field: _is_option(field.metadata[TYPER]))
        ]
    )
    return run


for _command in (*requests.COMMANDS, *showing_requests.COMMANDS):
    _words, _epilog = help_of(_command.request)
    app.command(_command.name, cls=Plain, help=_words, epilog=_epilog)(_callback(_command))


def main() -> None:
    """The `relaxion` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an Å that a terminal cannot show is no reason to fail
    app()
