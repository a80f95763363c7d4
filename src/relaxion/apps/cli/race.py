"""`relaxion race`: the same structure relaxed by several optimizers, shown side by side in one page."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.optimize.optimize import Optimizer

from relaxion.apps.cli.calculators import AUTO, calculator_for
from relaxion.apps.cli.command import DONE, ERROR, INCOMPLETE
from relaxion.apps.cli.inputs import checked_start, command_line, refuse_folder, sliced
from relaxion.apps.cli.progress import ProgressLine, say, speaks_ascii_only, tell
from relaxion.apps.cli.relax import compared_as_json
from relaxion.apps.compare.checks import emt_note, occupancy_note
from relaxion.apps.compare.comparison import in_words, who_relaxed
from relaxion.apps.report.race import Race, race_page, raced, verdict
from relaxion.apps.report.relaxation import OURS
from relaxion.errors import FileError, SettingsError
from relaxion.paths import without_slice
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import make_potential
from relaxion.train.data.dataset import read
from relaxion.train.judge.optimizers import PolicyChoice, check_policy, chosen_optimizers, policy_argument
from relaxion.train.judge.runs import RelaxationTask

MOST_RACERS = 5  # beside ours: more films than that nobody follows, and the page has room for


@dataclass(frozen=True)
class RaceRequest:
    """What `relaxion race` was asked."""

    file: Path
    optimizers: str
    out: Path
    calc: str
    policy: str
    allow_unseen: bool
    cell: bool
    fmax: float  # eV/Å
    steps: int
    index: int | None
    rattle: float  # Å
    seed: int
    as_json: bool
    force: bool
    quiet: bool


def run_race(request: RaceRequest) -> int:
    check_policy(policy_argument(request.policy))
    optimizers = chosen_optimizers(request.optimizers, "--with")
    if not 1 <= len(optimizers) <= MOST_RACERS:
        raise SettingsError(f"--with names 1 to {MOST_RACERS} optimizers, got {len(optimizers)}; try --with BFGS,FIRE")
    check_page(request.out, request.force)
    atoms, hints = _structure(request.file, request.index)
    if request.calc == AUTO:
        choice = calculator_for([atoms])
        request = replace(request, calc=choice.name)
        hints += filter(None, [choice.in_words()])
    with closing(make_potential(request.calc)) as potential:
        start = checked_start(atoms, potential, request.rattle, request.seed, free_cell=request.cell)
        return _race(request, potential, optimizers, start, hints)


def _race(
    request: RaceRequest, potential: Potential, optimizers: dict[str, type[Optimizer]], start: Atoms, hints: list[str]
) -> int:
    choice = PolicyChoice.of(request.policy, start, allow_unseen=request.allow_unseen)
    said = [occupancy_note(start), emt_note(start, request.calc), potential.assumption(start), choice.note]
    hints = [*hints, *filter(None, said)]
    task = RelaxationTask(start, potential, request.fmax, request.steps, request.cell, record=True)
    progress = ProgressLine(quiet=request.quiet)
    label = str(request.file)
    with progress.line():
        runs = raced(task, choice, optimizers, lambda name: progress.reporter(label, name))
    done = Race(label, start, runs, request.fmax, request.calc, request.cell, command_line(), hints)
    _announce(done, race_page(done).save(request.out, force=request.force), request)
    if runs[OURS].error is not None:
        return ERROR
    return DONE if runs[OURS].converged else INCOMPLETE


def check_page(path: Path, force: bool) -> None:
    """Refuse a place where no page can be written, before any force call."""
    refuse_folder("--out", path, "race.html")
    if path.exists() and not force:
        raise FileError(f"{path} exists; try --force to replace it, or another --out")
    if not path.absolute().parent.is_dir():
        raise FileError(f"--out {path}: the folder {path.absolute().parent} does not exist; make it first")


def _structure(file: Path, index: int | None) -> tuple[Atoms, list[str]]:
    file, words = without_slice(file)
    images = read(file)
    images = images if words is None else [images[number] for number in sliced(file, words, len(images))]
    if index is None:
        hint = f"{file} holds {len(images)} structures; the first one races, --index chooses another"
        return images[0], [hint] if len(images) > 1 else []
    if not -len(images) <= index < len(images):
        raise SettingsError(f"--index {index}: {file} holds {len(images)} structures, 0 to {len(images) - 1}")
    return images[index], []


def _announce(race: Race, page: Path, request: RaceRequest) -> None:
    if request.as_json:
        tell(json.dumps(_as_plain(race, page), ensure_ascii=speaks_ascii_only(sys.stdout), allow_nan=False))
    else:
        beside = in_words(race.runs[OURS], race.others)
        ours = f"{OURS} {race.runs[OURS].force_calls} by {who_relaxed(race.runs[OURS])}"
        tell(f"{race.label}: {race.formula}: {verdict(race)} ({ours}, {beside}), written to {page}")
    for name, run in race.runs.items():
        if run.error is not None:
            say(f"{race.label}: {name} failed: {run.error}")
    for hint in race.hints if not request.quiet else ():
        say(f"{race.label}: {hint}")


def _as_plain(race: Race, page: Path) -> dict[str, Any]:
    """What --json prints."""
    ours = race.runs[OURS]
    runs = {name: compared_as_json(run) for name, run in race.runs.items()}
    return {
        "file": race.label, "formula": race.formula, "winners": race.winners, "policy": ours.policy_used,
        "fallback_used": ours.fallback_used, "runs": runs, "written_to": str(page),
    }  # fmt: skip
