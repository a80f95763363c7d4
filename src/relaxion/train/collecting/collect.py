"""`relaxion collect`: generated starts, relaxed on the pool of workers; every evaluated structure is kept.

Seed, kind and number decide about a start, and done is what the database holds. So a collection that was killed
continues where it was, on any number of workers, and does nothing twice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from relaxion.database.relaxations import RelaxationDatabase
from relaxion.database.trajectory import Trajectory
from relaxion.errors import FileError, PolicyError, RelaxionWarning, RunError
from relaxion.files import exclusive
from relaxion.model.policy_file import PolicyFile, policy_of
from relaxion.model.stiffness_policy import StiffnessPolicy
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.policies import find_file
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.structures import Outcome
from relaxion.train.collecting.relaxing import MakeStepper, Pool
from relaxion.train.collecting.starts import CollectSettings, file_structures, make_start
from relaxion.workers import TaskDriver, WorkerPlace, WorkerTask
from relaxion.workers.driver import Record

LOCK = ".collecting"
BATCHES_PER_CHUNK = 4  # a worker's batch is full most of the time


@dataclass(frozen=True)
class CollectJob:
    """One start by name."""

    kind: str
    number: int
    key: str


@dataclass
class CollectProgress:
    """How far a collection is."""

    wanted: int
    done_before: int
    began: float = field(default_factory=time.monotonic)
    trajectories: int = 0
    converged: int = 0
    skipped: int = 0
    force_calls: int = 0
    cpu_seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.done_before + self.trajectories + self.skipped

    @property
    def per_minute(self) -> float:
        return 60 * (self.trajectories + self.skipped) / max(time.monotonic() - self.began, 1e-9)


@dataclass(frozen=True)
class KindSummary:
    """What the database holds of one kind."""

    engine: str
    trajectories: int
    converged_share: float
    free_cell_share: float
    mean_calls_converged: float
    mean_n_atoms: float


@dataclass(frozen=True)
class CollectSummary:
    """What the database holds, and what it took."""

    complete: bool
    trajectories: int
    structures: int
    skipped: Mapping[str, int]
    force_calls: int
    cpu_seconds: float
    kinds: Mapping[str, KindSummary]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        share = "" if self.complete else "; not complete: the same command continues"
        skipped = ", ".join(f"{number} {reason}" for reason, number in sorted(self.skipped.items())) or "none"
        first = (
            f"{self.trajectories} relaxations, {self.structures} structures, {self.force_calls} force calls, "
            f"{self.cpu_seconds:.0f} s of CPU; skipped: {skipped}{share}"
        )
        return [first] + [
            f"  {name} ({k.engine}): {k.trajectories}, {k.converged_share:.0%} converged in "
            f"{k.mean_calls_converged:.1f} calls, {k.free_cell_share:.0%} free cells, {k.mean_n_atoms:.1f} atoms"
            for name, k in self.kinds.items()
        ]


OnProgress = Callable[[CollectProgress], None]


def collect(
    settings: CollectSettings,
    out: Path,
    *,
    workers: str = "local:1",
    limit_minutes: float | None = None,
    policy: str | None = None,
    on_progress: OnProgress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> CollectSummary:
    """Relax the starts that the database lacks, or as many of them as the time allows.

    settings: kinds of starts and how each is relaxed.
    out: folder of the database.
    workers: as `WorkerPlace.read` takes them.
    policy: name or file of the policy that relaxes; None: the classical optimizer.
    stop: is asked about twice a second; True ends the collection.
    """
    settings = _present(settings)
    stepper_maker(policy)  # complaints come before work, and from this process
    place = WorkerPlace.read(workers)
    database = _database(settings, out)
    deadline = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
    with _alone(out):
        done = database.keys()
        todo = [job for job in jobs(settings) if job.key not in done]
        wanted = sum(own.number for own in settings.kinds.values())
        collection = _Collection(database, CollectProgress(wanted, wanted - len(todo)), on_progress)
        tasks = (WorkerTask(job.key, (job.kind, job.number)) for job in todo)
        if todo:
            with place.open(partial(CollectWorker, settings, policy)) as pool:
                size = BATCHES_PER_CHUNK * settings.batch_n_structures
                driver = TaskDriver(pool, tasks, size, collection.ended, collection.failed)
                driver.run(lambda: stop() or (deadline is not None and time.monotonic() > deadline), lambda: False)
    return summary(database, settings)


class _Collection:
    """What becomes of the records."""

    def __init__(self, database: RelaxationDatabase, progress: CollectProgress, on_progress: OnProgress | None) -> None:
        self.database = database
        self.progress = progress
        self.on_progress = on_progress

    def ended(self, came: Sequence[tuple[WorkerTask, Record]]) -> None:
        records = [record for _, record in came]
        found: list[Trajectory] = [record["trajectory"] for record in records if "trajectory" in record]
        skipped = {record["key"]: record["skipped"] for record in records if "skipped" in record}
        spent = {name: sum(record["spent"][name] for record in records) for name in ("force_calls", "cpu_seconds")}
        self.database.append(found, skipped, spent)
        self.progress.trajectories += len(found)
        self.progress.converged += sum(one.outcome == Outcome.CONVERGED for one in found)
        self.progress.skipped += len(skipped)
        self.progress.force_calls += int(spent["force_calls"])
        self.progress.cpu_seconds += spent["cpu_seconds"]
        if self.on_progress is not None:
            self.on_progress(self.progress)

    def failed(self, task: WorkerTask, reason: str) -> None:
        """The start that its workers did not survive counts as skipped."""
        kind, _ = task.content
        self.database.append([], {task.key: f"{reason} ({kind})"})
        self.progress.skipped += 1


class CollectWorker:
    """One process: starts by kind and number, relaxed in batches, one batch for each potential."""

    def __init__(self, settings: CollectSettings, policy: str | None) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of potentials; the parent has shown its own
        self.settings = settings
        self.make_stepper = stepper_maker(policy)
        self.potentials: dict[str, Potential] = {}
        self._spent_before = (0, time.process_time())

    def __call__(self, chunk: Sequence[tuple[str, int]]) -> Iterator[dict[str, Any] | None]:
        by_engine: dict[str, list[tuple[str, int]]] = {}
        for kind, number in chunk:
            by_engine.setdefault(self.settings.kinds[kind].engine, []).append((kind, number))
        pools = {engine: self._pool(engine, starts) for engine, starts in by_engine.items()}
        while running := [engine for engine, pool in pools.items() if not pool.done]:
            # engines keep step
            behind = min(running, key=lambda engine: pools[engine].ended / len(by_engine[engine]))
            for found in pools[behind].advance():
                what = {"trajectory": found} if isinstance(found, Trajectory) else {"skipped": found.words}
                yield {"key": found.key, **what, "spent": self._spent()}
            yield None  # a sign of life

    def _pool(self, engine: str, starts: Sequence[tuple[str, int]]) -> Pool:
        if engine not in self.potentials:
            self.potentials[engine] = potential(engine)
        made = (make_start(self.settings, kind, number) for kind, number in starts)
        return Pool(self.potentials[engine], engine, self.settings, made, self.make_stepper)

    def _spent(self) -> dict[str, float]:
        """Since the last time."""
        before = self._spent_before
        now = (sum(own.calls for own in self.potentials.values()), time.process_time())
        self._spent_before = now
        return {"force_calls": now[0] - before[0], "cpu_seconds": now[1] - before[1]}


def jobs(settings: CollectSettings) -> list[CollectJob]:
    """All of them, kinds mixed in proportion: whatever part is done is a small collection of its own."""
    placed = []
    for kind, own in settings.kinds.items():
        placed += [
            ((number + 0.5) / own.number, CollectJob(kind, number, settings.key(kind, number)))
            for number in range(own.number)
        ]
    return [job for _, job in sorted(placed, key=lambda pair: (pair[0], pair[1].kind))]


def _present(settings: CollectSettings) -> CollectSettings:
    """Without the kinds whose files are not there."""
    kinds = {}
    for name, own in settings.kinds.items():
        if own.make == "file" and own.number and not file_structures(own, settings.side):
            files = ", ".join(Path(file).name for file in own.files)
            said = f"kind '{name}' is left out: its data set {files} is not here, or has no such structure"
            warnings.warn(said, RelaxionWarning, stacklevel=2)
            continue
        kinds[name] = own
    if not kinds:
        raise FileError("none of the recipe's data sets is here; nothing to collect")
    return settings.model_copy(update={"kinds": kinds})


def _database(settings: CollectSettings, out: Path) -> RelaxationDatabase:
    database = RelaxationDatabase.open_or_create(out, settings.model_dump(mode="json"))
    side = database.description.get("side")
    if side != settings.side:
        raise RunError(
            f"the database {out} holds structures for {side}, not for {settings.side}; choose another folder"
        )
    return database


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two collections into one database would do everything twice. (Others may append; their keys are their own.)"""
    try:
        lock = exclusive(out / LOCK)
    except BlockingIOError as error:
        raise RunError(
            f"another 'relaxion collect' is busy with {out}; wait for it, or stop it and take more workers"
        ) from error
    with lock:
        yield


