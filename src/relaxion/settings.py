"""Frozen, validated settings. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from relaxion.errors import SettingsError


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the whole list when nothing is near."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(choices)}"


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys, no silent conversion of nonsense."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Settings from plain values (TOML, command line), with errors a person can act on."""
        for key in values:
            if key not in cls.model_fields:
                raise SettingsError(f"unknown setting '{key}' for {cls.__name__}: {nearest(key, cls.model_fields)}")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg']}" for e in error.errors()]
            raise SettingsError(f"{cls.__name__}: " + "; ".join(lines)) from error
