"""A whole training run in its folder: begin or resume, assess and save on the way, end with a result.

`VectorLearner` is an agent as one object, for scripts and notebooks: learn, predict, save, load.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from relaxion.errors import AssessmentStopped, CheckpointError, FileError, PolicyError, RunError, SettingsError
from relaxion.files import Stored, joined, kind_of, replace_file, write_json, write_text
from relaxion.settings import shown
from relaxion.train.agents import AGENTS
from relaxion.train.experience.vectors import MakeEnvironment, shaped, task
from relaxion.train.runs.run_folder import AGENT, CHECKPOINT, AlarmFile, Clock, Records, RunFolder, leave_record
from relaxion.train.tasks.control import AssessedReturns, Trainer, VectorRunSettings, assess
from relaxion.train.tasks.progress import (
    CHECKPOINTS,
    DIVERGED,
    DivergedError,
    NonFiniteError,
    Result,
    RunTrainer,
    stored_settings,
)
from relaxion.train.tasks.settings import LoopSettings, RunSettings, read_settings

# none of them changes what is learned; intervals come of the steps that are asked for
MAY_DIFFER_ON_RESUME = ("steps", "log_interval_steps", "assessment_interval_steps", "checkpoint_interval_steps")

OnProgress = Callable[[int, Mapping[str, float]], None]  # step, the newest value of everything logged


MakeTrainer = Callable[[RunSettings], RunTrainer]


class Interrupted(Exception):
    """The user stopped the run; it can be resumed."""


def train(
    settings: RunSettings,
    out: Path,
    *,
    resume: bool = False,
    from_weights: Path | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    make: MakeTrainer | None = None,
) -> Result:
    """Train in the folder `out` until `settings.training.steps`, and write down everything.

    `make`: another maker of the trainer, for instance one whose structures are stepped by collectors on Ray.
    """
    if resume and (force or from_weights is not None):
        raise RunError("`resume=True` continues a run; it cannot be combined with `force=True` or `from_weights=...`")
    folder = RunFolder(out)
    if resume and not folder.checkpoint.exists():
        raise CheckpointError(f"{out} holds no checkpoint to resume from; leave `resume=True` out to begin")
    trainer = (make or make_trainer)(settings)  # a wrong task is refused before anything is written
    old_weights = None if from_weights is None else read_weights(from_weights)
    if not resume and not folder.is_run:
        folder.check_empty()  # a folder that never was a run's gets not even a lock, and nothing is removed there
    with folder.owned():
        if resume:
            return _resumed(trainer, folder, on_progress).go()
        run = _begun(trainer, folder, old_weights, force, on_progress)
        if from_weights is not None:
            replace_file(folder.origin, f"{from_weights}\n".encode())
        return run.go()


def make_trainer(settings: RunSettings) -> RunTrainer:
    """Who trains on this kind of task."""
    with enough_memory():
        return settings.trainer()


@contextmanager
def enough_memory() -> Iterator[None]:
    """A SettingsError where what is made inside asks for more memory than there is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise SettingsError(
            "replay, networks or structures of these settings need more memory than is available; try smaller ones"
        ) from error


def read_weights(path: Path) -> Stored:
    """The weights of a run folder (its newest checkpoint), of a file, or of a policy by its name."""
    if not path.exists() or kind_of(path) not in (None, CHECKPOINT, AGENT):
        return weights_of_policy(path)
    file = RunFolder(path).checkpoint if path.is_dir() else path
    return CHECKPOINTS.read(file, CHECKPOINT, AGENT)


def _begun(
    trainer: RunTrainer, folder: RunFolder, old_weights: Stored | None, force: bool, on_progress: OnProgress | None
) -> _Run:
    if old_weights is not None:
        trainer.start_from(old_weights)
    if force:
        folder.clear()
    else:
        folder.check_empty()
    return _Run(trainer, folder, _records(trainer.settings, folder), AlarmFile(folder.alarms), Clock(), on_progress)


