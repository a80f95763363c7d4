"""`relaxion relax-many`, `status` and `merge`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from relaxion.apps.cli.command import DONE, ERROR, INCOMPLETE, interrupts
from relaxion.apps.cli.inputs import AUTO, RelaxingOptions, calculator_for, calculator_word, planner
from relaxion.apps.cli.progress import Now, say, tell
from relaxion.apps.relax_many.learning import Learner
from relaxion.apps.relax_many.results import (
    MANIFEST,
    PROGRESS,
    Counts,
    ResultFolder,
    is_locked,
    make_summary,
    read_counts,
    read_manifest,
)
from relaxion.apps.relax_many.results import merge as merge_into
from relaxion.apps.relax_many.run import ManyRun, ManyTally, RelaxWorker, check_files, places
from relaxion.apps.relax_many.settings import ManySettings, calculator_details, policy_weights
from relaxion.errors import RelaxionError, SettingsError
from relaxion.files import json_of
from relaxion.optimizer.records import database_at
from relaxion.potentials.base import AsePotential
from relaxion.potentials.registry import make_potential, without_options
from relaxion.workers import WorkerPlace

SECONDS_BETWEEN_LINES = 5.0
MOST_LOOKED_AT = 10_000  # structures, to choose a calculator by; a few seconds of reading


@dataclass(frozen=True, kw_only=True)
class ManyRequest(RelaxingOptions):
    """What `relaxion relax-many` was asked."""

    files: list[Path] | None
    out: Path
    learn: int
    workers: str
    batch_size: int
    time_limit: float | None  # s
    retry_failed: bool
    as_json: bool
    quiet: bool


def relax_all(request: ManyRequest) -> int:
    """Do it, or go on with it."""
    try:
        files = request.files or [Path(file) for file in read_manifest(request.out)["files"]]
    except RelaxionError as error:
        raise SettingsError(f"no input: name structure files ({error})") from error
    place = WorkerPlace.read(request.workers)
    check_files(files)
    calc = _calculator(request, files) if request.calc == AUTO else request.calc
    request = replace(request, calc=calculator_word(calc, request.calc_options))
    settings, chunk_size = _settings(_with_model(request, files))
    known = database_at(request.database or (request.out / "database" if request.learn else None))
    database = None if known is None else known.path
    worker = partial(
        RelaxWorker, settings, time_limit_seconds=request.time_limit, batch_size=request.batch_size,
        device=request.device, database=None if database is None else str(database), folder=str(Path.cwd()),
    )  # fmt: skip
    with ResultFolder(request.out, settings, files) as folder:
        if request.retry_failed and (number := folder.forget_failures()):
            say(f"relaxion: {number} failed structures will be tried again")
        with place.open(worker) as workers:
            run = ManyRun(
                folder=folder, workers=workers, settings=settings, files=files, chunk_size=chunk_size,
                time_limit_seconds=request.time_limit, stop=lambda: interrupts.noticed,
                report=_lines(quiet=request.quiet), learner=_learner(request, settings, database),
            )  # fmt: skip
            with interrupts.held():
                tally = run.run()
            interrupted = interrupts.noticed
        counts = make_summary(request.out)
    _announce(request, tally, counts)
    if interrupted:
        say("relaxion: interrupted; all results so far are saved; run the same command again to continue")
        return interrupts.exit_code
    if counts.failed:
        return ERROR
    return DONE if counts.converged == counts.structures else INCOMPLETE


def _calculator(request: ManyRequest, files: list[Path]) -> str:
    """That of an earlier run into the folder, else one that fits the first structures."""
    if (request.out / MANIFEST).exists():
        return without_options(str(read_manifest(request.out)["settings"].get("calculator")))[0]
    images = (place.atoms for file in files for place in places(file) if place.atoms is not None)
    choice = calculator_for(islice(images, MOST_LOOKED_AT), request.device)
    if (words := choice.in_words()) and not request.quiet:
        more = f" (of the first {MOST_LOOKED_AT})" if choice.structures == MOST_LOOKED_AT else ""
        say(f"relaxion: {words}{more}")
    return choice.name


def _with_model(request: ManyRequest, files: list[Path]) -> ManyRequest:
    """With the name of the cheaper calculator in place of `auto`, or without one; workers make their own."""
    firsts = (place for file in files for place in islice(places(file), 1)) if request.model == AUTO else ()
    images = [place.atoms for place in firsts if place.atoms is not None]
    found = planner(request.model, request.calc, images, request.device)
    if found is None:
        return replace(request, model=None)
    found[1].close()
    return replace(request, model=found[0])


def _settings(request: ManyRequest) -> tuple[ManySettings, int]:
    """And structures in a chunk. Checked before anything is begun: the calculator is made once here too."""
    limit = request.time_limit
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise SettingsError(f"--time-limit is a time in seconds above 0, got {limit}; try --time-limit 600")
    policy_weights(request.policy)  # complaints about a word come first
    made = make_potential(request.calc, request.device)
    made.close()  # workers make their own
    if request.cell and not made.has_stress:
        raise SettingsError(f"--cell: calculator {made.name} gives no stress; leave out --cell, or try --calc emt")
    many = ManySettings(
        calculator=request.calc, calculator_details=calculator_details(request.calc, made), policy=request.policy,
        policy_weights=policy_weights(request.policy, made), allow_unseen=request.allow_unseen,
        fmax_ev_per_angstrom=request.fmax, free_cell=request.cell, pressure_gpa=request.pressure,
        cell_mask=request.cell_mask, keep_symmetry=request.keep_symmetry, max_force_calls=request.steps + 1,
        learn_every=request.learn, model=request.model or "",
        model_details=calculator_details(request.model) if request.model else {},
    )  # fmt: skip
    return many, 1 if isinstance(made, AsePotential) or request.learn else 2 * request.batch_size


def _learner(request: ManyRequest, settings: ManySettings, database: Path | None) -> Learner | None:
    if not request.learn or database is None:
        return None
    words = {name: name if request.policy == "auto" else request.policy for name in settings.policy_weights}
    return Learner(request.out, database, request.learn, words)


def _lines(*, quiet: bool) -> Callable[[ManyTally], None]:
    """A line on stderr now and then."""
    due = Now(SECONDS_BETWEEN_LINES, at_once=False)

    def line(tally: ManyTally) -> None:
        if not quiet and due():
            rate = (tally.relaxed + tally.failed) / max(tally.seconds, 1e-9)
            say(f"relaxion: {_in_words(tally)}, {rate:.1f} per s")

    return line


def _in_words(tally: ManyTally) -> str:
    dead = "workers ended and were replaced"
    beside = _some({"there already": tally.already, "failed": tally.failed, dead: tally.worker_deaths})
    more = "" if tally.input_read else " so far"
    return f"{tally.relaxed} relaxed{beside}, of {tally.read} structures read{more}"


def _some(counts: dict[str, int]) -> str:
    """Those that are not 0."""
    return "".join(f", {number} {what}" for what, number in counts.items() if number)


def _announce(request: ManyRequest, tally: ManyTally, counts: Counts) -> None:
    if request.as_json:
        tell(json.dumps({**_plain(counts), "this_run": tally.plain()}))
        return
    tell(f"{request.out}: {_counts_in_words(counts)}")
    if counts.failed:
        say(f"relaxion: {counts.failed} structures failed; {request.out}/summary.csv lists the reasons")


def _plain(counts: Counts) -> dict[str, Any]:
    return {**vars(counts), "doubles": counts.doubles}


def _counts_in_words(counts: Counts) -> str:
    beside = _some({"failed": counts.failed, "waiting": counts.waiting})
    doubles = counts.doubles
    read = "in the input" if counts.input_read else "read so far"
    more = "" if counts.input_read else " (the input is not read completely, so the total is unknown)"
    structures = f"{counts.places} structures {read}{_some({'of them duplicates': doubles})}{more}"
    return f"{counts.relaxed} relaxed ({counts.converged} converged){beside}; {structures}"


def show_status(path: Path, *, as_json: bool) -> int:
    """How a folder of results stands, also while a run goes on."""
    manifest = read_manifest(path)
    counts = read_counts(path)
    process = is_locked(path)
    run = _last_run(path)
    if as_json:
        plain = {"running": process is not None, "process": process, **_plain(counts), "last_run": run}
        tell(json.dumps({**plain, "settings": manifest["settings"]}))
        return DONE
    state = "no process is running" if process is None else f"process {process} is running"
    if process is None and (counts.waiting or not counts.input_read):
        state += "; the work is not finished: run the same relax-many again"
    tell(f"{path}: {_counts_in_words(counts)}; {state}")
    if process is not None and run.get("seconds"):
        relaxed = run.get("relaxed", 0)
        failed = run.get("failed", 0)
        seconds = run["seconds"]
        rate = (relaxed + failed) / seconds
        tell(f"this run: {relaxed} relaxed, {failed} failed in {seconds:.0f} s ({rate:.1f} per s)")
    return DONE


def _last_run(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        plain = json_of(path / PROGRESS)
        names = ("relaxed", "failed", "seconds")
        if isinstance(plain, dict) and all(isinstance(plain.get(name, 0), int | float) for name in names):
            return plain
    return {}


def merge_results(folder: Path, out: Path, *, force: bool) -> int:
    """One file of everything."""
    read_manifest(folder)
    merged = merge_into(folder, out, force=force)
    tell(f"{out}: {merged.written} structures")
    if merged.failed:
        say(f"relaxion: {merged.failed} structures have no result ({folder}/summary.csv lists the reasons)")
    if merged.waiting:
        say(f"relaxion: {merged.waiting} structures are not relaxed yet; run relax-many again, then merge with --force")
        return INCOMPLETE
    return DONE
