"""Settings tried in an Optuna study: a space of settings, a sweep in its folder, trials on the pool of workers.

A sweep lies in its folder. The folder is all there is: whoever runs the same command again goes on with it.

DIR/study.journal     Optuna's study: what is swept (a later command must say the same), and all trials
DIR/trials/0007.toml  what trial 7 tries, a recipe
DIR/trials/0007/      its run, an ordinary run folder
DIR/trials.csv        all of them in a table
DIR/best.toml         the best settings so far, a recipe
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from relaxion.errors import CheckpointError, FileError, MissingExtraError, RelaxionError, RunError, SettingsError
from relaxion.files import exclusive, write_text
from relaxion.train.runs.loop import Interrupted, train
from relaxion.train.runs.run_folder import LOCK, RunFolder
from relaxion.train.tasks.settings import RunSettings, settings_from_recipe
from relaxion.workers import TaskDriver, WorkerPool, WorkerTask
from relaxion.workers.pool import Record

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.samplers import BaseSampler

    Dimension: TypeAlias = FloatDistribution | IntDistribution | CategoricalDistribution

Space: TypeAlias = "dict[str, Dimension]"
"""Both bounds of a range are included; choices are JSON, because Optuna takes no lists."""

NOT_VARIED = ("task", "seed", "steps", "assess_on", "assessment_starts")
FOLDER_FORMAT = 2
JOURNAL = "study.journal"
DESCRIPTION = "sweep"  # the attribute of the study that says what is swept
FORCE_CALLS = "final_force_calls_mean"
RETURN = "final_return_mean"
PATIENCE_SECONDS = 60  # with a folder that is in use
EXAMPLE = "for example policy_learning_rate=1e-4:1e-2:log or batch_size=32|64|128"


def load_optuna() -> ModuleType:
    """The package; one sentence where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("a sweep needs an extra: pip install 'relaxion[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def read_space(assignments: Sequence[str], settings: Mapping[str, Any]) -> Space:
    """`key=lo:hi[:log]` and `key=a|b|c`; `settings` of the recipe say which of them are whole numbers."""
    given: dict[str, str] = {}
    for word in assignments:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not key or not value:
            raise SettingsError(f"what varies is key=lo:hi[:log] or key=a|b|c, got '{word}'; {EXAMPLE}")
        given[key] = value
    if not given:
        raise SettingsError(f"nothing to vary; say what as key=lo:hi[:log], {EXAMPLE}")
    return {key: _dimension(key, value, settings.get(key)) for key, value in sorted(given.items())}


def _dimension(key: str, value: str, present: Any) -> Dimension:
    if "|" in value:
        return _choice(key, [_toml(word) for word in value.split("|")])
    return _range(key, value, present)


def _range(key: str, value: str, present: Any) -> Dimension:
    low, high, scale, *more = [*(part.strip() for part in value.split(":")), "", ""]
    try:
        bounds = _number(low), _number(high)
    except (ValueError, OverflowError) as error:
        raise SettingsError(f"{key}={value}: expected lo:hi, lo:hi:log or a|b|c; {EXAMPLE}") from error
    if len(more) > 2 or scale not in ("", "log"):
        raise SettingsError(f"{key}={value}: after lo:hi only ':log' may follow")
    log = scale == "log"
    if not bounds[0] < bounds[1] or (log and bounds[0] <= 0):
        raise SettingsError(f"{key}={value}: the first bound must be below the second{', and above 0' if log else ''}")
    integers = all(isinstance(bound, int) for bound in bounds)
    if isinstance(present, int) and not isinstance(present, bool) and not integers:
        raise SettingsError(f"{key}={value}: {key} is a whole number, so its bounds must be")
    kinds = load_optuna().distributions
    kind = kinds.IntDistribution if integers and not isinstance(present, float) else kinds.FloatDistribution
    return kind(*bounds, log=log)


def _choice(key: str, values: Sequence[Any]) -> Dimension:
    words = tuple(json.dumps(value) for value in values)
    if len(set(words)) < 2 or len(set(words)) < len(words):
        raise SettingsError(f"{key}: a choice has two different values at least, got {', '.join(words)}")
    return load_optuna().distributions.CategoricalDistribution(words)


def _toml(word: str) -> Any:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word.strip()


def _number(word: str) -> int | float:
    value = _toml(word)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(word)
    return value


def words_of(dimension: Any) -> str:
    """As `read_space` takes them; a resume compares them."""
    if hasattr(dimension, "choices"):
        return "|".join(dimension.choices)
    return f"{dimension.low!r}:{dimension.high!r}{':log' if dimension.log else ''}"


def ends_of(dimension: Any) -> list[Any]:
    """Values of a setting that must be possible: both bounds, or every choice."""
    if hasattr(dimension, "choices"):
        return [json.loads(value) for value in dimension.choices]
    return [dimension.low, dimension.high]


def first_values(space: Space) -> dict[str, Any]:
    """The first end of every dimension."""
    return {key: ends_of(dimension)[0] for key, dimension in space.items()}


def values_of(space: Space, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from what Optuna proposed: choices are no longer JSON."""
    chosen = {key for key, dimension in space.items() if hasattr(dimension, "choices")}
    return {key: json.loads(value) if key in chosen else value for key, value in parameters.items()}


def open_study(file: Path, maximise: bool) -> Study:
    """The study in this file, a journal of JSON lines; begun where there is none."""
    optuna = load_optuna()
    backend = optuna.storages.journal.JournalFileBackend(str(file))
    direction = "maximize" if maximise else "minimize"
    try:
        storage = optuna.storages.JournalStorage(backend)
        return optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:  # Optuna, of a damaged journal
        raise FileError(f"{file} is no journal of Optuna's ({error}); choose another folder") from error


def seeded_sampler(sampler: str, seed: int, number: int) -> BaseSampler:
    """Of one trial: what is proposed depends on the seed and on what was tried so far, so a resume repeats it."""
    optuna = load_optuna()
    mixed = hashlib.sha256(f"{seed} {number}".encode()).digest()
    own = int.from_bytes(mixed[:4], "little")
    if sampler == "random":
        return optuna.samplers.RandomSampler(seed=own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an option that may change one day
        return optuna.samplers.TPESampler(seed=own, constant_liar=True)


# ---- one trial: an ordinary run of a recipe in a folder of its own; beside `0007` lies its recipe `0007.toml`


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    value: float | None  # of the objective; None: it failed
    reason: str | None  # why it failed
    objective: str
    seconds: float


def run_trial(trial: Path) -> Ended:
    """Train by the recipe. What goes wrong with these settings is a result, too."""
    settings = settings_from_recipe(trial.with_suffix(".toml"), None, {})
    _wait_until_free(trial / LOCK)
    began = time.monotonic()
    try:
        result = asdict(train(settings, trial, resume=RunFolder(trial).checkpoint.exists()))
    except (FileError, CheckpointError):
        raise  # a full disk says nothing about the settings
    except RelaxionError as error:
        return Ended(None, str(error), "", time.monotonic() - began)
    objective = FORCE_CALLS if FORCE_CALLS in result else RETURN
    return Ended(float(result[objective]), None, objective, float(result["wall_time_seconds"]))


def _wait_until_free(lock: Path) -> None:
    """The worker of a driver that was killed may be about to end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while lock.exists():
        try:
            exclusive(lock).close()
            return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline:
            raise FileError(f"{lock.parent} is still in use by another process; end that one first")
        time.sleep(0.2)


class TrialWorker:
    """Trains one trial after the other, each named by its folder; what it prints goes into the trial's log."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")

    def __call__(self, trials: Sequence[str]) -> list[Record]:
        (trial,) = trials
        folder = Path(trial)
        with folder.with_suffix(".log").open("ab") as log:
            os.dup2(log.fileno(), 1)  # standard output
            os.dup2(log.fileno(), 2)  # and errors
        try:
            return [{"key": folder.name, "ended": run_trial(folder)}]
        except Interrupted as error:  # asked to stop; all is saved
            raise SystemExit(str(error)) from error


# ---- the sweep


@dataclass(frozen=True)
class SweepPlan:
    """What is swept. Everything but the number of trials is fixed once the first has begun."""

    recipe: Path
    agent: str | None
    given: Mapping[str, Any]  # beside the recipe
    space: Space
    seed: int = 0
    sampler: str = "tpe"

    def settings(self, values: Mapping[str, Any]) -> RunSettings:
        """Of a trial. Structures are assessed on the validation side: what is chosen must not have seen the other."""
        plain = self.plain_settings(values)
        return plain if "assess_on" in {**self.given, **values} else plain.assessed_on_validation()

    def plain_settings(self, values: Mapping[str, Any]) -> RunSettings:
        """As the recipe says, with these values."""
        return settings_from_recipe(self.recipe, self.agent, {**self.given, **values})

    @cached_property
    def first(self) -> dict[str, Any]:
        return first_values(self.space)

    @cached_property
    def maximise(self) -> bool:
        """Returns are to be large, force calls to be few."""
        return not self.settings(self.first).COUNTS_FORCE_CALLS

    def check(self) -> None:
        """Every end of every dimension is a run that can be, with the others at their first."""
        if fixed := [key for key in NOT_VARIED if key in self.space]:
            raise SettingsError(f"{fixed[0]} cannot be varied: trials would not be comparable")
        if twice := [key for key in self.space if key in self.given or (key == "agent" and self.agent is not None)]:
            raise SettingsError(f"{twice[0]} is both set and varied; leave one out")
        for key, dimension in self.space.items():
            for end in ends_of(dimension):
                try:
                    self.settings(self.first | {key: end})
                except SettingsError as error:
                    raise SettingsError(f"{key} = {end!r} of the space is not valid: {error}") from error

    def described(self) -> dict[str, Any]:
        """For sweep.json; a resume compares it."""
        fixed = self.settings(self.first).flat()
        return {
            "format": FOLDER_FORMAT,
            "space": {key: words_of(dimension) for key, dimension in self.space.items()},
            "settings": {key: value for key, value in fixed.items() if key not in self.space},
            "seed": self.seed,
            "sampler": self.sampler,
        }


@dataclass(frozen=True)
class Trial:
    """One of a sweep, as the study says."""

    number: int
    parameters: dict[str, Any]  # as Optuna proposed them
    ended: Ended | None


class Sweep:
    """The folder, and the loop that fills it."""

    def __init__(self, plan: SweepPlan, out: Path) -> None:
        load_optuna()
        plan.check()
        self.plan = plan
        self.out = out
        self.trials_folder = out / "trials"
        self._study: Study | None = None

    def open(self) -> None:
        """Begin, or go on with what is there; another sweep's folder is refused by the names of what differs."""
        file = self.out / JOURNAL
        if not file.exists() and any(path.name != ".lock" for path in self.out.iterdir()):
            raise FileError(f"{self.out} is not empty and holds no sweep; choose another folder")
        self._study = open_study(file, self.plan.maximise)
        described = json.loads(json.dumps(self.plan.described()))
        known = self._study.user_attrs.get(DESCRIPTION)
        if known is None:
            self._study.set_user_attr(DESCRIPTION, described)
        else:
            _refuse_changes(self.out, known, described)
        self.trials_folder.mkdir(exist_ok=True)

    @property
    def study(self) -> Study:
        assert self._study is not None, "`open` comes first"
        return self._study

    @property
    def trials(self) -> dict[int, Trial]:
        """By number; those that have not ended are run again after a kill."""
        said = self.study.user_attrs
        found = {}
        for trial in self.study.get_trials(deepcopy=False):
            ended = Ended(**said[str(trial.number)]) if trial.state.is_finished() else None
            found[trial.number] = Trial(trial.number, dict(trial.params), ended)
        return found

    def run(
        self,
        n_trials: int,
        workers: WorkerPool[Any],
        stopped: Callable[[], bool],
        on_ended: Callable[[Trial], None],
    ) -> None:
        """Until there are so many trials, all ended, or until told to stop. Ends the workers."""

        def ended(came: Sequence[tuple[WorkerTask, Record]]) -> None:
            for task, record in came:
                on_ended(self._tell(int(task.key), record["ended"]))

        def failed(task: WorkerTask, reason: str) -> None:
            number = int(task.key)
            on_ended(self._tell(number, Ended(None, f"{reason}; see {self._folder(number)}.log", "", 0.0)))

        try:
            TaskDriver(workers, self._tasks(n_trials), 1, ended, failed).run(stopped, lambda: False)
        finally:
            workers.stop()

    def _tasks(self, n_trials: int) -> Iterator[WorkerTask]:
        """Trials that have not ended, then new ones, each proposed when a worker is free."""
        for trial in self.trials.values():
            if trial.ended is None:
                yield self._task(trial.number)
        while (number := self._new_trial(n_trials)) is not None:
            yield self._task(number)

    def _new_trial(self, n_trials: int) -> int | None:
        number = len(self.study.get_trials(deepcopy=False))
        if number >= n_trials:
            return None
        self.study.sampler = seeded_sampler(self.plan.sampler, self.plan.seed, number)
        return self.study.ask({**self.plan.space}).number

    def _task(self, number: int) -> WorkerTask:
        """The folder of a trial, with its recipe beside it."""
        folder = self._folder(number).absolute()
        settings = self.plan.settings(values_of(self.plan.space, self.trials[number].parameters))
        write_text(folder.with_suffix(".toml"), settings.as_toml())
        return WorkerTask(folder.name, str(folder))

    def _tell(self, number: int, ended: Ended) -> Trial:
        """Optuna is told last: a kill before that leaves a trial that has not ended."""
        self.study.set_user_attr(str(number), asdict(ended))
        # settings that fail are the worst there are, so that the sampler turns away from them
        worst = -math.inf if self.plan.maximise else math.inf
        self.study.tell(number, worst if ended.value is None else ended.value)
        self.write_tables()
        return self.trials[number]

    def best(self) -> Trial | None:
        """Of those that ended well; the earlier of equals."""
        ended = [(trial.ended.value, trial) for trial in self.trials.values() if trial.ended is not None]
        done = [(value, trial) for value, trial in ended if value is not None and math.isfinite(value)]
        best = max if self.plan.maximise else min
        return best(done, key=lambda one: one[0])[1] if done else None

    def write_tables(self) -> None:
        """trials.csv and best.toml, each in one go."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        keys = list(self.plan.space)
        table.writerow(["trial", "state", "objective", "value", *keys, "wall_time_seconds", "folder", "reason"])
        for number, trial in self.trials.items():
            reason = trial.ended.reason if trial.ended is not None else None
            table.writerow([number, *_row(trial, keys, self.plan.space), f"trials/{number:04d}", reason or ""])
        write_text(self.out / "trials.csv", text.getvalue())
        best = self.best()
        if best is not None and best.ended is not None:
            settings = self.plan.plain_settings(values_of(self.plan.space, best.parameters))
            said = f"# trial {best.number} of {self.out.name}: {best.ended.objective} {best.ended.value!r}\n"
            write_text(self.out / "best.toml", said + settings.as_toml())

    def _folder(self, number: int) -> Path:
        return self.trials_folder / f"{number:04d}"

    def owned(self) -> Any:
        """Nobody else sweeps here meanwhile."""
        return RunFolder(self.out).owned()


def _row(trial: Trial, keys: list[str], space: Space) -> list[Any]:
    values = values_of(space, trial.parameters)
    ended = trial.ended
    chosen = [json.dumps(values[key]) if isinstance(values[key], list) else values[key] for key in keys]
    if ended is None:
        return ["unfinished", "", "", *chosen, ""]
    state = "failed" if ended.value is None else "finished"
    return [state, ended.objective, "" if ended.value is None else repr(ended.value), *chosen, round(ended.seconds, 3)]


def _refuse_changes(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    pairs = [(old["space"], new["space"]), (old["settings"], new["settings"])]
    pairs += [({key: old.get(key)}, {key: new[key]}) for key in ("format", "seed", "sampler")]
    changes = [
        f"{key} (was {before.get(key)!r}, now {after.get(key)!r})"
        for before, after in pairs
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    if changes:
        raise RunError(f"{out} holds another sweep, these differ: {', '.join(changes)}; choose another folder")
