"""What to try next, by Optuna.

Its study is built anew from what the trials' folders say, so that nothing of Optuna's is ever stored or read.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from relaxion.errors import MissingExtraError
from relaxion.scaling.sweeps.space import Choice, Space


@dataclass(frozen=True)
class Tried:
    """A trial as the sampler sees it: `value` is None while it runs, infinite where it failed."""

    parameters: Mapping[str, Any]
    value: float | None


def load_optuna() -> ModuleType:
    """The package; one sentence where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("a sweep needs an extra: pip install 'relaxion[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def propose(space: Space, tried: Sequence[Tried], seed: int, maximise: bool, sampler: str) -> dict[str, Any]:
    """Parameters of the next trial: a function of the seed and of what was tried so far, so a resume repeats it."""
    optuna = load_optuna()
    mixed = hashlib.sha256(f"{seed} {len(tried)}".encode()).digest()
    number = int.from_bytes(mixed[:4], "little")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's options that may change one day
        chosen = (
            optuna.samplers.RandomSampler(seed=number)
            if sampler == "random"
            else optuna.samplers.TPESampler(seed=number, constant_liar=True)
        )
        study = optuna.create_study(sampler=chosen, direction="maximize" if maximise else "minimize")
        distributions = _distributions(optuna, space)
        states = optuna.trial.TrialState
        for one in tried:
            study.add_trial(
                optuna.trial.create_trial(
                    state=states.RUNNING if one.value is None else states.COMPLETE,
                    params=dict(one.parameters),
                    distributions=distributions,
                    value=one.value,
                )
            )
        return dict(study.ask(distributions).params)


def _distributions(optuna: ModuleType, space: Space) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, dimension in space.items():
        if isinstance(dimension, Choice):
            found[key] = optuna.distributions.CategoricalDistribution(dimension.values)
        elif dimension.whole:
            found[key] = optuna.distributions.IntDistribution(dimension.low, dimension.high, log=dimension.log)
        else:
            found[key] = optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    return found
