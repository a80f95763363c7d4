"""`relaxion train`: a recipe, some overrides, a run folder; progress on stderr, the result on stdout."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relaxion.bundles import find_policy
from relaxion.bundles.bundle import KIND as POLICY_KIND
from relaxion.cli.ending import DONE, Interrupts, as_usage
from relaxion.cli.progress import bar, say, tell, warnings_as_sentences
from relaxion.cli.requests import TrainRequest, TuneRequest
from relaxion.errors import FileError, SettingsError
from relaxion.files import kind_of
from relaxion.scaling.collectors.places import Collectors
from relaxion.settings import assigned
from relaxion.training.diagnostics import DIAGNOSIS, standing
from relaxion.training.loop import Interrupted, OnProgress
from relaxion.training.loop import train as train_in_folder
from relaxion.training.recipe import find, run_folder, settings_from_recipe
from relaxion.training.settings import RunSettings

TRUST_RULE = ("secant_weight", "n_secants")  # settings that a policy passes on
NEWEST = {
    "rollout/ep_rew_mean": "return",
    "eval/mean_reward": "assessed",
    "eval/force_calls_mean": "force calls",
    "eval/force_calls_bfgs": "BFGS",
}


def train(request: TrainRequest, interrupts: Interrupts) -> int:
    recipe = request.recipe
    assert recipe is not None, "`early` lists the recipes where none is named"
    with as_usage(FileError):
        given = _of_origin(request.origin) | _world(request) | given_settings(request)
        settings = settings_from_recipe(find(recipe), request.agent, given)
    collectors = None if request.collectors is None else Collectors.read(request.collectors)
    default = Path("runs") / f"{Path(recipe).stem}-{settings.agent_name}-{settings.training.seed}"
    out = request.out or run_folder(recipe) or default
    try:
        with warnings_as_sentences(), alarms_as_sentences(), progress(settings, out, request.quiet) as on_progress:
            result = train_in_folder(
                settings, out, resume=request.resume, from_weights=_origin(request), force=request.force,
                on_progress=on_progress, make=None if collectors is None else collectors.trainer,
            )  # fmt: skip
    except Interrupted as stop:
        say(f"relaxion: {stop}; the same command with --resume continues")
        return interrupts.exit_code
    except KeyboardInterrupt:
        say(f"relaxion: stopped at once; --resume continues from the last checkpoint, if there is one in {out}")
        return interrupts.exit_code
    tell(json.dumps(asdict(result)) if request.as_json else f"{result.sentence()} -> {out}{os.sep}")
    return DONE


def _origin(request: TrainRequest) -> Path | None:
    if request.origin is not None and request.from_weights is not None:
        raise SettingsError("--from and --from-weights mean the same; leave one out")
    return request.from_weights if request.origin is None else Path(request.origin)


def _of_origin(origin: str | None) -> dict[str, Any]:
    """Settings of the network and of the trust rule, where the beginning is a policy."""
    if origin is None or (Path(origin).exists() and kind_of(Path(origin)) != POLICY_KIND):
        return {}
    bundle = find_policy(origin)
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
    steps, alarm = settings.training.steps, NewestAlarm()
    with bar(str(out), steps, quiet=quiet) as advance:

        def report(step: int, newest: Mapping[str, float]) -> None:
            words = ", ".join([*_numbers(newest), *alarm(newest)])
            if advance is not None and (step % 20 == 0 or step >= steps):
                advance(completed=step, words=words)

        yield None if quiet else report if advance is not None else _lines(settings, out)


def _lines(settings: RunSettings, out: Path) -> OnProgress:
    """Where nobody watches: a line for each interval of the log."""
    training, said = settings.training, 0

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
    diagnosis, passed_on = logging.getLogger(DIAGNOSIS), logging.getLogger(DIAGNOSIS).propagate
    diagnosis.addHandler(handler)
    diagnosis.propagate = False
    try:
        yield
    finally:
        diagnosis.removeHandler(handler)
        diagnosis.propagate = passed_on
