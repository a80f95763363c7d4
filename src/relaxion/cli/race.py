"""`relaxion race`: the same structure relaxed by several optimizers, shown side by side in one page."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ase import Atoms

from relaxion.bench.checks import check_structure, emt_note, occupancy_note, rattled
from relaxion.bench.comparison import in_words, run_ase_optimizer, run_relaxer, who_relaxed
from relaxion.bench.optimizers import PolicyChoice, chosen_optimizers
from relaxion.bench.runs import Task
from relaxion.cli.interrupts import Interrupts
from relaxion.cli.progress import Progress, say, speaks_ascii_only, tell
from relaxion.cli.relax import CONVERGED, ERROR, NOT_CONVERGED, USAGE
from relaxion.cli.request import RelaxRequest, check_numbers, command_line
from relaxion.cli.sentences import compared_as_json
from relaxion.errors import FileError, PolicyError, RelaxionError, SettingsError, UnknownPotentialError
from relaxion.potentials.registry import make_potential
from relaxion.structures.dataset import read
from relaxion.web.race_page import Race, race_page, verdict
from relaxion.web.report_relaxation import OURS

MOST_RACERS = 5  # beside ours: more films than that nobody follows, and the page has room for


@dataclass(frozen=True)
class RaceRequest:
    """What the user asked for."""

    relax: RelaxRequest  # one file; `compare` names the others, `out` the page
    index: int | None  # of a file with several structures; None: the first, and say so


def race(request: RaceRequest) -> int:
    """Do it and return the exit code."""
    with Interrupts() as interrupts:
        try:
            return _race(request)
        except (SettingsError, UnknownPotentialError, PolicyError) as error:
            say(f"relaxion: {error}")
            return USAGE
        except (RelaxionError, OSError) as error:
            say(f"relaxion: {error}")
            return ERROR
        except KeyboardInterrupt:
            say("relaxion: interrupted; no page was written")
            return interrupts.exit_code


def _race(request: RaceRequest) -> int:
    asked = request.relax
    check_numbers(asked)
    optimizers = chosen_optimizers(asked.compare, "--with")
    if not 1 <= len(optimizers) <= MOST_RACERS:
        raise SettingsError(f"--with names 1 to {MOST_RACERS} optimizers, got {len(optimizers)}; try --with BFGS,FIRE")
    check_page(asked.out, asked.force)
    potential = make_potential(asked.calculator)
    atoms, hints = _structure(asked.files[0], request.index)
    check_structure(atoms, potential, free_cell=asked.free_cell)
    start = rattled(atoms, asked.rattle_angstrom, asked.seed)
    check_structure(start, potential, free_cell=asked.free_cell)
    choice = PolicyChoice.of(asked.policy, start, allow_unseen=asked.allow_unseen)
    hints = [*hints, *filter(None, [occupancy_note(start), emt_note(start, asked.calculator), choice.note])]
    task = Task(start, potential, asked.fmax, asked.steps, asked.free_cell, record=True)
    label, progress = str(asked.files[0]), Progress(quiet=asked.quiet)
    with progress.line():
        runs = {OURS: run_relaxer(task, choice, None, None, progress.reporter(label, OURS))}
        if runs[OURS].outcome == "interrupted":
            raise KeyboardInterrupt
        for name, kind in optimizers.items():
            runs[name] = run_ase_optimizer(kind, task, progress.reporter(label, name))
    done = Race(label, start, runs, asked.fmax, asked.calculator, asked.free_cell, command_line(), hints)
    page = race_page(done).save(asked.out, force=asked.force)
    _announce(done, page, asked)
    if runs[OURS].error is not None:
        return ERROR
    return CONVERGED if runs[OURS].converged else NOT_CONVERGED


def check_page(path: Path, force: bool) -> None:
    """Refuse a place where no page can be written, before any force call."""
    if path.is_dir():
        raise FileError(f"--out {path} is a folder; name a file, such as --out {path / 'race.html'}")
    if path.exists() and not force:
        raise FileError(f"{path} exists; try --force to replace it, or another --out")
    if not path.absolute().parent.is_dir():
        raise FileError(f"--out {path}: the folder {path.absolute().parent} does not exist; make it first")


def _structure(file: Path, index: int | None) -> tuple[Atoms, list[str]]:
    images = read(file)
    if index is None:
        hint = f"{file} holds {len(images)} structures; the first one races, --index chooses another"
        return images[0], [hint] if len(images) > 1 else []
    if not -len(images) <= index < len(images):
        raise SettingsError(f"--index {index}: {file} holds {len(images)} structures, 0 to {len(images) - 1}")
    return images[index], []


def _announce(race: Race, page: Path, asked: RelaxRequest) -> None:
    if asked.as_json:
        tell(json.dumps(_as_plain(race, page), ensure_ascii=speaks_ascii_only(sys.stdout), allow_nan=False))
    else:
        beside = in_words(race.runs[OURS], race.others)
        ours = f"{OURS} {race.runs[OURS].force_calls} by {who_relaxed(race.runs[OURS])}"
        tell(f"{race.label}: {race.formula}: {verdict(race)} ({ours}, {beside}), written to {page}")
    for name, run in race.runs.items():
        if run.error is not None:
            say(f"{race.label}: {name} failed: {run.error}")
    for hint in race.hints if not asked.quiet else ():
        say(f"{race.label}: {hint}")


def _as_plain(race: Race, page: Path) -> dict[str, Any]:
    """What --json prints."""
    return {
        "file": race.label,
        "formula": race.formula,
        "winners": race.winners,
        "policy": race.runs[OURS].policy_used,
        "fallback_used": race.runs[OURS].fallback_used,
        "runs": {name: compared_as_json(run) for name, run in race.runs.items()},
        "written_to": str(page),
    }
