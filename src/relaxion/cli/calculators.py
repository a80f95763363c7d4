"""`relaxion calculators`: what --calc understands, and what is missing for the rest."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxion.cli.progress import tell
from relaxion.potentials.registry import PotentialEntry, known_potentials


def list_calculators(*, as_json: bool) -> None:
    """A table for people, or one JSON object per line."""
    entries = known_potentials()
    if as_json:
        for entry in entries:
            tell(json.dumps(asdict(entry), ensure_ascii=False))
        return
    Console(highlight=False).print(_table(entries))


def _table(entries: list[PotentialEntry]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("--calc", "what", "elements", "state"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "--calc")
    for entry in entries:
        # Text: square brackets of 'relaxion[chgnet]' are no markup
        state = "ready" if entry.available else f"missing: {entry.how_to_install}"
        table.add_row(entry.spec, entry.description, _elements(entry), Text(state))
    return table


def _elements(entry: PotentialEntry) -> str:
    return "no list" if entry.elements is None else " ".join(entry.elements)
