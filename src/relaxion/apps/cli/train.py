"""`relaxion train` and `tune`: a recipe, some overrides, a run folder or a folder of trials."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relaxion.apps.cli.command import DONE, ERROR, as_usage, interrupts
from relaxion.apps.cli.progress import bar, say, tell, warnings_as_sentences
from relaxion.apps.tuning import Sweep, SweepPlan, Trial, TrialWorker, first_values, read_space
from relaxion.errors import FileError, PolicyError, SettingsError
from relaxion.files import kind_of
from relaxion.model.policy_file import KIND as POLICY_KIND
from relaxion.policies import find_policy
from relaxion.settings import assigned
from relaxion.train.diagnostics import DIAGNOSIS, standing
from relaxion.train.runs.loop import Interrupted, OnProgress
from relaxion.train.runs.loop import train as train_in_folder
from relaxion.train.tasks.settings import RunSettings, find, run_folder, settings_from_recipe
from relaxion.workers import WorkerPlace

SAMPLERS = ("tpe", "random")
TRUST_RULE = ("secant_weight", "n_secants")  # settings that a policy passes on
NEWEST = {
    "rollout/ep_rew_mean": "return",
    "eval/mean_reward": "assessed",
    "eval/force_calls_mean": "force calls",
    "eval/force_calls_bfgs": "BFGS",
}


@dataclass(frozen=True)
class TrainRequest:
    """What `relaxion train` was asked."""

    recipe: str
    out: Path | None
    agent: str | None
    seed: int | None
    steps: int | None
    assignments: list[str] | None
    resume: bool
    from_weights: str | None
    calc: str | None
    structures: str | None
    force: bool
    collectors: str | None
    as_json: bool
    quiet: bool


@dataclass(frozen=True)
class TuneRequest:
    """What `relaxion tune` was asked."""

    recipe: str
    out: Path
    trials: int
    varied: list[str] | None
    agent: str | None
    seed: int | None
    steps: int | None
    assignments: list[str] | None
    workers: str
    sampler: str
    as_json: bool
    quiet: bool


def train_by_recipe(request: TrainRequest) -> int:
    recipe = request.recipe
    with as_usage(FileError):
        given = _of_origin(request.from_weights) | _world(request) | given_settings(request)
        settings = settings_from_recipe(find(recipe), request.agent, given)
    make = None
    if request.collectors is not None:
        from relaxion.train.collectors import trainer_with  # other runs need no collectors

        make = trainer_with(WorkerPlace.read(request.collectors, "collectors"))
    default = Path("runs") / f"{Path(recipe).stem}-{settings.agent_name}-{settings.training.seed}"
    out = request.out or run_folder(recipe) or default
    origin = None if request.from_weights is None else Path(request.from_weights)
    try:
        with warnings_as_sentences(), alarms_as_sentences(), progress(settings, out, request.quiet) as on_progress:
            result = train_in_folder(
                settings, out, resume=request.resume, from_weights=origin, force=request.force,
                on_progress=on_progress, make=make,
            )  # fmt: skip
    except Interrupted as stop:
        say(f"relaxion: {stop}; the same command with --resume continues")
        return interrupts.exit_code
    except KeyboardInterrupt:
        say(f"relaxion: stopped at once; --resume continues from the last checkpoint, if there is one in {out}")
        return interrupts.exit_code
    tell(json.dumps(asdict(result)) if request.as_json else f"{result.sentence()} -> {out}{os.sep}")
    return DONE


def _of_origin(origin: str | None) -> dict[str, Any]:
    """Settings of the network and of the step rule, where the beginning is a policy."""
    if origin is None or (Path(origin).exists() and kind_of(Path(origin)) != POLICY_KIND):
        return {}
    try:
        bundle = find_policy(origin)
    except PolicyError:
        return {}  # whoever reads the weights names all that it could have been
    kept = bundle.card.training_settings
    given = TRUST_RULE if kept.get("secant_weight") is not None else ()  # else the others are not used
    rule = {name: kept[name] for name in given if name in kept}
    return {**bundle.policy.settings.get("network", {}), **rule}


def _world(request: TrainRequest) -> dict[str, Any]:
    """The user's own: structures as they were named, from wherever the run is resumed."""
    given = {"calculator": request.calc, "structures": request.structures}
    if request.structures is not None and Path(request.structures).exists():
        given["structures"] = str(Path(request.structures).absolute())
    return {name: value for name, value in given.items() if value is not None}


def given_settings(request: TrainRequest | TuneRequest) -> dict[str, Any]:
    """What --set, --seed and --steps say."""
    options = {"seed": request.seed, "steps": request.steps}
    return assigned(request.assignments or (), "--set") | {name: it for name, it in options.items() if it is not None}