def _resumed(trainer: RunTrainer, folder: RunFolder, on_progress: OnProgress | None) -> _Run:
    settings = trainer.settings
    stored = CHECKPOINTS.read(folder.checkpoint, CHECKPOINT)
    _check_values(folder.checkpoint, stored.values)
    refuse_changes(read_settings(stored.values["settings"]).flat(), settings.flat())
    trainer.restore(stored)
    if trainer.step - trainer.steps_per_round >= settings.training.steps:  # the last round may overshoot
        raise RunError(
            f"{folder.path} has already done {trainer.step} steps, more than the {settings.training.steps} asked for"
        )
    clock = Clock(stored.values["wall_time_seconds"], trainer.step)
    logged_up_to = stored.values["logged_up_to"]
    records = _records(settings, folder, stored.values["metrics_position"], trainer.step)
    try:
        folder.result.unlink(missing_ok=True)  # of fewer steps, or about to be written again; all else is read by now
    except OSError as error:
        raise FileError(f"{folder.result} cannot be replaced ({error.strerror}); move it out of the way") from error
    alarms = AlarmFile(folder.alarms, stored.values.get("alarms_position", 0))
    return _Run(trainer, folder, records, alarms, clock, on_progress, logged_up_to)


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    """What `_Run.save` writes, of the kinds it writes."""
    counts = ("metrics_position", "alarms_position", "logged_up_to")
    seconds = values.get("wall_time_seconds")
    good = isinstance(values.get("settings"), dict) and isinstance(seconds, int | float) and seconds >= 0
    good &= all(type(values.get(name, 0 if name == "alarms_position" else None)) is int for name in counts)
    if not good or min(values.get(name, 0) for name in counts) < 0:
        raise CheckpointError(f"{path} is damaged: its step is missing; use an older copy")


def _records(settings: RunSettings, folder: RunFolder, position: int = 0, resumed_at: int | None = None) -> Records:
    board = folder.tensorboard if settings.training.tensorboard else None
    return Records(folder.metrics, position=position, tensorboard=board, resumed_at=resumed_at)


def refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """A resumed run must be the same run."""
    names = [n for n in sorted(old.keys() | new.keys()) if n not in MAY_DIFFER_ON_RESUME and old.get(n) != new.get(n)]
    if names:
        changes = ", ".join(f"{name} (was {shown(old.get(name))}, now {shown(new.get(name))})" for name in names[:5])
        raise RunError(f"a resume keeps its settings, but these differ: {changes}; `from_weights=...` starts a new run")