def stepper_maker(policy: str | None) -> MakeStepper:
    """What relaxes: the classical optimizer, or the stiffness model of a policy file under the safeguard."""
    if policy is None:
        return new_stepper
    bundle = PolicyFile.read(find_file(policy, ()))
    network = policy_of(bundle)
    if not isinstance(network, StiffnessPolicy):
        raise PolicyError(
            f"the policy {bundle.name} does not predict stiffness; collect with one that does, or without a policy"
        )
    return lambda: new_stepper(policy_model=LearnedHessians(network.network))


def summary(database: RelaxationDatabase, settings: CollectSettings | None = None) -> CollectSummary:
    """Of all that the database holds; complete where it has everything that the settings ask for."""
    about = database.about()
    skipped = database.skipped()
    spent = database.spent()
    keys = {entry["key"] for entry in about} | set(skipped)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in about:
        by_kind.setdefault(entry["kind"], []).append(entry)
    reasons: dict[str, int] = {}
    for reason in skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    return CollectSummary(
        complete=settings is not None and all(job.key in keys for job in jobs(settings)),
        trajectories=len(about),
        structures=sum(entry["n_steps"] for entry in about),
        skipped=reasons,
        force_calls=int(spent["force_calls"]),
        cpu_seconds=spent["cpu_seconds"],
        kinds={kind: _kind_summary(entries) for kind, entries in sorted(by_kind.items())},
    )


def _kind_summary(entries: Sequence[Mapping[str, Any]]) -> KindSummary:
    converged = [entry for entry in entries if entry["outcome"] == Outcome.CONVERGED]
    return KindSummary(
        engine=entries[0]["engine"],
        trajectories=len(entries),
        converged_share=len(converged) / len(entries),
        free_cell_share=sum(entry["cell_free"] for entry in entries) / len(entries),
        mean_calls_converged=sum(e["n_steps"] for e in converged) / max(len(converged), 1),
        mean_n_atoms=sum(entry["n_atoms"] for entry in entries) / len(entries),
    )
