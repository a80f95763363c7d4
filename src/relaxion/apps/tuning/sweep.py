"""A sweep in its folder. The folder is all there is: whoever runs the same command again goes on with it.

DIR/study.journal     Optuna's study: what is swept (a later command must say the same), and all trials
DIR/trials/0007.toml  what trial 7 tries, a recipe
DIR/trials/0007/      its run, an ordinary run folder
DIR/trials.csv        all of them in a table
DIR/best.toml         the best settings so far, a recipe
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxion.apps.tuning.space import (
    Space,
    ends_of,
    first_values,
    load_optuna,
    open_study,
    seeded_sampler,
    values_of,
    words_of,
)
from relaxion.apps.tuning.trial import Ended
from relaxion.errors import FileError, RunError, SettingsError
from relaxion.files import write_text
from relaxion.train.runs.recipe import settings_from_recipe
from relaxion.train.runs.run_folder import RunFolder
from relaxion.train.tasks.settings import RunSettings
from relaxion.workers import WorkerPool

if TYPE_CHECKING:
    from optuna import Study

NOT_VARIED = ("task", "seed", "steps", "assess_on", "assessment_starts")
MOST_LOSSES = 3  # of one trial's worker: then it is the trial that kills
FOLDER_FORMAT = 2
JOURNAL = "study.journal"
DESCRIPTION = "sweep"  # the attribute of the study that says what is swept
SECONDS_TO_LISTEN = 0.5


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
        self._losses: Counter[int] = Counter()

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
        waiting = [trial.number for trial in self.trials.values() if trial.ended is None]
        running: dict[int, int] = {}  # trials by worker
        try:
            while not stopped():
                for worker in workers.idle():
                    number = waiting.pop(0) if waiting else self._new_trial(n_trials)
                    if number is None:
                        break
                    running[worker] = number
                    workers.give(worker, self._recipe(number))
                if not running and not waiting and len(self.trials) >= n_trials:
                    break
                for news in workers.hear(SECONDS_TO_LISTEN):
                    for ended in news.results:
                        on_ended(self._tell(running.pop(news.worker), ended))
                    if news.lost and news.worker in running:
                        number = running.pop(news.worker)
                        self._losses[number] += 1
                        if self._losses[number] < MOST_LOSSES:
                            waiting.append(number)
                            continue
                        reason = f"its worker was lost {MOST_LOSSES} times; see {self._folder(number)}.log"
                        on_ended(self._tell(number, Ended(None, reason, "", 0.0)))
        finally:
            workers.stop()

    def _new_trial(self, n_trials: int) -> int | None:
        number = len(self.study.get_trials(deepcopy=False))
        if number >= n_trials:
            return None
        self.study.sampler = seeded_sampler(self.plan.sampler, self.plan.seed, number)
        return self.study.ask({**self.plan.space}).number

    def _recipe(self, number: int) -> str:
        """The folder of a trial, with its recipe beside it."""
        folder = self._folder(number).absolute()
        settings = self.plan.settings(values_of(self.plan.space, self.trials[number].parameters))
        write_text(folder.with_suffix(".toml"), settings.as_toml())
        return str(folder)

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
    values, ended = values_of(space, trial.parameters), trial.ended
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
