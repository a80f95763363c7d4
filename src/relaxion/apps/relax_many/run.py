"""One run of `relax-many`: what a worker does, wherever it runs; and the driver that reads, hands out, writes down."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ase.io
import torch
from ase import Atoms
from ase.io.jsonio import decode, encode

from relaxion.apps.relax_many.learning import LearnedPolicies, Learner
from relaxion.apps.relax_many.results import ResultFolder, plain_info, written
from relaxion.apps.relax_many.settings import ManySettings, structure_key
from relaxion.batch import BATCH_SIZE, BatchRelaxer
from relaxion.errors import RelaxionError, SettingsError
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import Chooser
from relaxion.paths import check_file, chosen_numbers, without_slice
from relaxion.potentials.counting import error_in_words
from relaxion.potentials.registry import make_potential
from relaxion.structures import Outcome
from relaxion.train.data.dataset import opened_for_ase, reading_error
from relaxion.workers import TaskDriver, WorkerPool, WorkerTask
from relaxion.workers.pool import Record

SECONDS_BETWEEN_SIGNS = 0.5  # of life
SET_ASIDE = (Outcome.RUNNING, Outcome.NON_FINITE)  # ends without anything that could be called a result


def task_line(key: str, atoms: Atoms) -> str:
    """One structure for a worker. StructureError or another where its constraints cannot be told."""
    bare = atoms.copy()
    bare.info = plain_info(atoms)
    return json.dumps({"key": key, "atoms": encode(bare)})


def atoms_of(line: str) -> Atoms:
    """The opposite."""
    found = decode(json.loads(line)["atoms"])
    assert isinstance(found, Atoms)
    return found


class RelaxWorker:
    """Makes its calculator once, then relaxes one chunk after the other."""

    def __init__(
        self,
        settings: ManySettings,
        *,
        time_limit_seconds: float | None = None,
        batch_size: int = BATCH_SIZE,
        device: str | None = None,
        database: str | None = None,
        folder: str = ".",
    ) -> None:
        """PotentialError where the calculator cannot be made.

        settings: what decides results; nothing else does.
        time_limit_seconds: of one structure; whoever exceeds it is set aside. None: no end.
        batch_size: structures at once, where the calculator takes many.
        device: where networks compute; None: on the CPU.
        database: the relaxation database for every evaluated structure.
        folder: the working directory: calculators of the user's own are looked for here.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)  # of a process of our own: more threads only get in the way of other workers
        if folder != os.getcwd():  # noqa: PTH109
            os.chdir(folder)
        self.settings = settings
        self.batch_size = batch_size
        batch = settings.batch_settings(time_limit_seconds, device)
        potential = make_potential(settings.calculator, device)
        self.learned = None
        if settings.learn_every:
            unseen = batch.allow_unseen
            chooser = Chooser(batch.policy, allow_unseen=unseen, calculator=potential, device=device)
            self.learned = LearnedPolicies(chooser, allow_unseen=unseen)
        self.model = make_potential(settings.model, device) if settings.model else None
        self.relaxer = BatchRelaxer(potential, batch, self.learned, database, self.model)

    def close(self) -> None:
        self.relaxer.potential.close()
        if self.model is not None:
            self.model.close()

    def __call__(self, tasks: Sequence[str]) -> Iterator[dict[str, Any] | None]:
        """What became of each structure, as it is done; now and then None, a sign of life."""
        waiting = list(reversed(tasks))
        told = time.monotonic()
        # one by one where policies learn: company changes the last digits, and from there on everything
        at_once = self.batch_size if self.relaxer.together and self.learned is None else 1
        while waiting or self.relaxer.n_running or self.relaxer.has_finished:
            while waiting and self.relaxer.n_running < at_once:
                line = waiting.pop()
                plain = json.loads(line)
                if self.learned is not None:
                    self.learned.weights = plain.get("weights", {})
                self.relaxer.add(atoms_of(line), plain["key"])
            for relaxed in self.relaxer.advance():
                told = time.monotonic()
                yield self._record(relaxed)
            if time.monotonic() - told > SECONDS_BETWEEN_SIGNS:
                told = time.monotonic()
                yield None

    def _record(self, relaxed: Relaxed) -> dict[str, Any]:
        facts = {
            "key": relaxed.tag,
            "outcome": relaxed.label.replace(" ", "_"),
            "force_calls": relaxed.force_calls,
            "enthalpy_ev": relaxed.enthalpy_ev if self.settings.pressure_gpa else None,  # else it is the energy
            "fmax": relaxed.fmax_ev_per_angstrom,
            "policy": relaxed.policy_used,
            "fallback_used": relaxed.fallback_used,
            "seconds": round(relaxed.seconds, 4),
            "model_calls": relaxed.model_calls or None,
        }
        if relaxed.error is None and relaxed.outcome not in SET_ASIDE:
            return {**facts, "energy_ev": relaxed.energy_ev, "frame": written(relaxed.atoms, facts)}
        error = "the energy or forces at the start are not finite" if relaxed.error is None else relaxed.error
        return {**facts, "error": error, "last": _last_frame(relaxed, facts)}


