"""`relaxion bench`: a set of starts, every optimizer on each of them, a paired table, JSON and a picture."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from rich import box
from rich.console import Console
from rich.table import Table

from relaxion import __version__
from relaxion.apps.cli.command import DONE, INCOMPLETE, check_numbers, interrupts
from relaxion.apps.cli.inputs import check_structure, command_line, sliced
from relaxion.apps.cli.progress import bar, one_line, say, tell
from relaxion.apps.comparison import SETS, find_set
from relaxion.errors import FileError, InputError, PotentialError, SettingsError
from relaxion.files import replace_file
from relaxion.optimizer.choice import CORE as CLASSICAL
from relaxion.optimizer.choice import Chooser
from relaxion.paths import without_slice
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import make_potential
from relaxion.structures import Structures
from relaxion.train.data.dataset import FIRST_MEASURING_SEED, read
from relaxion.train.data.perturbations import Perturbation, perturbation
from relaxion.train.judge.runs import (
    CORE,
    Conditions,
    Contestant,
    OnScore,
    Score,
    classical_contestants,
    contest,
    our_contestants,
    policy_argument,
)
from relaxion.train.judge.statistics import (
    Circumstances,
    Comparison,
    ContestResult,
    Interval,
    OptimizerSummary,
    charged,
    median_distance,
)

STDOUT = Path("-")
PERTURBED_NUMBER = 50  # starts from a file that is perturbed, unless --number says otherwise
FILE_CALCULATOR = "emt"
HEADINGS = ("mean", "95 %", "median", "p95", "worst", "failures", "of the best", "same minimum", "time (s)", "ms/call")


@dataclass(frozen=True)
class BenchRequest:
    """What `relaxion bench` was asked."""

    what: str  # the name of a set, or a structure file
    calc: str | None = None
    optimizers: str = ""
    policy: str = "auto"
    allow_unseen: bool = False
    perturb: str | None = None
    cell: bool = False
    fmax: float = 0.05  # eV/Å
    steps: int = 500
    number: int | None = None
    seed: int = FIRST_MEASURING_SEED
    json_file: Path | None = None
    force: bool = False
    quiet: bool = False


def run_bench(request: BenchRequest) -> int:
    check_numbers(request.fmax, request.steps, fewest_steps=1)
    if request.number is not None and request.number < 1:
        raise SettingsError(f"--number is 1 or more, got {request.number}; try --number 50")
    _check_file(request.json_file, request.force)
    ours = our_contestants(policy_argument(request.policy), allow_unseen=request.allow_unseen)
    starts = find_starts(request)
    others = classical_contestants(request.optimizers, without_gpmin=starts.without_gpmin, free_cell=starts.free_cell)
    if request.seed < FIRST_MEASURING_SEED and not request.quiet:
        where = f"seeds below {FIRST_MEASURING_SEED} are for training"
        say(f"relaxion: {where}; a policy may have seen starts of their kind")
    with closing(starts.potential):
        circumstances = Circumstances(
            starts.name, starts.title, starts.calculator, request.policy, request.fmax, request.steps, starts.free_cell,
            request.seed, request.perturb, command_line(), policies_used=_policies_used(request, starts),
        )  # fmt: skip
        result = measure(starts, [*ours, *others], circumstances, quiet=request.quiet)
    with interrupts.held():
        _publish(request, _of_what_was_done(request, starts, result))
    if result.circumstances.interrupted or interrupts.noticed:
        return interrupts.exit_code
    return INCOMPLETE if result.summaries[result.ours].failures else DONE


@dataclass(frozen=True)
class ContestStarts:
    """Structures to relax, and how."""

    name: str
    title: str
    images: Sequence[Atoms]
    potential: Potential
    calculator: str
    free_cell: bool
    without_gpmin: bool = False


def find_starts(request: BenchRequest) -> ContestStarts:
    """By the name of a set, or from a file; perturbed if asked for, all checked at once."""
    disturb = None if request.perturb is None else perturbation(request.perturb)
    starts = _from_set(request) if request.what in SETS else _from_file(request)
    images = [_start(image, disturb, request.seed, index) for index, image in enumerate(starts.images)]
    for index, image in enumerate(images):
        try:
            check_structure(image, starts.potential, free_cell=starts.free_cell)
        except (InputError, PotentialError) as error:
            raise FileError(f"{starts.name}, structure {index}: {error}") from error
    return replace(starts, images=images)


def _from_set(request: BenchRequest) -> ContestStarts:
    known = find_set(request.what)
    spec = request.calc
    images = known.starts(request.number or known.number, request.seed)
    potential = known.make_potential() if spec is None else make_potential(spec)
    cell = request.cell or known.free_cell
    return ContestStarts(
        request.what, known.title, images, potential, spec or known.calculator, cell, known.without_gpmin
    )


def _from_file(request: BenchRequest) -> ContestStarts:
    what = request.what
    number = request.number
    spec = request.calc or FILE_CALCULATOR
    path = Path(request.what)
    path, words = without_slice(path)
    if not path.exists() and path.suffix == "" and path.name == what:
        find_set(what)  # raises: it looks like the name of a set
    images = read(path)
    images = images if words is None else [images[place] for place in sliced(path, words, len(images))]
    if number is None:
        number = len(images) if request.perturb is None else max(PERTURBED_NUMBER, len(images))
    if number > len(images) and request.perturb is None:
        raise SettingsError(
            f"--number {number}: {what} holds {len(images)} structures; ask for fewer, or make more of each "
            "with --perturb rattle:0.1"
        )
    chosen = [images[index % len(images)] for index in range(number)]
    return ContestStarts(what, f"structures of {path.name}", chosen, make_potential(spec), spec, request.cell)


def _start(image: Atoms, disturb: Perturbation | None, seed: int, index: int) -> Atoms:
    """Each start has random numbers of its own, whatever the others are."""
    if disturb is None:
        return image
    own = int(np.random.default_rng([seed, index]).integers(2**62))
    return disturb(Structures.from_ase(image), torch.Generator().manual_seed(own)).to_ase()[0]


def _policies_used(request: BenchRequest, starts: ContestStarts) -> dict[str, int]:
    """How many of the structures each policy relaxes; one line where elements leave some of them to the core."""
    asked = policy_argument(request.policy)
    chooser = Chooser(asked, allow_unseen=request.allow_unseen, calculator=starts.potential)
    decisions = [chooser.decide_for(atoms) for atoms in starts.images]
    notes = [decision.note for decision in decisions if decision.note]
    if notes and not request.quiet:
        say(f"relaxion: {len(notes)} of {len(decisions)} structures: {notes[0]}")
    return dict(Counter(decision.name for decision in decisions))


def _of_what_was_done(request: BenchRequest, starts: ContestStarts, result: ContestResult) -> ContestResult:
    """The same, where it was interrupted with the policies of those structures alone that are counted."""
    if not result.circumstances.interrupted:
        return result
    done = replace(starts, images=starts.images[: result.n_structures])
    used = _policies_used(replace(request, quiet=True), done)
    return replace(result, circumstances=replace(result.circumstances, policies_used=used))


def measure(
    starts: ContestStarts, contestants: list[Contestant], circumstances: Circumstances, *, quiet: bool
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
    if result.circumstances.interrupted:
        say(f"relaxion: interrupted; results of the {result.n_structures} structures that all optimizers finished")
    for name, errors in ({} if request.quiet else result.errors()).items():
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
    """A bar in a terminal, elsewhere a line per start, when the next one begins."""
    place = 0
    words = ""
    with bar("relaxations", total, quiet=quiet) as advance:

        def report(name: str, index: int, score: Score) -> None:
            nonlocal place, words
            if advance is not None:
                advance(advance=1, description=f"structure {index}, {name}")
                return
            if index != place:
                say(f"structure {place}:{words}")
                place = index
                words = ""
            words += f" {name} {score.spent if score.converged else 'failed'}"

        yield None if quiet else report


# ---- a contest as JSON for programs, as a table for people, and in sentences


def as_plain(result: ContestResult) -> dict[str, Any]:
    """What --json writes. Counts are charged: a failure is the cap."""
    told = result.circumstances
    to_best = result.to_best
    to_core = result.to_core
    return {
        "set": told.set_name,
        "title": told.title,
        "structures": result.n_structures,
        "interrupted": told.interrupted,
        "calculator": told.calculator,
        "policy": told.policy,
        "policies_used": dict(told.policies_used),
        "fmax_ev_per_angstrom": told.fmax,
        "force_call_cap": told.cap,
        "free_cell": told.free_cell,
        "seed": told.seed,
        "perturb": told.perturb,
        "ours": result.ours,
        "optimizers": {name: _optimizer(result, name) for name in result.by_calls()},
        "best_classical": result.best,
        "ratio_to_best_classical": None if to_best is None else to_best.ratio.value,
        "ratio_to_best_classical_interval_95": None if to_best is None else _ends(to_best.ratio),
        "geometric_ratio_to_best_classical": None if to_best is None else to_best.geometric_ratio,
        "same_minimum_rate": None if to_best is None else to_best.same_minimum_rate,
        "lower_minimum_rate": None if to_best is None else to_best.lower_minimum_rate,
        "break_even_seconds_per_force_call": None if to_best is None else to_best.break_even_seconds,
        "ratio_to_core": to_core.ratio.value,
        "ratio_to_core_interval_95": _ends(to_core.ratio),
        "geometric_ratio_to_core": to_core.geometric_ratio,
        "p95_of_paired_ratios_to_core": to_core.p95_of_paired_ratios,
        "p95_of_paired_ratios_to_core_in_the_same_minimum": to_core.p95_where_same,
        "same_minimum_rate_as_core": to_core.same_minimum_rate,
        "lower_minimum_rate_than_core": to_core.lower_minimum_rate,
        "force_calls": {name: charged(scores).astype(int).tolist() for name, scores in result.scores.items()},
        "converged": {name: [score.converged for score in scores] for name, scores in result.scores.items()},
        "energies_ev": {name: [score.energy_ev for score in scores] for name, scores in result.scores.items()},
        "n_atoms": [score.n_atoms for score in result.scores[result.ours]],
        "versions": versions(),
        "command": told.command,
    }


def _optimizer(result: ContestResult, name: str) -> dict[str, Any]:
    summary = result.summaries[name]
    best = result.best
    return {
        "mean_force_calls": summary.mean.value,
        "median_force_calls": summary.median,
        "p95_force_calls": summary.p95,
        "failures": summary.failures,
        "wall_time_seconds": summary.seconds,
        "mean_force_calls_interval_95": _ends(summary.mean),
        "worst_force_calls": summary.worst,
        "calculator_seconds": summary.calculator_seconds,
        "overhead_seconds_per_force_call": summary.overhead_seconds_per_call,
        "same_minimum_rate": None if best is None else result.compared(name, best).same_minimum_rate,
        "median_distance_from_ours_angstrom": median_distance(result.scores[result.ours], result.scores[name]),
    }


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def versions() -> dict[str, str]:
    """Of whatever can change a number."""
    packages = {name: version(name) for name in ("ase", "numpy", "scipy", "torch")}
    return {"relaxion": __version__, **packages, "python": platform.python_version()}


def as_table(result: ContestResult) -> Table:
    """For people at a terminal."""
    told = result.circumstances
    title = f"{told.set_name}: {told.title}; {result.n_structures} structures, fmax {told.fmax:g} eV/Å"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("force calls of")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name in result.by_calls():
        style = "bold" if name == result.ours else ""
        table.add_row(name, *cells(result, name), style=style)
    return table


def cells(result: ContestResult, name: str) -> list[str]:
    """Of one optimizer, below `HEADINGS`."""
    summary: OptimizerSummary = result.summaries[name]
    best = None if result.best is None else result.compared(name, result.best)
    rate = None if best is None else best.same_minimum_rate
    return [
        f"{summary.mean.value:.1f}",
        f"{summary.mean.low:.1f}–{summary.mean.high:.1f}",
        f"{summary.median:.1f}",
        f"{summary.p95:.1f}",
        str(summary.worst),
        str(summary.failures),
        "–" if best is None else f"{best.ratio.value:.2f}",
        "–" if rate is None else f"{rate:.0%}",
        f"{summary.seconds:.1f}",
        f"{1000 * summary.overhead_seconds_per_call:.2g}",
    ]


def sentences(result: ContestResult) -> list[str]:
    """What the table comes to: ratio to the best, ratio to the core, break-even."""
    said = _who_relaxed(result)
    if result.to_best is not None:
        best = result.to_best
        said += [
            f"{result.ours} needs {best.ratio:.2f} of the force calls of {best.other}, the best classical one here "
            f"(shifted geometric mean {best.geometric_ratio:.2f}); same minimum in "
            f"{_per_cent(best.same_minimum_rate)}, a lower one in {_per_cent(best.lower_minimum_rate)} of the "
            "structures where both converged.",
            _break_even(result, best),
        ]
    if result.ours != CORE:
        core = result.to_core
        ratio = "none" if core.p95_where_same is None else f"{core.p95_where_same:.2f}"
        said.append(
            f"{result.ours} needs {core.ratio:.2f} of the force calls of its classical optimizer; 95th percentile of "
            f"paired ratios {core.p95_of_paired_ratios:.2f}, {ratio} where both end in the same "
            f"minimum ({_per_cent(core.same_minimum_rate)}; lower in {_per_cent(core.lower_minimum_rate)})."
        )
    return said


def _who_relaxed(result: ContestResult) -> list[str]:
    """By which policies; nothing where there was only the core."""
    used = result.circumstances.policies_used
    if not set(used) - {CLASSICAL}:
        return []
    words = [f"{'the classical optimizer' if name == CLASSICAL else name} {number}" for name, number in used.items()]
    return [f"Structures that {result.ours} relaxed by policy: {', '.join(words)}."]


def _break_even(result: ContestResult, best: Comparison) -> str:
    price = best.break_even_seconds
    if price is None:
        return f"{result.ours} saves no force calls over {best.other}, so it is not faster at any cost of a force call."
    if price == 0:
        return f"Break-even: {result.ours} takes less time than {best.other} at any cost of a force call."
    cost = f"{1000 * price:.2g} ms" if price < 1 else f"{price:.2g} s"
    return f"Break-even: {result.ours} takes less time than {best.other} where a force call costs above {cost}."


def _per_cent(rate: float | None) -> str:
    return "no start" if rate is None else f"{rate:.0%}"
