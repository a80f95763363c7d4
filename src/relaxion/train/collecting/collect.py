"""`relaxion collect`: relax many starts with expensive potentials on several processes, keep all that was evaluated.

Which start is whose is decided by its key alone, and done is what stands in the store. So a collection that was killed
goes on where it was, on as many processes as one likes, and does nothing twice.
"""

from __future__ import annotations

import fcntl
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from relaxion.database.store import TrajectoryStore
from relaxion.database.trajectory import Trajectory
from relaxion.errors import FileError, PolicyError, RelaxionWarning, RunError
from relaxion.model.policy_file import PolicyBundle, policy_of
from relaxion.model.stiffness_policy import MetricPolicy
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.learned import LearnedMetrics
from relaxion.policies import find_file
from relaxion.potentials import potential
from relaxion.structures import Outcome
from relaxion.train.collecting.relaxing import MakeStepper, Pool, Skipped
from relaxion.train.collecting.settings import CollectSettings
from relaxion.train.collecting.starts import file_structures, make_start
from relaxion.workers import LocalPool

LOCK = ".collecting"
WORKERS_LOCK = ".working"
SECONDS_TO_LISTEN = 0.5
MOST_LOSSES = 3  # of workers: then it is a start that kills


@dataclass(frozen=True)
class CollectJob:
    """One start by name."""

    kind: str
    number: int
    key: str


@dataclass(frozen=True)
class CollectWork:
    """What is to be done, by whom and until when: the same for every worker."""

    settings: CollectSettings
    store: Path
    policy: str | None
    deadline: float | None  # by the clock of time.time()

    def lacking(self) -> list[CollectJob]:
        done = TrajectoryStore.open(self.store).keys()
        return [job for job in jobs(self.settings) if job.key not in done]

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.time() > self.deadline

    def do(self, todo: Sequence[CollectJob], over: Callable[[], bool]) -> Iterator[Mapping[str, float]]:
        """What was written, shard by shard."""
        store = TrajectoryStore.open(self.store)
        return Collector(self.settings, store, todo, stepper_maker(self.policy)).run(lambda: over() or self.late)


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

    def add(self, news: Mapping[str, float]) -> None:
        for name, value in news.items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class KindSummary:
    """What the store holds of one kind."""

    engine: str
    trajectories: int
    converged_share: float
    free_cell_share: float
    mean_calls_converged: float
    mean_n_atoms: float


@dataclass(frozen=True)
class CollectSummary:
    """What the store holds, and what it took."""

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
    workers: int = 1,
    limit_minutes: float | None = None,
    policy: str | None = None,
    on_progress: OnProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> CollectSummary:
    """Do what the store lacks, or as much of it as the time allows; `stop` is asked about twice a second."""
    settings = _present(settings)
    stepper_maker(policy)  # complaints come before work, and from this process
    store = _store(settings, out)
    work = CollectWork(settings, out, policy, None if limit_minutes is None else time.time() + 60 * limit_minutes)
    with _alone(out):
        store.sweep()
        todo, wanted = work.lacking(), sum(own.number for own in settings.kinds.values())
        progress = CollectProgress(wanted, wanted - len(todo))

        def tell(news: Mapping[str, float]) -> None:
            progress.add(news)
            if on_progress is not None:
                on_progress(progress)

        if todo and workers == 1:  # here: no second process to start and to look after
            for news in work.do(todo, stop or (lambda: False)):
                tell(news)
        elif todo:
            _by_workers(work, workers, tell, stop or (lambda: False))
    return summary(store, settings)


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