def _last_frame(relaxed: Relaxed, facts: dict[str, Any]) -> str | None:
    try:
        return written(relaxed.atoms, facts)
    except (ValueError, TypeError, KeyError):  # of structures that are not fit to be written
        return None


# ---- The driver: reads structures, gives them to workers, writes down what comes back.
#
# Every structure of the input ends in exactly one place: it has a result, or a reason why it was set aside.

NOTHING: Mapping[str, Any] = MappingProxyType({})
SECONDS_BETWEEN_REPORTS = 2.0


@dataclass(frozen=True, eq=False)
class InputPlace:
    """One structure of the input, or why there is none."""

    file: Path
    index: int
    atoms: Atoms | None
    error: str | None = None

    @property
    def label(self) -> str:
        return f"{self.file}#{self.index}"

    def key_of_error(self) -> str:
        """Under which a place that cannot be read is set aside."""
        return "s" + hashlib.sha256(f"{self.label} {self.error}".encode()).hexdigest()[:32]


def check_files(files: Sequence[Path]) -> None:
    """Refuse what is not there before anything is begun."""
    seen: set[Path] = set()
    for file in files:
        check_file(without_slice(file)[0])
        if file.absolute() in seen:
            raise SettingsError(f"{file} is given twice; name each file once")
        seen.add(file.absolute())


def places(file: Path) -> Generator[InputPlace]:
    """Every structure of a file, or those that `file@0:2` means, in order; one that cannot be read says why."""
    file, words = without_slice(file)
    if words is None:
        yield from _all_places(file)
        return
    counted = sum(1 for _ in _all_places(file)) if "-" in words else sys.maxsize  # from the end: how many there are
    chosen = chosen_numbers(words, counted)
    found = False
    last = max(chosen[0], chosen[-1]) if chosen else -1
    for place in _all_places(file):
        if place.index > last and place.error is None:
            break
        if place.index in chosen or place.error is not None:
            found = True
            yield place
    if not found:
        yield InputPlace(file, 0, None, f"{file}@{words} selects no structure: it has fewer structures")


def _all_places(file: Path) -> Generator[InputPlace]:
    """Where a file cannot be read on, a last place says why."""
    index = 0
    try:
        check_file(file)
        with opened_for_ase(file) as (source, form):
            images = ase.io.iread(source, index=":", format=form, do_not_split_by_at_sign=True)
            while (atoms := next(images, None)) is not None:
                atoms.calc = None  # energies that came with it are of no use
                yield InputPlace(file, index, atoms)
                index += 1
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - ASE's readers have no common error: damaged files bring any kind
        yield InputPlace(file, index, None, f"{file} cannot be read from structure {index} on: {reading_error(error)}")
        return
    if index == 0:
        yield InputPlace(file, 0, None, f"{file} holds no structure")


