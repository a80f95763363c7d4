"""`relaxion report`, `watch` and `race`: pages of what lies on disk, and of one structure relaxed several times."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.optimize.optimize import Optimizer

from relaxion.apps.cli.command import DONE, ERROR, INCOMPLETE
from relaxion.apps.cli.inputs import (
    AUTO,
    calculator_for,
    checked_start,
    command_line,
    emt_note,
    occupancy_note,
    refuse_folder,
    sliced,
)
from relaxion.apps.cli.progress import ProgressLine, counted, say, speaks_ascii_only, tell
from relaxion.apps.cli.relax import compared_as_json
from relaxion.apps.comparison import in_words, who_relaxed
from relaxion.apps.relax_many.results import MANIFEST
from relaxion.apps.report.many import ManyFolder, many_page
from relaxion.apps.report.page import formula
from relaxion.apps.report.relaxation import OURS, RelaxationReport, policy_in_words, race_page, raced, verdict
from relaxion.apps.report.run import watched
from relaxion.apps.report.training import MOST_RUNS, TrainingRuns
from relaxion.apps.report.view import report
from relaxion.apps.result_folder import PAGE, stem
from relaxion.errors import FileError, SettingsError
from relaxion.paths import without_slice
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import make_potential
from relaxion.train.data.dataset import read
from relaxion.train.judge.runs import PolicyChoice, RelaxationTask, check_policy, chosen_optimizers, policy_argument


def write_report(path: Path, out: Path | None, against: Sequence[Path], *, force: bool) -> int:
    page = out or (path / PAGE if path.is_dir() else Path(f"{stem(path)}.html"))
    refuse_folder("--out", page, PAGE)
    if against and not (path / MANIFEST).exists():
        raise SettingsError(f"--against compares folders of 'relax-many', and {path} is not one")
    made = many_page(path, against) if (path / MANIFEST).exists() else report(path)
    tell(f"{path}: written to {made.save(page, force=force)}")
    return DONE


def watch_runs(runs: Sequence[Path], port: int, save: Path | None, *, force: bool) -> int:
    """Serve until interrupted, or write the page."""
    if len(runs) > MOST_RUNS:
        raise SettingsError(f"{len(runs)} runs are more than a page can show; name up to {MOST_RUNS}")
    twice = [run for place, run in enumerate(runs) if run.absolute() in [r.absolute() for r in runs[:place]]]
    if twice:
        raise SettingsError(f"{twice[0]} is given twice; name each run once")
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port is a number from 0 (any) to 65535, got {port}")
    many = (runs[0] / MANIFEST).exists()
    shown = ManyFolder(runs[0], runs[1:]) if many else TrainingRuns(watched(runs))
    if save is None:
        return _serve(shown, counted(len(runs), "run"), port)
    refuse_folder("--save", save, "page.html")
    shown.poll(seconds=600.0)
    tell(f"{counted(len(runs), 'run')} -> {shown.page().save(save, force=force)}")
    return DONE


def _serve(shown: ManyFolder | TrainingRuns, words: str, port: int) -> int:
    try:
        from relaxion.apps.report.live import Board, free_socket, server
    except ImportError as error:
        say(f"relaxion: a live page needs starlette and uvicorn ({error}); try: pip install 'relaxion[live]'")
        return ERROR
    board = Board(shown)
    with free_socket(port) as bound:
        taken = bound.getsockname()[1]
        if port not in (0, taken):
            say(f"relaxion: port {port} is taken, so the page is at {taken}")
        running = server(board, bound)
        tell(f"{words}: http://127.0.0.1:{taken}/ (Ctrl-C ends it)")
        running.run(sockets=[bound])
    return DONE


# ---- `relaxion race`: the same structure relaxed by several optimizers, shown side by side in one page.

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
    atoms, hints = _structure(request.file)
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
        run, others = raced(task, choice, optimizers, lambda name: progress.reporter(label, name))
    policy = policy_in_words(request.policy, run.policy_used)
    done = RelaxationReport(
        label, start, run, request.fmax, request.calc, policy, request.cell, command_line(), others, hints
    )
    _announce(done, race_page(done).save(request.out, force=request.force), request)
    if run.error is not None:
        return ERROR
    return DONE if run.converged else INCOMPLETE


def check_page(path: Path, force: bool) -> None:
    """Refuse a place where no page can be written, before any force call."""
    refuse_folder("--out", path, "race.html")
    if path.exists() and not force:
        raise FileError(f"{path} exists; try --force to replace it, or another --out")
    if not path.absolute().parent.is_dir():
        raise FileError(f"--out {path}: the folder {path.absolute().parent} does not exist; make it first")


def _structure(file: Path) -> tuple[Atoms, list[str]]:
    file, words = without_slice(file)
    images = read(file)
    if words is not None:
        return images[sliced(file, words, len(images))[0]], []
    hint = f"{file} holds {len(images)} structures; the first one races, {file}@1 is the second"
    return images[0], [hint] if len(images) > 1 else []


def _announce(race: RelaxationReport, page: Path, request: RaceRequest) -> None:
    if request.as_json:
        tell(json.dumps(_as_plain(race, page), ensure_ascii=speaks_ascii_only(sys.stdout), allow_nan=False))
    else:
        beside = in_words(race.run, race.others)
        ours = f"{OURS} {race.run.force_calls} by {who_relaxed(race.run)}"
        tell(f"{race.label}: {formula(race.start)}: {verdict(race)} ({ours}, {beside}), written to {page}")
    for name, run in race.runs.items():
        if run.error is not None:
            say(f"{race.label}: {name} failed: {run.error}")
    for hint in race.hints if not request.quiet else ():
        say(f"{race.label}: {hint}")


def _as_plain(race: RelaxationReport, page: Path) -> dict[str, Any]:
    """What --json prints."""
    ours = race.run
    runs = {name: compared_as_json(run) for name, run in race.runs.items()}
    return {
        "file": race.label, "formula": formula(race.start), "winners": race.winners, "policy": ours.policy_used,
        "fallback_used": ours.fallback_used, "runs": runs, "written_to": str(page),
    }  # fmt: skip
