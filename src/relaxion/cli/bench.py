"""`relaxion bench`: a set of starts, every optimizer on each of them, a paired table, JSON and a picture."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from relaxion.bench.contest import Conditions, OnScore, Score, contest
from relaxion.bench.optimizers import Contestant, classical_contestants, our_contestants, policy_argument
from relaxion.bench.results import Circumstances, ContestResult
from relaxion.bench.sets import FIRST_SEED
from relaxion.cli.bench_output import as_plain, as_table, sentences
from relaxion.cli.bench_starts import Starts, find_starts
from relaxion.cli.ending import DONE, INCOMPLETE, Interrupts
from relaxion.cli.inputs import check_numbers, command_line
from relaxion.cli.progress import bar, one_line, say, tell
from relaxion.cli.requests import BenchRequest
from relaxion.errors import FileError, SettingsError
from relaxion.files import part_of, replace_file
from relaxion.optimize.choice import Chooser

STDOUT = Path("-")


def bench(request: BenchRequest, interrupts: Interrupts) -> int:
    check_numbers(request.fmax, request.steps, fewest_steps=1)
    if request.number is not None and request.number < 1:
        raise SettingsError(f"--number is 1 or more, got {request.number}; try --number 50")
    for file in (request.json_file, request.plot):
        _check_file(file, request.force)
    ours = our_contestants(policy_argument(request.policy), allow_unseen=request.allow_unseen)
    starts = find_starts(
        request.what, request.calc, request.perturb, request.number, request.seed, free_cell=request.cell
    )
    others = classical_contestants(request.optimizers, without_gpmin=starts.without_gpmin, free_cell=starts.free_cell)
    if request.seed < FIRST_SEED and not request.quiet:
        say(f"relaxion: seeds below {FIRST_SEED} are for training; a policy may have seen starts of their kind")
    with closing(starts.potential):
        result = measure(starts, [*ours, *others], _circumstances(request, starts), quiet=request.quiet)
    with interrupts.held():
        _publish(request, result)
    if result.circumstances.interrupted or interrupts.noticed:
        return interrupts.exit_code
    return INCOMPLETE if result.summaries[result.ours].failures else DONE


def _circumstances(request: BenchRequest, starts: Starts) -> Circumstances:
    return Circumstances(
        set_name=starts.name,
        title=starts.title,
        calculator=starts.calculator,
        policy=request.policy,
        fmax=request.fmax,
        cap=request.steps,
        free_cell=starts.free_cell,
        seed=request.seed,
        perturb=request.perturb,
        command=command_line(),
        policies_used=_policies_used(request, starts),
    )


def _policies_used(request: BenchRequest, starts: Starts) -> dict[str, int]:
    """How many of the structures each policy relaxes; one line where elements leave some of them to the core."""
    chooser = Chooser(policy_argument(request.policy), allow_unseen=request.allow_unseen)
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
        replace_file(request.json_file, (text + "\n").encode())
    if request.plot is not None:
        from relaxion.bench.results import draw_profile

        draw_profile(result, part_of(request.plot))
        part_of(request.plot).replace(request.plot)
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


def _check_file(file: Path | None, force: bool) -> None:
    """Refuse, before any force call, what could not be written afterwards."""
    if file is None or file == STDOUT:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{file} cannot be written: name a file in a folder that exists and may be written to")
    if file.exists() and not force:
        raise FileError(f"{file} exists; try --force to replace it, or another name")


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[OnScore | None]:
    """A bar in a terminal, a line per start elsewhere."""
    line = _LinePerStart()
    with bar("relaxations", total, quiet=quiet) as advance:

        def report(name: str, index: int, score: Score) -> None:
            if advance is None:
                line(name, index, score)
            else:
                advance(advance=1, description=f"structure {index}, {name}")

        yield None if quiet else report


class _LinePerStart:
    """A log file wants to know that something happens: one line per start, when the next one begins."""

    def __init__(self) -> None:
        self._of, self._words = 0, ""

    def __call__(self, name: str, index: int, score: Score) -> None:
        if index != self._of:
            say(f"structure {self._of}:{self._words}")
            self._of, self._words = index, ""
        self._words += f" {name} {score.spent if score.converged else 'failed'}"