def _store(settings: CollectSettings, out: Path) -> TrajectoryStore:
    description = settings.model_dump(mode="json")
    if not out.exists() or not any(out.iterdir()):
        return TrajectoryStore.create(out, description)
    store = TrajectoryStore.open(out)
    if store.description.get("side") != settings.side:
        raise RunError(
            f"the store {out} holds structures for {store.description.get('side')}, not for {settings.side}; "
            "choose another folder"
        )
    return store


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two collections into one store would do everything twice. (Others may append; their keys are their own.)"""
    with (out / LOCK).open("w") as file, (out / WORKERS_LOCK).open("w") as workers:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another 'relaxion collect' is busy with {out}; wait for it, or stop it and take more workers"
            ) from error
        fcntl.flock(workers, fcntl.LOCK_EX)  # those of a parent that was killed still write what they have
        fcntl.flock(workers, fcntl.LOCK_UN)
        yield


def _by_workers(
    work: CollectWork, number: int, tell: Callable[[Mapping[str, float]], None], asked_to_stop: Callable[[], bool]
) -> None:
    """Each worker does the share of its number. A lost one is replaced, and its share gone on with."""
    pool = LocalPool(number, partial(CollectWorker, work, number))
    unfinished = set(range(number))
    to_give = set(unfinished)
    losses = 0
    try:
        while unfinished and not asked_to_stop():
            for worker in to_give.intersection(pool.idle()):
                pool.give(worker, worker)
                to_give.discard(worker)
            for news in pool.hear(SECONDS_TO_LISTEN):
                for written in news.results:
                    tell(written)
                if news.done:
                    unfinished.discard(news.worker)
                if news.lost and news.worker in unfinished:
                    losses += 1
                    to_give.add(news.worker)
            if losses >= MOST_LOSSES:
                raise RunError(f"{losses} workers died (out of memory?); results are kept, the same command continues")
    finally:
        pool.stop()  # those at work write what they have


class CollectWorker:
    """One process: shares of what the store lacks. SIGTERM asks it to write what it has and to end its share."""

    def __init__(self, work: CollectWork, n_shares: int) -> None:
        self.work = work
        self.n_shares = n_shares
        self._asked_to_stop = False
        signal.signal(signal.SIGTERM, self._stop)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of potentials; the parent has told its own
        self._working = (work.store / WORKERS_LOCK).open("w")  # held as long as this process lives
        fcntl.flock(self._working, fcntl.LOCK_SH)

    def _stop(self, *_: object) -> None:
        self._asked_to_stop = True

    def __call__(self, share: int) -> Iterator[Mapping[str, float]]:
        todo = [job for job in self.work.lacking() if int(job.key[:8], 16) % self.n_shares == share]
        return self.work.do(todo, lambda: self._asked_to_stop)


class Collector:
    """What one process does: pools of relaxations, one for each engine, whose results go into the store."""

    def __init__(
        self,
        settings: CollectSettings,
        store: TrajectoryStore,
        todo: Sequence[CollectJob],
        make_stepper: MakeStepper,
    ) -> None:
        self.settings = settings
        self.store = store
        engines = list(dict.fromkeys(settings.kinds[job.kind].engine for job in todo))
        own = {engine: [job for job in todo if settings.kinds[job.kind].engine == engine] for engine in engines}
        self.pools = [
            Pool(
                potential(engine),
                engine,
                settings,
                (make_start(settings, job.kind, job.number) for job in own[engine]),
                make_stepper,
            )
            for engine in engines
        ]
        self.sizes = [len(own[engine]) for engine in engines]
        self.finished: list[Trajectory | Skipped] = []
        self.written_at, self.cpu_at, self.calls_at = time.monotonic(), time.process_time(), 0

    def run(self, over: Callable[[], bool]) -> Iterator[Mapping[str, float]]:
        """Until all is done or `over` says so; what is finished is written then too. Yields what was written."""
        while not over() and (pools := [k for k, pool in enumerate(self.pools) if not pool.done]):
            behind = min(pools, key=lambda k: self.pools[k].ended / self.sizes[k])  # engines keep step
            self.finished += self.pools[behind].advance()
            late = time.monotonic() - self.written_at > self.settings.seconds_per_shard
            if len(self.finished) >= self.settings.structures_per_shard or late:
                yield from self._write()
        yield from self._write()

    def _write(self) -> Iterator[Mapping[str, float]]:
        trajectories = [found for found in self.finished if isinstance(found, Trajectory)]
        skipped = {found.key: f"{found.reason} ({found.kind})" for found in self.finished if isinstance(found, Skipped)}
        calls, cpu = sum(pool.potential.calls for pool in self.pools), time.process_time()
        cost = {"force_calls": calls - self.calls_at, "cpu_seconds": cpu - self.cpu_at}
        self.store.append(trajectories, skipped, cost)
        self.finished, self.written_at = [], time.monotonic()
        if trajectories or skipped:  # what was spent in between goes with the next shard
            self.calls_at, self.cpu_at = calls, cpu
            converged = sum(found.outcome == Outcome.CONVERGED for found in trajectories)
            yield {"trajectories": len(trajectories), "converged": converged, "skipped": len(skipped), **cost}


def stepper_maker(policy: str | None) -> MakeStepper:
    """Who relaxes: the classical core, or a metric of a bundle under guard, so that data comes from where it goes."""
    if policy is None:
        return new_stepper
    bundle = PolicyBundle.read(find_file(policy, ()))
    network = policy_of(bundle)
    if not isinstance(network, MetricPolicy):
        raise PolicyError(
            f"the policy {bundle.name} does not predict stiffness; collect with one that does, or without a policy"
        )
    return lambda: new_stepper(metrics=LearnedMetrics(network.network))


def summary(store: TrajectoryStore, settings: CollectSettings | None = None) -> CollectSummary:
    """Of all that the store holds; complete where it has everything that the settings ask for."""
    about, skipped, cost = store.about(), store.skipped(), store.cost()
    keys = store.keys()
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
        force_calls=int(cost["force_calls"]),
        cpu_seconds=cost["cpu_seconds"],
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
