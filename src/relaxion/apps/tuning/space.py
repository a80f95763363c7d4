"""What a sweep varies, ranges and choices of settings from words or a TOML file; and the Optuna study that does it."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from relaxion.errors import FileError, MissingExtraError, SettingsError
from relaxion.train.runs.recipe import read_toml

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.samplers import BaseSampler

    Dimension: TypeAlias = FloatDistribution | IntDistribution | CategoricalDistribution

Space: TypeAlias = "dict[str, Dimension]"
"""Both bounds of a range are included; choices are JSON, because Optuna takes no lists."""

EXAMPLE = "for example policy_learning_rate=1e-4:1e-2:log or batch_size=32|64|128"


def load_optuna() -> ModuleType:
    """The package; one sentence where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("a sweep needs an extra: pip install 'relaxion[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def read_space(assignments: Sequence[str], file: Path | None, settings: Mapping[str, Any]) -> Space:
    """`key=lo:hi[:log]` and `key=a|b|c`, from the command line and from a file of `key = "lo:hi:log"`, `key = [a, b]`.

    `settings` are those of the recipe: they say which settings are whole numbers.
    """
    given: dict[str, str | list[Any]] = dict(read_toml(file)) if file is not None else {}
    for word in assignments:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not key or not value:
            raise SettingsError(f"what varies is key=lo:hi[:log] or key=a|b|c, got '{word}'; {EXAMPLE}")
        given[key] = value
    if not given:
        raise SettingsError(f"nothing to vary; say what as key=lo:hi[:log], {EXAMPLE}")
    return {key: _dimension(key, value, settings.get(key)) for key, value in sorted(given.items())}


def _dimension(key: str, value: Any, present: Any) -> Dimension:
    if isinstance(value, list):
        return _choice(key, value)
    if not isinstance(value, str):
        raise SettingsError(f'{key} = {value!r}: a space has "lo:hi", "lo:hi:log" or a list of values')
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
