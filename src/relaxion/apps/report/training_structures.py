"""What the newest assessment found, structure by structure: profile, scatter, parity, films of the ten hardest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxion.apps.report.page import (
    HOW,
    Part,
    Reel,
    count,
    film_parts,
    fixed,
    outcome_words,
    plot,
    rounded,
    short,
    signed,
    table,
)
from relaxion.apps.report.run import WatchedRun
from relaxion.optimizer.point import Frame
from relaxion.train.judge.assessment import MILLI
from relaxion.train.judge.runs import Reading, Score
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM, performance_profile

POLICY = "Policy"
CORE_NAME = "classical optimizer"
RATIOS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
CALL_MARKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
MOST_DOTS = 400  # of a scatter: so many structures, evenly chosen
OLDER = "a run of an older version, or one not assessed yet"


@dataclass(frozen=True)
class AssessmentColumns:
    """Columns of an assessment, checked."""

    labels: Sequence[str]
    n_atoms: Sequence[int]
    outcomes: Sequence[str]
    scores: Mapping[str, Sequence[Score]]  # ours first; others only where they are known start by start
    worst: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def others(self) -> list[str]:
        return [name for name in self.scores if name != POLICY]


def structure_parts(run: WatchedRun, film_bytes: int) -> tuple[list[Part], list[str]]:
    """The parts, and sentences about what is missing. `film_bytes` 0: without films."""
    if run.assessment is not None and "returns" in run.assessment:
        return _episode_parts(run.assessment), []
    if not run.on_structures:
        return [], []
    if run.assessment is None:
        return [], [
            f"assessment.json is missing ({OLDER}): no performance profile, no scatter, no energy parity and no films."
        ]
    try:
        assessed = _assessed(run.assessment, run.baselines)
        beside = (_profile, _scatter, _parity) if assessed.others else ()
        parts = [make(assessed) for make in beside]
        parts += [_gallery(assessed, film_bytes)] if film_bytes and assessed.worst else []
    except (AttributeError, ArithmeticError, KeyError, TypeError, ValueError, IndexError) as error:
        return [], [f"assessment.json is damaged ({error!r}); nothing of it is shown."]
    if not assessed.others:
        return parts, [
            f"baselines.json has no results of single starts ({OLDER}): BFGS and FIRE are shown as means only."
        ]
    return parts, []


def _assessed(record: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]]) -> AssessmentColumns:
    found = record["structures"]
    cap = int(record["cap"])
    n_atoms = [int(n) for n in found["n_atoms"]]
    outcomes = [str(outcome) for outcome in found["outcome"]]
    converged = [outcome == "converged" for outcome in outcomes]
    scores = {POLICY: _scores(found["force_calls"], converged, found["energy_ev"], n_atoms, cap)}
    for name, row in baselines.items():
        calls = row.get("force_calls")
        energies = row.get("energy_ev")
        if isinstance(calls, list) and isinstance(energies, list) and len(calls) == len(energies) == len(n_atoms):
            converged = [energy is not None for energy in energies]
            scores[CORE_NAME if name == "core" else name] = _scores(calls, converged, energies, n_atoms, cap)
    labels = [" ".join(filter(None, words)) for words in zip(found["formula"], found["label"], strict=True)]
    return AssessmentColumns(labels, n_atoms, outcomes, scores, record["worst"])


def _scores(
    calls: Sequence[int], converged: Sequence[bool], energies: Sequence[float | None], n_atoms: Sequence[int], cap: int
) -> list[Score]:
    return [
        Score(done, int(spent), int(spent) if done else cap, energy if done else None, n, 0.0, 0.0, 0.0)
        for spent, done, energy, n in zip(calls, converged, energies, n_atoms, strict=True)
    ]


def _profile(assessed: AssessmentColumns) -> Part:
    """By Dolan and Moré."""
    profiles = performance_profile(assessed.scores)
    right = float(np.clip(max((r[-1] for r, _ in profiles.values() if len(r)), default=2.0), 2.0, RATIOS[-1]))
    series = []
    ends = []
    for place, (name, (ratios, shares)) in enumerate(profiles.items()):
        seen = ratios <= right
        stairs = {1.0: 0.0} | dict(zip(rounded(ratios[seen]), rounded(shares[seen]), strict=True))
        first = stairs[1.0]
        end = max(stairs.values())
        x = [*stairs, right]
        y = [*stairs.values(), end]
        series.append({"name": name, "x": x, "y": y, "mode": "stairs", "style": place})
        ends.append(f"{name} is first on {first:.0%} and solves {end:.0%} within {right:g}")
    labels = "Performance profile", "force calls over the fewest (τ)", "share solved within τ"
    ranges = {"x_log": list(RATIOS), "x_range": [1, right], "y_range": [0, 1.02]}
    return plot(*labels, series, f"{'; '.join(ends)}.", span=4, id="profile", **ranges)


def _scatter(assessed: AssessmentColumns) -> Part:
    places = _chosen(len(assessed))
    ours = [assessed.scores[POLICY][place].charged for place in places]
    series = []
    better = []
    for number, name in enumerate(assessed.others):
        theirs = [assessed.scores[name][place].charged for place in places]
        series.append({"name": name, "x": theirs, "y": ours, "mode": "dots", "style": number + 1})
        fewer = sum(a < b for a, b in zip(ours, theirs, strict=True))
        better.append(f"fewer calls than {name} on {fewer} of {len(places)}")
    every = [*ours, *(x for one in series for x in one["x"])]
    lowest = max(0.9, 0.8 * min(every))
    highest = 1.15 * max(2, *every)
    rows = [
        [assessed.labels[p], str(assessed.n_atoms[p]), *(_calls(one[p]) for one in assessed.scores.values())]
        for p in places
    ]
    heads = ["Structure", "Atoms", *assessed.scores]
    labels = "Structure by structure", "force calls of the other optimizer", "force calls of the policy"
    ranges = {"log": True, "x_log": list(CALL_MARKS)} | _square(lowest, highest)
    return plot(
        *labels, series, f"the policy needs {', '.join(better)}.", span=4, id="scatter", **ranges,
        note="Below the dashed line the policy is better.",
        table=table("Force calls, structure by structure", heads, rows),
    )  # fmt: skip


def _square(low: float, high: float) -> dict[str, Any]:
    """The same range on both axes, with the line where both are equal."""
    return {"x_range": [low, high], "y_range": [low, high], "diagonal": True}


def _parity(assessed: AssessmentColumns) -> Part:
    """Final energies per atom: on the line, both found the same minimum."""
    name = "BFGS" if "BFGS" in assessed.others else assessed.others[0]
    pairs = [
        (place, a.energy_ev / a.n_atoms, b.energy_ev / b.n_atoms)
        for place, (a, b) in enumerate(zip(assessed.scores[POLICY], assessed.scores[name], strict=True))
        if a.energy_ev is not None and b.energy_ev is not None
    ]
    gaps = np.array([ours - theirs for _, ours, theirs in pairs])
    same = int((np.abs(gaps) <= SAME_MINIMUM_EV_PER_ATOM).sum())
    lower = int((gaps < -SAME_MINIMUM_EV_PER_ATOM).sum())
    higher = int((gaps > SAME_MINIMUM_EV_PER_ATOM).sum())
    values = [value for _, *both in pairs for value in both]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = max(0.06 * (high - low), SAME_MINIMUM_EV_PER_ATOM)
    near = f"{1000 * SAME_MINIMUM_EV_PER_ATOM:g} meV per atom"
    words = f"{same} of {len(pairs)} within {near}, {lower} lower, {higher} higher"
    shown = [pairs[k] for k in _chosen(len(pairs))]
    rows = [
        [assessed.labels[p], fixed(theirs, ".4f"), fixed(ours, ".4f"), signed(1000 * (ours - theirs), ".1f")]
        for p, ours, theirs in shown
    ]
    heads = ["Structure", f"{name} (eV/atom)", "Policy (eV/atom)", "Gap (meV/atom)"]
    dots = {"x": rounded(theirs for _, _, theirs in shown), "y": rounded(ours for _, ours, _ in shown)}
    series = [{"name": f"policy beside {name}", "mode": "dots", "style": 0, **dots}]
    labels = "Final energies", f"{name} (eV per atom)", "policy (eV per atom)"
    summary = f"final energies of policy and {name} where both converged: {words}."
    return plot(
        *labels, series, summary, span=4, id="parity", x_parts=True, **_square(low - room, high + room),
        note=f"{words}.", empty="no structure converged with both", table=table("Final energies", heads, rows),
    )  # fmt: skip


def _gallery(assessed: AssessmentColumns, film_bytes: int) -> Part:
    reels = [_reel(place, film, assessed) for place, film in enumerate(assessed.worst)]
    films, notes = film_parts(reels, film_bytes)
    for film, worst in zip(films, assessed.worst, strict=True):
        film["summary"] = _beside(assessed, int(worst["place"]))
    title = f"The {len(films)} structures that took longest"
    return {"id": "worst", "kind": "gallery", "title": title, "films": films, "notes": [HOW, *notes]}


def _reel(number: int, film: Mapping[str, Any], assessed: AssessmentColumns) -> Reel:
    place = int(film["place"])
    numbers = np.array(film["numbers"], dtype=np.int64)
    cells = film["cells_angstrom"] * (1 if len(film["cells_angstrom"]) > 1 else len(film["call"]))
    frames = []
    before = None
    for call, row, cell in zip(film["call"], film["positions_milliangstrom"], cells, strict=True):
        positions = (np.array(row).reshape(len(numbers), 3) / MILLI).astype(np.float32)
        frames.append(Frame(int(call), positions, np.array(cell, dtype=np.float64).reshape(3, 3), before))
        if not (np.isfinite(positions).all() and np.isfinite(frames[-1].cell).all()):
            raise ValueError(f"frame {call} of a film is not finite")
        before = int(call)
    readings = [
        Reading(int(call), energy, fmax)
        for call, energy, fmax in zip(film["call"], film["energy_ev"], film["fmax_ev_per_angstrom"], strict=True)
    ]
    outcome = assessed.outcomes[place]
    name = f"{number + 1}. {assessed.labels[place]}"
    end = outcome_words(outcome, film["fmax_ev_per_angstrom"][-1])
    return Reel(name, numbers, bool(film["periodic"]), frames, readings, end, outcome == "converged")


def _beside(assessed: AssessmentColumns, place: int) -> str:
    """`60 calls, step limit reached · BFGS 22, FIRE 41`."""
    outcome = assessed.outcomes[place]
    failed = "" if outcome == "converged" else f", {outcome_words(outcome)}"
    ours = f"{assessed.scores[POLICY][place].charged} calls{failed}"
    others = ", ".join(f"{name} {_calls(assessed.scores[name][place])}" for name in assessed.others)
    return f"{ours} · {others}" if others else ours


def _episode_parts(record: Mapping[str, Any]) -> list[Part]:
    """Returns of the newest assessment, the worst first."""
    returns = sorted(value for value in record["returns"] if isinstance(value, int | float))
    if not returns:
        return []
    series = [{"name": "return", "x": list(range(1, len(returns) + 1)), "y": rounded(returns, 5)}]
    labels = "Returns of the newest assessment", "episodes, the worst first", "return"
    summary = f"{count(len(returns))} episodes from {short(returns[0])} to {short(returns[-1])}."
    return [plot(*labels, series, summary, id="episodes", x_range=[1, max(2, len(returns))])]


def _calls(score: Score) -> str:
    return str(score.spent) if score.converged else f"failed ({score.charged})"


def _chosen(number: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, number - 1, min(number, MOST_DOTS))})