@dataclass
class ManyTally:
    """How a run stands."""

    read: int = 0  # places in the input
    already: int = 0  # of them with a result when they were read, or on their way: earlier runs, doubles
    relaxed: int = 0  # by this run
    failed: int = 0
    not_converged: int = 0  # of those relaxed by this run
    worker_deaths: int = 0
    seconds: float = 0.0
    input_read: bool = False  # to its end

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class ManyRun:
    """One run over some files. `stop` is asked between two pieces of work."""

    folder: ResultFolder
    workers: WorkerPool[Any]
    settings: ManySettings
    files: Sequence[Path]
    chunk_size: int
    time_limit_seconds: float | None = None
    stop: Callable[[], bool] = lambda: False
    report: Callable[[ManyTally], None] = lambda _: None
    learner: Learner | None = None
    tally: ManyTally = field(default_factory=ManyTally)

    def __post_init__(self) -> None:
        self._keys_out: set[str] = set()
        self._rounds: dict[str, int] = {}  # by key, where policies learn: of structures that have not ended
        self._seen: set[str] = set()  # keys of the input, where rounds are counted
        self._began = self._reported = time.monotonic()
        self._context = self.settings.context

    def run(self) -> ManyTally:
        """Until everything has its result, or `stop` returns True."""
        with closing(self._opened_tasks()) as tasks:
            self._driver = TaskDriver(
                self.workers, tasks, self.chunk_size, self._ended, self._fail, self.time_limit_seconds
            )
            self._driver.run(self.stop, self._meanwhile)
        self._report(now=True)
        return self.tally

    def _meanwhile(self) -> bool:
        """Policies learn a little; whether they have more to do."""
        busy = self.learner is not None and self.learner.busy
        if self.learner is not None:
            self.learner.advance()
        self._report()
        return busy

    def _opened_tasks(self) -> Generator[WorkerTask | None]:
        """Tasks with the weights of their round; None while the next one waits for a fit."""
        for task in self._tasks():
            number = self._rounds.get(task.key)
            if self.learner is not None and number is not None:
                while not self.learner.is_open(number):
                    yield None
                if weights := self.learner.weights(number):
                    task.content = json.dumps({**json.loads(task.content), "weights": weights})
            yield task

    def _tasks(self) -> Generator[WorkerTask]:
        """Every structure of the input that has no result yet and is not on its way."""
        for file in self.files:
            n_places = 0
            with closing(places(file)) as found:
                for place in found:
                    self.tally.read += 1
                    key, task = self._looked_at(place)
                    self.folder.list_input(file, n_places, place.index, key, place.atoms)
                    n_places += 1
                    if task is not None:
                        yield task
            self.folder.end_of_input(file, n_places)
        self.tally.input_read = True

    def _looked_at(self, place: InputPlace) -> tuple[str, WorkerTask | None]:
        key = line = ""
        try:
            if place.atoms is not None:
                key = structure_key(place.atoms, self._context)
                line = task_line(key, place.atoms)
        except Exception as error:  # noqa: BLE001 - constraints of other packages may lack what is needed to store them
            place = InputPlace(place.file, place.index, None, f"it cannot be stored: {error_in_words(error)}")
        if place.atoms is None:
            self._set_aside(place.key_of_error(), str(place.error))
            return place.key_of_error(), None
        number = None
        if self.learner is not None and key not in self._seen:  # for the first time in this input
            self._seen.add(key)
            number = self.learner.enter(key, ended=self.folder.has(key))
        if key in self._keys_out or self.folder.has(key):
            self.tally.already += 1
            return key, None
        self._keys_out.add(key)
        if number is not None:
            self._rounds[key] = number
        return key, WorkerTask(key, line)

    def _ended(self, came: Sequence[tuple[WorkerTask, Record]]) -> None:
        """Results first, in one transaction: a record that was taken in is safe."""
        relaxed = [record for _, record in came if "frame" in record]
        self.folder.append(relaxed)
        for task, record in came:
            if "frame" in record:
                self._leave(task)
                self.tally.relaxed += 1
                self.tally.not_converged += record["outcome"] != "converged"
            else:
                self._fail(task, record["error"], record)

    def _leave(self, task: WorkerTask) -> None:
        self._keys_out.discard(task.key)
        number = self._rounds.pop(task.key, None)
        if self.learner is not None and number is not None:
            self.learner.ended(number)

    def _fail(self, task: WorkerTask, reason: str, record: Record = NOTHING) -> None:
        """Set it aside, with what its worker found and the structure as it came."""
        self._leave(task)
        frames = {"input": _input_frame(task)}
        if record.get("last") is not None:
            frames["last"] = record["last"]
        facts = {name: value for name, value in record.items() if name != "outcome"}
        self._set_aside(task.key, reason, facts, frames)

    def _set_aside(
        self, key: str, reason: str, facts: Mapping[str, Any] = NOTHING, frames: Mapping[str, str] = NOTHING
    ) -> None:
        if self.folder.has(key):
            self.tally.already += 1
            return
        self.folder.set_aside(key, reason, facts, frames)
        self.tally.failed += 1

    def _report(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._reported < SECONDS_BETWEEN_REPORTS:
            return
        self._reported = time.monotonic()
        self.tally.seconds = self._reported - self._began
        self.tally.worker_deaths = self._driver.worker_deaths
        plain = {**self.tally.plain(), "on_their_way": self._driver.n_on_their_way, "workers": self.workers.n_workers}
        self.folder.write_progress(plain)
        self.report(self.tally)


def _input_frame(task: WorkerTask) -> str:
    try:
        return written(atoms_of(task.content), {"key": task.key})
    except (RelaxionError, ValueError, TypeError, KeyError):  # not fit for extxyz; the line holds it all
        return json.dumps(json.loads(task.content)) + "\n"
