"""`relaxion tune`: a recipe, a space, a folder of trials; the same command again goes on."""

from __future__ import annotations

import json
import math
from functools import partial

from relaxion.cli.ending import DONE, ERROR, Interrupts, as_usage
from relaxion.cli.progress import say, tell
from relaxion.cli.requests import TuneRequest
from relaxion.cli.train import given_settings
from relaxion.errors import FileError, SettingsError
from relaxion.scaling.sweeps.space import first_values, read_space
from relaxion.scaling.sweeps.sweep import Sweep, SweepPlan, Trial
from relaxion.scaling.sweeps.trial import TrialWorker
from relaxion.training.recipe import find, settings_from_recipe
from relaxion.workers import WorkerPlace

SAMPLERS = ("tpe", "random")


def tune(request: TuneRequest, interrupts: Interrupts) -> int:
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
    given, recipe, varied = given_settings(request), find(request.recipe), request.varied or ()
    probe = first_values(read_space(varied, request.space, {}))
    settings = settings_from_recipe(recipe, request.agent, given | probe)
    space = read_space(varied, request.space, settings.flat())
    return SweepPlan(recipe, request.agent, given, space, settings.training.seed, request.sampler)


def _say_how_it_ended(request: TuneRequest, sweep: Sweep, trial: Trial) -> None:
    if request.quiet or trial.ended is None:
        return
    ended, best = trial.ended, sweep.best()
    how = f"failed: {ended.reason}" if ended.value is None else f"{ended.objective} {ended.value:.6g}"
    shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in trial.parameters.items()}
    words = ", ".join(f"{key} {value}" for key, value in shown.items())
    crown = " (best so far)" if best is not None and best.number == trial.number else ""
    n_done = sum(1 for one in sweep.trials.values() if one.ended is not None)
    say(f"{n_done}/{request.trials} trial {trial.number}: {how}{crown}; {words}")


def _result(request: TuneRequest, sweep: Sweep) -> int:
    best, trials = sweep.best(), sweep.trials.values()
    failed = sum(1 for trial in trials if trial.ended is not None and trial.ended.value is None)
    if best is None or best.ended is None or best.ended.value is None or not math.isfinite(best.ended.value):
        say(f"relaxion: all {failed} trials failed; {request.out / 'trials.csv'} says why")
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
