"""The `relaxion` command. torch and ASE are loaded by what needs them."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from relaxion import __version__
from relaxion.apps.cli import relaxing_commands, search, showing_commands
from relaxion.apps.cli.command import app, help_of

# commands are registered as they are imported
__all__ = ["app", "main", "relaxing_commands", "search", "showing_commands"]

FIRST_STEPS = """
[bold]First steps[/bold]

relaxion doctor                        check the installation

relaxion relax alloy.cif               relax it, 0.05 eV/Å

relaxion race alloy.cif --with BFGS    watch it beside BFGS

relaxion --install-completion          completion with TAB in your shell"""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relaxion {__version__}")
        raise typer.Exit


@app.callback(epilog=FIRST_STEPS + help_of(relaxing_commands.relax)[1])
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Relax atomic structures with few force calls."""


def main() -> None:
    """The `relaxion` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an Å that a terminal cannot show is no reason to fail
    app()
