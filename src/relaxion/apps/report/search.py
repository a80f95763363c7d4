"""A search as a page: staircase of the best energy, the lowest minima in 3D, what each kind of move gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms

from relaxion.apps.report.page import (
    FAINT,
    HOW_TO_TURN,
    Page,
    Part,
    Reel,
    facts,
    film_parts,
    fixed,
    formula,
    notes,
    plot,
    signed,
    table,
    tile,
    versions,
)
from relaxion.apps.report.relaxation import citation
from relaxion.optimizer.point import Frame
from relaxion.search.moves import free_atoms
from relaxion.search.run import SearchResult, gains, staircase
from relaxion.search.walk import Minimum

MOST_SHOWN = 6  # minima in 3D
MOST_LISTED = 200
BESIDE = "plain basin hopping"


@dataclass(frozen=True, eq=False)
class SearchReport:
    """What the page says."""

    label: str
    start: Atoms
    result: SearchResult
    calculator: str
    command: str
    beside: SearchResult | None = None  # plain basin hopping from the same start with as many calls
    hints: Sequence[str] = ()


def search_page(told: SearchReport) -> Page:
    """The whole page."""
    result = told.result
    name = formula(told.start)
    if not result.found:
        return Page(f"No minimum of {name}", _eyebrow(told), result.stopped, [_facts(told), citation()])
    lowest = result.found[0]
    shown = result.found[:MOST_SHOWN]
    reels = [_best_so_far(result)]
    for rank, one in enumerate(shown[1:], 2):
        above = 1000 * (one.energy_ev - lowest.energy_ev)
        reels.append(_reel(f"{rank}: {above:.1f} meV above", one, [_frame(one)]))
    films, thinned = film_parts(reels)
    said = ["Replay shows how the first one was found.", HOW_TO_TURN]
    said += [FAINT] if films[0]["fixed"] else []
    parts: list[Part] = [
        {"kind": "tiles", "title": "Result", "tiles": _tiles(told)},
        _staircase(told),
        _moves(result),
        {"kind": "film", "title": "The lowest minima", "films": films, "notes": said, "at_end": True},
        _minima(result),
        _facts(told),
        *notes([*thinned, *told.hints]),
        citation(),
    ]
    return Page(
        title=f"{name}: {fixed(lowest.energy_ev, '.4f')} eV",
        eyebrow=_eyebrow(told),
        lead=f"{len(result.found)} distinct minima in {result.force_calls} force calls; {result.stopped}. Energies are "
        f"relative to the lowest one, which was found {_times(lowest)}, first after {lowest.found_at_call} calls.",
        parts=parts,
        last_call=result.force_calls,
    )


def _eyebrow(told: SearchReport) -> str:
    return f"Relaxion search · {told.label} · {formula(told.start)}"


def _times(minimum: Minimum) -> str:
    return "once" if minimum.times_found == 1 else f"{minimum.times_found} times"


def _tiles(told: SearchReport) -> list[dict[str, str]]:
    result = told.result
    lowest = result.found[0]
    gained = result.history[0].best_ev - lowest.energy_ev
    tiles = [
        tile("Lowest energy", fixed(lowest.energy_ev, ".4f"), "eV", f"{gained:.3f} eV below the relaxed start", "good"),
        tile("Found after", str(lowest.found_at_call), "force calls", f"of {result.force_calls}"),
        tile("Distinct minima", str(len(result.found)), "", f"{len(result.history) - 1} hops"),
    ]
    if told.beside is not None and told.beside.found:
        behind = 1000 * (told.beside.found[0].energy_ev - lowest.energy_ev)
        note = f"{'above' if behind >= 0 else 'below'} this search, after {told.beside.force_calls} force calls"
        tiles.append(tile(BESIDE.capitalize(), signed(behind, ".1f"), "meV", note))
    return tiles


def _staircase(told: SearchReport) -> Part:
    runs = [("Relaxion search", told.result)]
    if told.beside is not None:
        runs.append((BESIDE, told.beside))
    stairs = {name: staircase(run) for name, run in runs if run.found}
    zero = min(energy for steps in stairs.values() for _, energy in steps)
    series = []
    for name, steps in stairs.items():
        lowest = dict(steps)  # by call, level until the energy falls; of steps at the same call the last one stands
        heights = [round(energy - zero, 6) for energy in lowest.values()]
        series.append({"name": name, "mode": "stairs", "x": list(lowest), "y": heights})
    ends = "; ".join(f"{one['name']} ends {one['y'][-1]:.4g} eV above the lowest" for one in series)
    labels = "Best energy over force calls", "force calls", "above the lowest (eV)"
    return plot(*labels, series, f"Staircases; {ends}.", span=7)


def _moves(result: SearchResult) -> Part:
    rows = []
    for kind, own in sorted(gains(result).items(), key=lambda item: -item[1]["gained_ev"]):
        calls = own["force_calls"] / own["hops"]
        rows.append([kind, str(own["hops"]), f"{calls:.1f}", str(own["new_minima"]), f"{own['gained_ev']:.3f}"])
    headings = ["Kind", "Hops", "Calls each", "New minima", "Gained (eV)"]
    note = "Gained: how far hops of this kind lowered the best energy."
    return table("What each kind of move gained", headings, rows, note=note, span=5)


def _best_so_far(result: SearchResult) -> Reel:
    """A film: the best structure whenever a better one was found, up to the lowest."""
    found_at = {minimum.found_at_call: minimum for minimum in result.found}
    better = [found_at[calls] for calls, _ in staircase(result)[:-1] if calls in found_at]
    frames = [_frame(minimum) for minimum in better] or [_frame(result.found[0])]
    return _reel("1: lowest", result.found[0], frames, winner=True)


def _frame(minimum: Minimum) -> Frame:
    return Frame(minimum.found_at_call, minimum.atoms.positions.astype(np.float32), minimum.atoms.cell.array)


def _reel(name: str, minimum: Minimum, frames: list[Frame], *, winner: bool = False) -> Reel:
    atoms = minimum.atoms
    held = frozenset(range(len(atoms))) - frozenset(free_atoms(atoms).tolist())
    end = f"found {_times(minimum)}, first at call {minimum.found_at_call}"
    return Reel(name, atoms.numbers, bool(atoms.pbc.any()), frames, [], end, True, winner, held)


def _minima(result: SearchResult) -> Part:
    zero = result.found[0].energy_ev
    rows = []
    for rank, minimum in enumerate(result.found[:MOST_LISTED], start=1):
        above = f"{1000 * (minimum.energy_ev - zero):.2f}"
        numbers = [str(minimum.times_found), str(minimum.found_at_call)]
        rows.append([str(rank), fixed(minimum.energy_ev, ".5f"), above, *numbers])
    left = len(result.found) - len(rows)
    headings = ["Rank", "Energy (eV)", "Above the lowest (meV)", "Times found", "First at call"]
    note = f"{left} more are in minima.extxyz." if left else "All are in minima.extxyz."
    return table("Distinct minima by energy", headings, rows, note=note)


def _facts(told: SearchReport) -> Part:
    cell = "periodic" if told.start.pbc.any() else "not periodic"
    found = [
        ("Structure", f"{formula(told.start)}, {len(told.start)} atoms, {cell}"),
        ("Calculator", told.calculator),
        ("Hops chosen by", told.result.choice),
        ("Wall time", f"{told.result.seconds:.1f} s"),
        ("Command", told.command),
        ("Versions", versions()),
    ]
    return facts("How it was made", found)
