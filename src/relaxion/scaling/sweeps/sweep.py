"""A sweep in its folder. The folder is all there is: whoever runs the same command again goes on with it.

DIR/sweep.json        what is swept: recipe's settings, space, seed; a later command must say the same
DIR/trials/0007.toml  what trial 7 tries, a recipe, written before it begins (0007.parameters: as proposed)
DIR/trials/0007/      its run, an ordinary run folder
DIR/trials/0007.json  how it ended, written last: a trial that has it is done
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
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from relaxion.errors import FileError, RunError, SettingsError
from relaxion.files import json_of, write_json, write_text
from relaxion.scaling.sweeps.space import Space, ends_of, first_values, load_optuna, propose, values_of, words_of
from relaxion.scaling.sweeps.trial import Ended, read_ended
from relaxion.training.recipe import read_toml, settings_from_recipe
from relaxion.training.run_folder import RunFolder
from relaxion.training.settings import RunSettings
from relaxion.workers import WorkerPool

NOT_VARIED = ("task", "seed", "steps", "assess_on", "assessment_starts")
MOST_LOSSES = 3  # of one trial's worker: then it is the trial that kills
FOLDER_FORMAT = 1
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
    """One of a sweep, as its files say."""

    number: int
    parameters: dict[str, Any]  # as Optuna proposed them
    ended: Ended | None


class Sweep:
    """The folder, and the loop that fills it."""

    def __init__(self, plan: SweepPlan, out: Path) -> None:
        load_optuna()
        plan.check()
        self.plan, self.out, self.trials_folder = plan, out, out / "trials"
        self.trials: dict[int, Trial] = {}
        self._losses: Counter[int] = Counter()

    def open(self) -> None:
        """Begin, or go on with what is there; another sweep's folder is refused by the names of what differs."""
        file, described = self.out / "sweep.json", json.loads(json.dumps(self.plan.described()))
        if file.exists():
            _refuse_changes(self.out, _described(file), described)
        else:
            if any(path.name != ".lock" for path in self.out.iterdir()):
                raise FileError(f"{self.out} is not empty and holds no sweep; choose another folder")
            write_json(file, described)
        self.trials_folder.mkdir(exist_ok=True)
        for recipe in sorted(self.trials_folder.glob("[0-9]*.toml")):
            number = int(recipe.stem)
            parameters = read_toml(recipe.with_suffix(".parameters"))
            self.trials[number] = Trial(number, parameters, read_ended(self._folder(number)))

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
                    workers.give(worker, str(self._folder(number).absolute()))
                if not running and not waiting and len(self.trials) >= n_trials:
                    break
                for news in workers.hear(SECONDS_TO_LISTEN):
                    if news.worker not in running or not (news.done or news.lost):
                        continue
                    number = running.pop(news.worker)
                    if self._noted(number):
                        self.write_tables()
                        on_ended(self.trials[number])
                    else:
                        waiting.append(number)
        finally:
            workers.stop()

    def _new_trial(self, n_trials: int) -> int | None:
        number = len(self.trials)
        if number >= n_trials:
            return None
        plan = self.plan
        tried = [(trial.parameters, self._told(trial)) for _, trial in sorted(self.trials.items())]
        parameters = propose(plan.space, tried, plan.seed, plan.maximise, plan.sampler)
        settings = plan.settings(values_of(plan.space, parameters))
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in parameters.items())
        write_text(self._folder(number).with_suffix(".parameters"), text)
        write_text(self._folder(number).with_suffix(".toml"), settings.as_toml())
        self.trials[number] = Trial(number, parameters, None)
        return number

    def _told(self, trial: Trial) -> float | None:
        if trial.ended is None:
            return None
        worst = -math.inf if self.plan.maximise else math.inf
        return worst if trial.ended.value is None else trial.ended.value

    def _noted(self, number: int) -> bool:
        """True when the trial is done, one way or the other."""
        folder = self._folder(number)
        ended = read_ended(folder)
        if ended is None:
            self._losses[number] += 1
            if self._losses[number] < MOST_LOSSES:
                return False
            reason = f"its worker was lost {MOST_LOSSES} times; see {folder}.log"
            ended = Ended(None, reason, "", 0.0)
            ended.write(folder)
        self.trials[number] = replace(self.trials[number], ended=ended)
        return True

    def best(self) -> Trial | None:
        """Of those that ended well; the earlier of equals."""
        told = [(self._told(trial), trial) for _, trial in sorted(self.trials.items())]
        done = [(value, trial) for value, trial in told if value is not None and math.isfinite(value)]
        best = max if self.plan.maximise else min
        return best(done, key=lambda one: one[0])[1] if done else None

    def write_tables(self) -> None:
        """trials.csv and best.toml, each in one go."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        keys = list(self.plan.space)
        table.writerow(["trial", "state", "objective", "value", *keys, "wall_time_seconds", "folder", "reason"])
        for number, trial in sorted(self.trials.items()):
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


def _described(path: Path) -> dict[str, Any]:
    try:
        values = json_of(path)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(values.get(part), dict) for part in ("space", "settings")):
        raise FileError(f"{path} does not describe a sweep")
    return values


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