@dataclass
class _Run:
    """The loop: train, log, assess, save."""

    trainer: RunTrainer
    folder: RunFolder
    records: Records
    alarms: AlarmFile
    clock: Clock
    on_progress: OnProgress | None
    _logged_up_to: int = 0  # a step; behind the trainer's only when an assessment was interrupted
    _interrupted: threading.Event = field(default_factory=threading.Event)
    _newest: dict[str, float] = field(default_factory=dict)

    @property
    def training(self) -> LoopSettings:
        return self.trainer.settings.training

    def go(self) -> Result:
        """To the end, unless interrupted or the numbers run away."""
        try:
            if not self.folder.checkpoint.exists():
                self.save()  # killed before this, the run can begin again; killed after it, resume
            write_text(self.folder.settings, self.trainer.settings.as_toml())
            with noticing_interrupts() as self._interrupted:
                self.trainer.prepare(self.folder.path)
                self._assess_start()
                if self._logged_up_to < self.trainer.step:
                    self._log()
                while self.trainer.step < self.training.steps:
                    self._step()
                    if self._interrupted.is_set():
                        raise self._saved_interrupt()
                return self._finish()
        except DivergedError as error:
            write_json(self.folder.offender, error.transition)
            raise RunError(
                f"{error.what} at step {self.trainer.step} is not finite: {DIVERGED}; {self.folder.checkpoint} keeps "
                "what was saved before, for `from_weights=...`"
            ) from error
        except NonFiniteError as error:
            write_json(self.folder.offender, error.transition)
            raise RunError(
                f"{error.what} at step {self.trainer.step} is not finite in 32 bits; the transition is in "
                f"{self.folder.offender}, and once its cause is fixed `resume=True` continues from the last checkpoint"
            ) from error
        finally:
            self.records.close()
            self.trainer.close()

    def _saved_interrupt(self) -> Interrupted:
        self.save()
        return Interrupted(f"stopped at step {self.trainer.step}, saved in {self.folder.path}")

    def _step(self) -> None:
        before = self.trainer.step
        self.trainer.advance()
        self._log()
        if self._due(before, self.training.checkpoint_interval_steps):
            self.save()
        if self.on_progress is not None:
            self.on_progress(self.trainer.step, self._newest)

    def _due(self, before: int, interval: int) -> bool:
        return interval > 0 and self.trainer.step // interval > before // interval

    def _log(self) -> None:
        before = self._logged_up_to
        assessed: dict[str, float] = {}
        if self._due(before, self.training.assessment_interval_steps):
            assessed = self._assessed().scalars()  # first: interrupted here, nothing is taken out of the trainer yet
        scalars: dict[str, float] = {}
        if self._due(before, self.training.log_interval_steps):
            scalars |= self.trainer.scalars() | self.clock.scalars(self.trainer.step)
        scalars |= assessed
        if scalars:
            self._record(scalars)
            self.alarms.write(self.trainer.take_events())
        self._logged_up_to = self.trainer.step

    def _assess_start(self) -> None:
        """What training begins with: the first point of the curve."""
        if self.trainer.step == 0 and 0 < self.training.assessment_interval_steps <= self.training.steps:
            self._record(self._assessed().scalars())

    def _record(self, scalars: Mapping[str, float]) -> None:
        self.records.write({"time/total_timesteps": self.trainer.step, **scalars})
        self._newest |= scalars

    def _record_end(self, scalars: Mapping[str, float]) -> None:
        """The assessment at the end, unless an interval ended with the last round and has recorded it."""
        if not self._due(self.trainer.step - self.trainer.steps_per_round, self.training.assessment_interval_steps):
            self._record(scalars)

    def _assessed(self) -> Any:
        try:
            assessed = self.trainer.assess(self._interrupted.is_set)
        except AssessmentStopped as stopped:
            raise self._saved_interrupt() from stopped
        leave_record(self.folder.assessment, assessed, self.trainer.step)
        return assessed

    def save(self) -> None:
        values = {
            "settings": self.trainer.settings.flat(),
            "metrics_position": self.records.position(),
            "alarms_position": self.alarms.position(),
            "logged_up_to": self._logged_up_to,
            "wall_time_seconds": self.clock.seconds(),
        }
        CHECKPOINTS.write(self.folder.checkpoint, CHECKPOINT, self.trainer.snapshot(), values)

    def _finish(self) -> Result:
        self.save()
        final = self._assessed()  # not in the checkpoint: a run that goes on from it is one that never stopped here
        write_agent(self.folder.agent, self.trainer)
        self._record_end(final.scalars())
        result = self.trainer.result(final, self.clock.seconds())
        write_json(self.folder.result, asdict(result))
        return result