@contextmanager
def progress(settings: RunSettings, out: Path, quiet: bool) -> Iterator[OnProgress | None]:
    """A bar with the newest numbers and the newest alarm; plain lines where stderr is no terminal."""
    steps = settings.training.steps
    alarm = NewestAlarm()
    with bar(str(out), steps, quiet=quiet) as advance:

        def report(step: int, newest: Mapping[str, float]) -> None:
            words = ", ".join([*_numbers(newest), *alarm(newest)])
            if advance is not None and (step % 20 == 0 or step >= steps):
                advance(completed=step, words=words)

        yield None if quiet else report if advance is not None else _lines(settings, out)


def _lines(settings: RunSettings, out: Path) -> OnProgress:
    """Where nobody watches: a line for each interval of the log."""
    training = settings.training
    said = 0

    def report(step: int, newest: Mapping[str, float]) -> None:
        nonlocal said
        if step // training.log_interval_steps > said // training.log_interval_steps:
            said = step
            say(", ".join([f"{out}: step {step} of {training.steps}", *_numbers(newest)]))

    return report


def _numbers(newest: Mapping[str, float]) -> list[str]:
    return [f"{word} {newest[name]:.1f}" for name, word in NEWEST.items() if name in newest]


class NewestAlarm:
    """Of the alarms that stand, the one that began last."""

    def __init__(self) -> None:
        self._standing: list[str] = []

    def __call__(self, newest: Mapping[str, float]) -> list[str]:
        """From the newest scalars; nothing where all is well."""
        now = standing(newest)
        kept = [headline for headline in self._standing if headline in now]
        self._standing = kept + [headline for headline in now if headline not in kept]
        return [f"! {headline}" for headline in self._standing[-1:]]


@contextmanager
def alarms_as_sentences() -> Iterator[None]:
    """What the diagnosis logs as one line each on stderr."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(f"relaxion: alarm: {record.getMessage()}")
    diagnosis = logging.getLogger(DIAGNOSIS)
    passed_on = logging.getLogger(DIAGNOSIS).propagate
    diagnosis.addHandler(handler)
    diagnosis.propagate = False
    try:
        yield
    finally:
        diagnosis.removeHandler(handler)
        diagnosis.propagate = passed_on


def tune_recipe(request: TuneRequest) -> int:
    with as_usage(FileError):
        sweep = Sweep(_plan(request), request.out)
        place = WorkerPlace.read(request.workers)
    try:
        with interrupts.held(), sweep.owned():
            sweep.open()
            on_ended = partial(_say_how_it_ended, request, sweep)
            sweep.run(request.trials, place.open(TrialWorker), lambda: interrupts.noticed, on_ended)
            sweep.write_tables()
    except KeyboardInterrupt:
        say(f"relaxion: stopped at once; run the same command again to continue in {request.out}")
        return interrupts.exit_code
    if interrupts.noticed:
        say(f"relaxion: stopped, the trials are saved; run the same command again to continue in {request.out}")
        return interrupts.exit_code
    return _result(request, sweep)


def _plan(request: TuneRequest) -> SweepPlan:
    if request.sampler not in SAMPLERS:
        raise SettingsError(f"no sampler '{request.sampler}': {' or '.join(SAMPLERS)}")
    given = given_settings(request)
    recipe = find(request.recipe)
    varied = request.varied or ()
    probe = first_values(read_space(varied, {}))
    settings = settings_from_recipe(recipe, request.agent, given | probe)
    space = read_space(varied, settings.flat())
    return SweepPlan(recipe, request.agent, given, space, settings.training.seed, request.sampler)


def _say_how_it_ended(request: TuneRequest, sweep: Sweep, trial: Trial) -> None:
    if request.quiet or trial.ended is None:
        return
    ended = trial.ended
    best = sweep.best()
    how = f"failed: {ended.reason}" if ended.value is None else f"{ended.objective} {ended.value:.6g}"
    shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in trial.parameters.items()}
    words = ", ".join(f"{key} {value}" for key, value in shown.items())
    crown = " (best so far)" if best is not None and best.number == trial.number else ""
    n_done = sum(1 for one in sweep.trials.values() if one.ended is not None)
    say(f"{n_done}/{request.trials} trial {trial.number}: {how}{crown}; {words}")


def _result(request: TuneRequest, sweep: Sweep) -> int:
    best = sweep.best()
    trials = sweep.trials.values()
    failed = sum(1 for trial in trials if trial.ended is not None and trial.ended.value is None)
    if best is None or best.ended is None or best.ended.value is None or not math.isfinite(best.ended.value):
        say(f"relaxion: all {failed} trials failed; {request.out / 'trials.csv'} lists the reasons")
        return ERROR
    facts = {
        "trials": len(trials), "failed": failed, "best_trial": best.number, "objective": best.ended.objective,
        "value": best.ended.value, "parameters": best.parameters, "best": str(request.out / "best.toml"),
    }  # fmt: skip
    words = ", ".join(f"{key} = {value}" for key, value in best.parameters.items())
    sentence = (
        f"best of {len(trials)} trials ({failed} failed): {best.ended.objective} {best.ended.value:.6g} with {words} "
        f"-> {request.out / 'best.toml'}"
    )
    tell(json.dumps(facts) if request.as_json else sentence)
    return DONE
