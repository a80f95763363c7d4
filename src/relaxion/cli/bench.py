"""`relaxion bench`: a set of starts, every optimizer on each of them, a paired table, JSON and a picture."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relaxion.bench.contest import Conditions, OnScore, Score, contest
from relaxion.bench.optimizers import (
    Contestant,
    classical_contestants,
    our_contestants,
    policy_argument,
)
from relaxion.bench.results import Circumstances, ContestResult
from relaxion.bench.sets import FIRST_SEED
from relaxion.cli.bench_output import as_plain, as_table, sentences
from relaxion.cli.bench_starts import Starts, find_starts
from relaxion.cli.interrupts import Interrupts
from relaxion.cli.progress import one_line, say, tell
from relaxion.errors import FileError, PolicyError, RelaxionError, SettingsError, UnknownPotentialError
from relaxion.optimize.choice import Chooser

CONVERGED, ERROR, USAGE, NOT_CONVERGED = 0, 1, 2, 3  # and 130 or 143: see Interrupts
STDOUT = Path("-")


@dataclass(frozen=True)
class BenchRequest:
    """What the user asked for."""

    what: str  # a named set or a structure file
    calculator: str | None  # None: the set's own, or EMT for files
    optimizers: str  # names with commas between them; empty: those whose best is quoted
    policy: str
    perturb: str | None
    free_cell: bool
    fmax: float  # eV/Å
    cap: int  # force calls
    number: int | None  # of structures; None: the set's own
    seed: int
    json_file: Path | None
    plot_file: Path | None
    force: bool
    quiet: bool
    allow_unseen: bool = False  # let the policy speak about elements it was not trained on


def bench(request: BenchRequest) -> int:
    """Do it and return the exit code."""
    with Interrupts() as interrupts:
        try:
            return _bench(request, interrupts)
        except (SettingsError, UnknownPotentialError, PolicyError) as error:
            say(f"relaxion: {error}")
            return USAGE
        except (RelaxionError, OSError) as error:
            say(f"relaxion: {error}")
            return ERROR
        except KeyboardInterrupt:
            say("relaxion: interrupted before the first structure was done by all optimizers")
            return interrupts.exit_code


def _bench(request: BenchRequest, interrupts: Interrupts) -> int:
    _check_numbers(request)
    for file in (request.json_file, request.plot_file):
        _check_file(file, request.force)
    ours = our_contestants(policy_argument(request.policy), allow_unseen=request.allow_unseen)
    starts = find_starts(
        request.what, request.calculator, request.perturb, request.number, request.seed, free_cell=request.free_cell
    )
    others = classical_contestants(request.optimizers, without_gpmin=starts.without_gpmin, free_cell=starts.free_cell)
    if request.seed < FIRST_SEED and not request.quiet:
        say(f"relaxion: seeds below {FIRST_SEED} are for training; a policy may have seen starts of their kind")
    circumstances = replace(_circumstances(request, starts), policies_used=_policies_used(request, starts))
    result = measure(starts, [*ours, *others], circumstances, quiet=request.quiet)
    with interrupts.held():
        _publish(request, result)
    if result.circumstances.interrupted or interrupts.noticed:
        return interrupts.exit_code
    return NOT_CONVERGED if result.summaries[result.ours].failures else CONVERGED


def _circumstances(request: BenchRequest, starts: Starts) -> Circumstances:
    return Circumstances(
        set_name=starts.name,
        title=starts.title,
        calculator=starts.calculator,
        policy=request.policy,
        fmax=request.fmax,
        cap=request.cap,
        free_cell=starts.free_cell,
        seed=request.seed,
        perturb=request.perturb,
        command=shlex.join(["relaxion", *sys.argv[1:]]),
    )


def _policies_used(request: BenchRequest, starts: Starts) -> dict[str, int]:
    """How many of the structures each policy relaxes; one line where elements leave some of them to the core."""
    policy = policy_argument(request.policy)
    chooser = Chooser(policy, allow_unseen=request.allow_unseen)
    decisions = [chooser.decide(a.numbers.tolist(), periodic=bool(a.pbc.any())) for a in starts.images]
    notes = [decision.note for decision in decisions if decision.note]
    if notes and not request.quiet:
        say(f"relaxion: {len(notes)} of {len(decisions)} structures: {notes[0]}")
    return dict(Counter(decision.name for decision in decisions))


def measure(
    starts: Starts, contestants: list[Contestant], circumstances: Circumstances, *, quiet: bool
) -> ContestResult:
    """All contestants on all starts; Ctrl-C keeps the starts that all of them have done."""
    conditions = Conditions(starts.potential, circumstances.fmax, circumstances.cap, starts.free_cell)
    done: dict[str, list[Score]] = {contestant.name: [] for contestant in contestants}
    try:
        with _progress(len(starts.images) * len(contestants), quiet) as on_score, _silence():
            for scores in contest(contestants, starts.images, conditions, on_score):
                for name, score in scores.items():
                    done[name].append(score)
    except KeyboardInterrupt:
        if not all(done.values()):
            raise
        circumstances = replace(circumstances, interrupted=True)
    return ContestResult(circumstances, done, [other.name for other in contestants if other.classical])


@contextmanager
def _silence() -> Iterator[None]:
    """ASE's optimizers warn about their defaults and log what fails; here the table says it."""
    ase_logger = logging.getLogger("ase")
    before = ase_logger.level
    ase_logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ase_logger.setLevel(before)


