"""What a sweep varies: ranges and choices of settings, from words or a TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from relaxion.errors import SettingsError
from relaxion.training.recipe import read_toml

EXAMPLE = "for example policy_learning_rate=1e-4:1e-2:log or batch_size=32|64|128"


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included; whole ones where the setting is whole."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def words(self) -> str:
        return f"{self.low!r}:{self.high!r}{':log' if self.log else ''}"

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.low, self.high


@dataclass(frozen=True)
class Choice:
    """One of some values, each as JSON: Optuna takes no lists."""

    values: tuple[str, ...]

    def words(self) -> str:
        return "|".join(self.values)

    @property
    def ends(self) -> tuple[Any, ...]:
        return tuple(json.loads(value) for value in self.values)


Dimension: TypeAlias = Range | Choice
Space: TypeAlias = dict[str, Dimension]


def read_space(assignments: Sequence[str], file: Path | None, settings: Mapping[str, Any]) -> Space:
    """`key=lo:hi[:log]` and `key=a|b|c`, from the command line and from a file of `key = "lo:hi:log"`, `key = [a, b]`.

    `settings` are those of the recipe: they say which settings are whole numbers.
    """
    given: dict[str, str | list[Any]] = dict(read_toml(file)) if file is not None else {}
    for word in assignments:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not key or not value:
            raise SettingsError(f"--vary takes key=lo:hi[:log] or key=a|b|c, got '{word}'; {EXAMPLE}")
        given[key] = value
    if not given:
        raise SettingsError(f"nothing to vary; --vary key=lo:hi[:log] says what, {EXAMPLE}")
    return {key: _dimension(key, value, settings.get(key)) for key, value in sorted(given.items())}


def _dimension(key: str, value: Any, present: Any) -> Dimension:
    if isinstance(value, list):
        return _choice(key, value)
    if not isinstance(value, str):
        raise SettingsError(f'{key} = {value!r}: a space has "lo:hi", "lo:hi:log" or a list of values')
    if "|" in value:
        return _choice(key, [_toml(word) for word in value.split("|")])
    low, high, *rest = [*(part.strip() for part in value.split(":")), ""][:4] if ":" in value else ("", "", "")
    try:
        bounds = _number(low), _number(high)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{key}={value}: expected lo:hi, lo:hi:log or a|b|c; {EXAMPLE}") from error
    if value.count(":") > 2 or rest[0] not in ("", "log"):
        raise SettingsError(f"{key}={value}: after lo:hi only ':log' may follow")
    log = rest[0] == "log"
    if not bounds[0] < bounds[1] or (log and bounds[0] <= 0):
        raise SettingsError(f"{key}={value}: the first bound must be below the second{', and above 0' if log else ''}")
    integers = all(isinstance(bound, int) for bound in bounds)
    if isinstance(present, int) and not isinstance(present, bool) and not integers:
        raise SettingsError(f"{key}={value}: {key} is a whole number, so its bounds must be")
    whole = integers and not isinstance(present, float)
    return Range(bounds[0] if whole else float(bounds[0]), bounds[1] if whole else float(bounds[1]), log, whole)


def _choice(key: str, values: Sequence[Any]) -> Choice:
    words = tuple(json.dumps(value) for value in values)
    if len(set(words)) < 2 or len(set(words)) < len(words):
        raise SettingsError(f"{key}: a choice has two different values at least, got {', '.join(words)}")
    return Choice(words)


def _toml(word: str) -> Any:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word.strip()


def _number(word: str) -> int | float:
    value = _toml(word)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
        raise ValueError(word)
    return value


def values_of(space: Space, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from what Optuna proposed: choices are no longer JSON."""
    return {key: json.loads(value) if isinstance(space[key], Choice) else value for key, value in parameters.items()}
