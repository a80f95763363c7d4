"""`relaxion tune`: a recipe, a space, a folder of trials; the same command again goes on."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxion.cli.progress import say, tell
from relaxion.cli.train import first_signal
from relaxion.errors import FileError, RelaxionError, SettingsError
from relaxion.scaling.sweeps.space import read_space
from relaxion.scaling.sweeps.sweep import Plan, Sweep, Trial
from relaxion.scaling.sweeps.workers import workers_place
from relaxion.training.loop import noticing_interrupts
from relaxion.training.recipe import find, overrides, settings_from_recipe

DONE, ERROR, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
SAMPLERS = ("tpe", "random")


@dataclass(frozen=True)
class TuneRequest:
    """What the user asked for."""

    recipe: str
    out: Path
    trials: int
    agent: str | None
    seed: int | None
    steps: int | None
    assignments: tuple[str, ...]
    varied: tuple[str, ...]
    space: Path | None
    workers: str
    sampler: str
    as_json: bool
    quiet: bool


def tune(request: TuneRequest) -> int:
    """Do it and return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the trials' processes
    try:
        sweep = Sweep(_plan(request), request.out)
        place = workers_place(request.workers)
    except (SettingsError, FileError) as error:
        say(f"relaxion: {error}")
        return USAGE
    except RelaxionError as error:
        say(f"relaxion: {error}")
        return ERROR
    try:
        with first_signal() as first, noticing_interrupts() as stopped, sweep.owned():
            sweep.open()
            sweep.run(request.trials, place(), stopped, lambda trial: _progress(request, sweep, trial))
            sweep.write_tables()
            code = TERMINATED if first() == signal.SIGTERM else INTERRUPTED
    except KeyboardInterrupt:
        say(f"relaxion: stopped at once; the same command goes on in {request.out}")
        return INTERRUPTED
    except (RelaxionError, OSError) as error:
        say(f"relaxion: {error}")
        return ERROR
    if stopped.is_set():
        say(f"relaxion: stopped, what the trials have is saved; the same command goes on in {request.out}")
        return code
    return _result(request, sweep)


def _plan(request: TuneRequest) -> Plan:
    if request.sampler not in SAMPLERS:
        raise SettingsError(f"no sampler '{request.sampler}': {' or '.join(SAMPLERS)}")
    given = overrides(request.assignments)
    options = {"seed": request.seed, "steps": request.steps}
    given |= {name: value for name, value in options.items() if value is not None}
    recipe = find(request.recipe)
    probe = {key: dimension.ends[0] for key, dimension in read_space(request.varied, request.space, {}).items()}
    settings = settings_from_recipe(recipe, request.agent, given | probe)
    space = read_space(request.varied, request.space, settings.flat())
    return Plan(recipe, request.agent, given, space, settings.training.seed, request.sampler)


def _progress(request: TuneRequest, sweep: Sweep, trial: Trial) -> None:
    if request.quiet or trial.ended is None:
        return
    ended, best = trial.ended, sweep.best()
    how = f"failed: {ended.reason}" if ended.value is None else f"{ended.objective} {ended.value:.6g}"
    words = ", ".join(f"{key} {_short(value)}" for key, value in trial.parameters.items())
    crown = " (best so far)" if best is not None and best.number == trial.number else ""
    n_done = sum(1 for one in sweep.trials.values() if one.ended is not None)
    say(f"{n_done}/{request.trials} trial {trial.number}: {how}{crown}; {words}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


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