def _publish(request: BenchRequest, result: ContestResult) -> None:
    """Files first: they are what a program waits for."""
    text = json.dumps(as_plain(result), indent=1, ensure_ascii=False, allow_nan=False)
    if request.json_file is not None and request.json_file != STDOUT:
        _write(request.json_file, text + "\n")
    if request.plot_file is not None:
        from relaxion.bench.profile import draw_profile

        unfinished = request.plot_file.with_name(f".{request.plot_file.name}.part")
        draw_profile(result, unfinished)
        unfinished.replace(request.plot_file)
    if result.circumstances.interrupted:
        say(f"relaxion: interrupted; what follows is {result.n_structures} structures that all optimizers have done")
    for name, errors in result.errors().items():
        if not request.quiet:
            say(f"relaxion: {name} failed {len(errors)} times with an error, the first: {one_line(errors[0], 200)}")
    if request.json_file == STDOUT:
        tell(text)
        return
    # wide enough for all columns where nobody watches: a table in a file or a pipe is not to be cut
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(as_table(result))
    for sentence in sentences(result):
        tell(sentence)


def _check_numbers(request: BenchRequest) -> None:
    if not (math.isfinite(request.fmax) and request.fmax > 0):
        raise SettingsError(f"--fmax is a force in eV/Å above 0, got {request.fmax}; try --fmax 0.05")
    if request.cap < 1:
        raise SettingsError(f"--steps is 1 or more, got {request.cap}; try --steps 500")
    if request.number is not None and request.number < 1:
        raise SettingsError(f"--number is 1 or more, got {request.number}; try --number 50")


def _check_file(file: Path | None, force: bool) -> None:
    """Refuse, before any force call, what could not be written afterwards."""
    if file is None or file == STDOUT:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{file} cannot be written: name a file in a folder that exists and may be written to")
    if file.exists() and not force:
        raise FileError(f"{file} exists; try --force to replace it, or another name")


def _write(file: Path, text: str) -> None:
    unfinished = file.with_name(f".{file.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[OnScore | None]:
    """A bar in a terminal, a line per start elsewhere."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif not console.is_terminal:
        yield _LinePerStart()
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            job = bar.add_task("relaxations", total=total)

            def report(name: str, index: int, _score: Score) -> None:
                bar.update(job, advance=1, description=f"structure {index}, {name}")

            yield report


class _LinePerStart:
    """A log file wants to know that something happens: one line per start, when the next one begins."""

    def __init__(self) -> None:
        self._of, self._words = 0, ""

    def __call__(self, name: str, index: int, score: Score) -> None:
        if index != self._of:
            say(f"structure {self._of}:{self._words}")
            self._of, self._words = index, ""
        self._words += f" {name} {score.spent if score.converged else 'failed'}"
