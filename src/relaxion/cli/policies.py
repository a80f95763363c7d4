"""`relaxion policies`: which policies there are, or the model card of one."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxion.bundles import KnownPolicy, PolicyBundle, find_policy, known_policies, none_found
from relaxion.bundles.card import percent
from relaxion.cli.progress import say, tell
from relaxion.errors import PolicyError

DONE, ERROR = 0, 1


def list_policies(*, as_json: bool) -> int:
    """A table for people, or one JSON object per line."""
    known = known_policies()
    if as_json:
        for one in known:
            tell(json.dumps(_as_plain(one), ensure_ascii=False))
    elif known:
        Console(highlight=False).print(_table(known))
        for one in known:
            if one.error is not None:
                say(f"relaxion: {one.error}")
    else:
        say(f"relaxion: no policies: {none_found()}")
    return DONE


def show_policy(name_or_path: str, *, as_json: bool) -> int:
    """The model card, as Markdown or as JSON."""
    try:
        bundle = find_policy(name_or_path)
    except PolicyError as error:
        say(f"relaxion: {error}")
        return ERROR
    tell(json.dumps(_values(bundle), ensure_ascii=False) if as_json else bundle.card_text().rstrip("\n"))
    return DONE


def _as_plain(known: KnownPolicy) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": known.name, "file": str(known.path), "shipped": known.shipped}
    if known.bundle is None:
        return plain | {"error": known.error}
    return plain | _values(known.bundle, with_settings=False) | {"name": known.name}


def _values(bundle: PolicyBundle, *, with_settings: bool = True) -> dict[str, Any]:
    card = bundle.card.model_dump(mode="json", exclude=None if with_settings else {"training_settings"})
    own = {"name": bundle.name, "kind": bundle.kind, "n_numbers": bundle.n_numbers}
    return own | {"weights_sha256": bundle.weights_sha256, **card}


def _table(known: list[KnownPolicy]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "kind", "elements", "atoms", "potential", "force calls", "size", "from"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("name", "size", "from"))
    for one in known:
        table.add_row(one.name, *_cells(one), "relaxion" if one.shipped else "you")
    return table


def _cells(known: KnownPolicy) -> list[str | Text]:
    size = f"{known.path.stat().st_size / 1000:.0f} kB"
    if known.bundle is None:
        return ["unreadable", "–", "–", "–", "–", size]  # the sentence why comes below
    card = known.bundle.card
    atoms = f"{card.smallest_n_atoms}–{card.largest_n_atoms}"
    # Text: square brackets of a path are no markup
    return [known.bundle.kind, " ".join(card.elements), atoms, Text(card.potential), _result(known.bundle), size]


def _result(bundle: PolicyBundle) -> str:
    own = bundle.card.policy_result
    if own is None:
        return "never assessed"
    others = [f"{r.optimizer} {r.mean_force_calls:.1f}" for r in bundle.card.results if r is not own]
    failed = "" if own.success_rate in (None, 1) else f", {percent(own.success_rate)} converged"
    return f"{own.mean_force_calls:.1f}{failed}" + (f" ({', '.join(others)})" if others else "")
