"""Frozen, validated settings. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import difflib
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from relaxion.errors import SettingsError

MOST_NAMED = 5  # mistakes in one sentence
MOST_KNOWN = 24  # names that are all told, where none is near
MOST_NEAR = 3  # of more, those that are
SETTINGS_PAGE = "docs/reference/python.md"  # has every setting


STRAINS = ("xx", "yy", "zz", "yz", "xz", "xy")  # components, in ASE's order


def strain_mask(words: str) -> tuple[bool, ...] | None:
    """Which of the six `xx,yy` names; None, so all, where it names none."""
    named = {word.strip() for word in words.split(",") if word.strip()}
    if unknown := named.difference(STRAINS):
        raise SettingsError(f"a mask of the cell names some of {','.join(STRAINS)}, got '{sorted(unknown)[0]}'")
    return tuple(strain in named for strain in STRAINS) if named else None


def shown(value: Any) -> str:
    """As Python would write it, cut where nobody would read on."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; a number of more digits than Python writes
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:99]}…"


def by_name(spec: str, what: str) -> Any:
    """The user's own `module:name`, its module also from the working directory; `what` it is, for the error."""
    module, _, name = spec.partition(":")
    before = sys.path
    sys.path = [*before, str(Path.cwd())]  # a console script does not look there by itself
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last two: names such as 'a..b'
        raise SettingsError(f"the {what} '{spec}' cannot be loaded ({error}); is its module on PYTHONPATH?") from error
    finally:
        sys.path = before


def nearest(word: str, known: Iterable[str], listed: str = "") -> str:
    """`did you mean 'x'?`; where nothing is near, the whole list, or of a long one the nearest few.

    Upper and lower case are the same. `listed`: where a long list can be read.
    """
    spelling = {name.lower(): name for name in sorted(known)}
    close = difflib.get_close_matches(word.lower(), spelling, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{spelling[close[0]]}'?"
    if len(spelling) <= MOST_KNOWN:
        return f"known: {', '.join(spelling.values())}"
    few = difflib.get_close_matches(word.lower(), spelling, n=MOST_NEAR, cutoff=0.0)
    where = f"; {listed} lists all" if listed else ""
    return f"the nearest of {len(spelling)} are {', '.join(spelling[name] for name in few)}{where}"


def assigned(words: Sequence[str], option: str = "a setting", example: str = "batch_size=256") -> dict[str, Any]:
    """`key=value` words; values are TOML (3e-4, true, [64, 64]), anything else is taken as text.

    `option`: where the words came from, for the sentence about one that is none.
    """
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"{option} takes key=value, got '{word}'; for example {example}")
        try:
            result[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            result[key.strip()] = value.strip()
    return result


def assignment(name: str, value: Any) -> str:
    """As `assigned` reads it back; words need no quotes unless they look like something else."""
    plain = f"{name}={value}"
    return plain if assigned([plain])[name] == value else f"{name}={json.dumps(value)}"


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys, no silent conversion of nonsense."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    younger: ClassVar[tuple[str, ...]] = ()
    """Fields younger than folders and files that are still read: at their defaults they are not written down."""

    retired: ClassVar[dict[str, Any]] = {}
    """Former fields that files may still have, with the one value they may have: it is a constant now."""

    @model_serializer(mode="wrap")
    def _without_younger(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        own = {name for kind in type(self).__mro__ for name in getattr(kind, "younger", ())}
        fields = type(self).model_fields
        usual = {name: fields[name].get_default(call_default_factory=True) for name in own if name in fields}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    @classmethod
    def given_up(cls) -> dict[str, Any]:
        """All `retired` fields, those of the bases too."""
        return {name: value for kind in cls.__mro__ for name, value in getattr(kind, "retired", {}).items()}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Settings from plain values (TOML, command line), with errors a person can act on."""
        if not isinstance(values, Mapping):
            raise SettingsError(f"{cls.__name__} is a table of settings, got {shown(values)}")
        gone = cls.given_up()
        values = {key: value for key, value in values.items() if key not in gone or value != gone[key]}
        for key in values:
            if key not in cls.model_fields:
                word = str(key)[:60]
                near = nearest(word, cls.model_fields, SETTINGS_PAGE)
                raise SettingsError(f"unknown setting '{word}' for {cls.__name__}: {near}")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, e['loc']))[:80]} = {shown(e['input'])}: {e['msg'][:200]}" for e in error.errors()
            ]
            more = f" and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
            raise SettingsError(f"{cls.__name__}: {'; '.join(lines[:MOST_NAMED])}{more}") from error
        except RecursionError as error:
            raise SettingsError(f"{cls.__name__}: a value is nested too deeply") from error


def command_words(command: str, *words: str, **options: Any) -> list[str]:
    """A command of ours as the words of a shell, to be shown as on a model card."""
    return ["relaxion", command, *words, *option_words(**options)]


def option_words(**options: Any) -> list[str]:
    """Options of our command line by name. True: a flag; a list: repeated; None and False: left out."""
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                found += [flag] if one is True else [flag, str(one)]
    return found