def write_agent(path: Path, trainer: RunTrainer) -> None:
    """Networks and normaliser with the settings they belong to: enough to act, or to begin a new run from."""
    CHECKPOINTS.write(path, AGENT, trainer.weights(), {"settings": trainer.settings.flat()})


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C and a polite kill set a flag, to be looked at between two steps; a second one stops at once."""
    noticed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noticed  # only the main thread may listen to signals
        return
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in wanted}

    def notice(number: int, _frame: Any) -> None:
        noticed.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in wanted:
        signal.signal(number, notice)
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def weights_of_policy(name_or_path: Path) -> Stored:
    """Of a policy file, as the run that made it left them; a CheckpointError where it predicts no stiffness."""
    from relaxion.policies import find_policy  # runs on vectors need no policies

    try:
        bundle = find_policy(str(name_or_path))
    except PolicyError as error:
        raise CheckpointError(
            f"{name_or_path} is neither a run, nor a file of weights, nor a policy: {error}"
        ) from error
    if bundle.policy.kind != "stiffness":
        raise CheckpointError(f"the policy {bundle.name} does not predict stiffness; start from the run that made it")
    return Stored(joined({"stiffness": dict(bundle.policy.weights)}), {"settings": {}})


class VectorLearner:
    """An algorithm with its task. For long runs that can be resumed use `relaxion train`.

    >>> agent = TD3("Pendulum-v1", seed=0, widths=(64, 64))
    >>> agent.learn(10_000)
    >>> action = agent.predict(observation)
    """

    name: ClassVar[str]

    def __init__(self, environment: str | MakeEnvironment, *, seed: int = 0, **settings: Any) -> None:
        """`environment` is a Gymnasium id or a function that makes one; settings are those of recipes."""
        if isinstance(environment, gymnasium.Env) or not (isinstance(environment, str) or callable(environment)):
            raise SettingsError(
                f"an environment is given by its id or by a function that makes a new one, got {environment!r}; "
                f'for example {type(self).__name__}(lambda: gymnasium.make("Pendulum-v1"))'
            )
        word = environment if isinstance(environment, str) else getattr(environment, "__name__", "environment")
        learned = task(word, None if isinstance(environment, str) else environment)
        values = {**settings, "task": word, "seed": seed, "agent": self.name}
        self._trainer = Trainer(VectorRunSettings.read(values), learned)

    @property
    def settings(self) -> RunSettings:
        return self._trainer.settings

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._trainer.step

    def learn(self, steps: int, callback: Callable[[Self], bool | None] | None = None) -> Self:
        """Go on for so many environment steps.

        `callback` is called with this object after every step of the environments; it may look at `steps`, `metrics()`
        and `assess()`, or save. Where it returns False, learning stops, as in Stable-Baselines3.
        """
        end = self._trainer.step + steps
        try:
            while self._trainer.step < end:
                self._trainer.advance()
                if callback is not None and callback(self) is False:
                    break
        except NonFiniteError as error:
            raise RunError(f"{error.what} at step {self.steps} is not finite: {error.transition}") from error
        return self

    def predict(self, observation: ArrayLike) -> NDArray[Any]:
        """The best known action for one observation, or one for each of several; shapes are those of the spaces."""
        learned = self._trainer.task
        raw = torch.as_tensor(np.asarray(observation, dtype=np.float32))
        one = raw.shape == learned.observation_shape
        if not one and (raw.ndim == 0 or raw.shape[1:] != learned.observation_shape):
            shape = learned.observation_shape
            raise SettingsError(f"an observation has shape {shape}, several have one axis more, got {tuple(raw.shape)}")
        actions = self._trainer.act(raw.reshape(1 if one else len(raw), learned.observation_size)).numpy()
        own = shaped(learned.actions, actions)
        return own[0] if one else own

    def assess(self, n_starts: int = 20) -> AssessedReturns:
        """Returns without noise from fixed starts, in environments of their own."""
        return assess(self._trainer.act, self._trainer.task, n_starts)

    def metrics(self) -> dict[str, float]:
        """Records of training since the last call, under the names of metrics.jsonl."""
        return self._trainer.scalars()

    def save(self, path: str | Path) -> None:
        """Networks, normaliser and settings; not the replay."""
        write_agent(Path(path), self._trainer)

    @classmethod
    def load(cls, path: str | Path, environment: str | MakeEnvironment | None = None) -> Self:
        """From `save`, or from the folder of a run. It acts as the saved one did; what it learns is a new run."""
        stored = read_weights(Path(path))
        settings = dict(stored_settings(stored))
        if (name := settings.pop("agent", None)) != cls.name:
            raise CheckpointError(f"{path} holds an agent of kind {str(name)[:40]}, not {cls.name}")
        if not isinstance(settings.get("task"), str):
            raise CheckpointError(f"{path} does not name the task of its agent; choose another file")
        learner = cls(environment or settings["task"], **{k: v for k, v in settings.items() if k != "task"})
        learner._trainer.start_from(stored)
        return learner


@cache
def learner(name: str) -> type[VectorLearner]:
    """The class of the agent of this name, as `relaxion.train.agents` shows it."""
    algorithm = AGENTS[name].algorithm
    facts = {"name": name, "__doc__": algorithm.__doc__, "__module__": "relaxion.train.agents"}
    return type(algorithm.__name__, (VectorLearner,), facts)
