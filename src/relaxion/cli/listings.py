"""`relaxion calculators` and `relaxion policies`: what --calc and --policy understand, and the model card of one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relaxion.bundles import KnownPolicy, PolicyBundle, find_policy, known_policies, none_found
from relaxion.bundles.card import percent
from relaxion.bundles.library import own_files, shipped_names, user_folder
from relaxion.cli.ending import DONE, Interrupts
from relaxion.cli.progress import print_table, say, tell
from relaxion.cli.showing_requests import CalculatorsRequest, PoliciesRequest
from relaxion.errors import SettingsError
from relaxion.potentials.registry import PotentialEntry, known_potentials

REMOVE = "remove"


def calculators(request: CalculatorsRequest, _: Interrupts) -> int:
    """A table for people, or one JSON object per line."""
    entries = known_potentials()
    if request.as_json:
        for entry in entries:
            tell(json.dumps(asdict(entry), ensure_ascii=False))
    else:
        columns = [("--calc", True), ("what", False), ("elements", False), ("state", False)]
        print_table(columns, map(_calculator, entries))
    return DONE


def _calculator(entry: PotentialEntry) -> list[str]:
    state = "ready" if entry.available else f"missing: {entry.how_to_install}"
    return [entry.spec, entry.description, "no list" if entry.elements is None else " ".join(entry.elements), state]


def policies(request: PoliciesRequest, _: Interrupts) -> int:
    """All of them, or the model card of one as Markdown or JSON."""
    if request.name == REMOVE:
        tell(f"{_removed(request.removed)} was removed")
        return DONE
    if request.removed is not None:
        raise SettingsError(f"one policy at a time: 'relaxion policies {request.name}' shows its card")
    if request.name is not None:
        bundle = find_policy(request.name)
        tell(json.dumps(_values(bundle), ensure_ascii=False) if request.as_json else bundle.card_text().rstrip("\n"))
        return DONE
    known = known_policies()
    if request.as_json:
        for one in known:
            tell(json.dumps(_as_plain(one), ensure_ascii=False))
    elif known:
        headings = ("name", "kind", "elements", "atoms", "potential", "force calls", "size", "from")
        print_table([(heading, heading in ("name", "size", "from")) for heading in headings], map(_policy, known))
        for one in known:
            if one.error is not None:
                say(f"relaxion: {one.error}")
    else:
        say(f"relaxion: no policies: {none_found()}")
    return DONE


def _removed(name: str | None) -> Path:
    """The file of a policy of the user's own, gone now with its card."""
    if name is None:
        raise SettingsError("name the policy: relaxion policies remove NAME")
    if name in shipped_names():
        raise SettingsError(f"{name} ships with relaxion and cannot be removed; --policy none relaxes without it")
    if name not in own_files():
        raise SettingsError(f"there is no policy named '{name}' in {user_folder()}; 'relaxion policies' lists yours")
    file = own_files()[name]
    file.unlink()
    file.with_suffix(".md").unlink(missing_ok=True)
    return file


def _as_plain(known: KnownPolicy) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": known.name, "file": str(known.path), "shipped": known.shipped}
    if known.bundle is None:
        return plain | {"error": known.error}
    return plain | _values(known.bundle, with_settings=False) | {"name": known.name}


def _values(bundle: PolicyBundle, *, with_settings: bool = True) -> dict[str, Any]:
    card = bundle.card.model_dump(mode="json", exclude=None if with_settings else {"training_settings"})
    own = {"name": bundle.name, "kind": bundle.kind, "n_numbers": bundle.n_numbers}
    return own | {"weights_sha256": bundle.weights_sha256, **card}


def _policy(known: KnownPolicy) -> list[str]:
    size, origin = f"{known.path.stat().st_size / 1000:.0f} kB", "relaxion" if known.shipped else "you"
    if known.bundle is None:
        return [known.name, "unreadable", "–", "–", "–", "–", size, origin]  # the sentence why comes below
    card = known.bundle.card
    atoms, calls = f"{card.smallest_n_atoms}–{card.largest_n_atoms}", _result(known.bundle)
    return [known.name, known.bundle.kind, " ".join(card.elements), atoms, card.potential, calls, size, origin]


def _result(bundle: PolicyBundle) -> str:
    own, source = bundle.card.policy_result, bundle.card.learned_from
    if own is None and source is not None:
        calls = f", calls {source.calls_ratio:.2f}" if source.calls_ratio is not None else ""
        return f"error {source.error_ratio:.2f}{calls} of {source.origin}"
    if own is None:
        return "never assessed"
    others = [f"{r.optimizer} {r.mean_force_calls:.1f}" for r in bundle.card.results if r is not own]
    failed = "" if own.success_rate in (None, 1) else f", {percent(own.success_rate)} converged"
    return f"{own.mean_force_calls:.1f}{failed}" + (f" ({', '.join(others)})" if others else "")
