"""The one place that turns what the library says about its arguments into options of the command line.

The library names Python arguments in backticks, `memory=relaxations` or `resume=True`. Whoever reads the command line's
output is told `--memory relaxations` and `--resume`. The table comes from the declared options.
"""

from __future__ import annotations

import re
from dataclasses import Field, fields
from functools import cache
from typing import Any

from typer.models import OptionInfo

from relaxion.cli import requests, showing_requests
from relaxion.cli.options import TYPER

MENTION = re.compile(r"`([a-z_]+)=([^`]*)`")
ANY_VALUE = "..."  # in a mention: a value of the reader's own


@cache
def flags() -> dict[str, tuple[str, str]]:
    """Flag and word for its value, by the name of the field. A test holds all commands to the same ones."""
    found: dict[str, tuple[str, str]] = {}
    for command in (*requests.COMMANDS, *showing_requests.COMMANDS):
        for field in fields(command.request):
            if isinstance(field.metadata[TYPER], OptionInfo):
                found.setdefault(field.name, (flag_of(field), field.metadata[TYPER].metavar or ""))
    return found


def flag_of(field: Field[Any]) -> str:
    """As it was declared, or made of the field's name. In typer the first name stands where the default would."""
    declared = field.metadata[TYPER]
    named = [word for word in (declared.default, *(declared.param_decls or ())) if str(word).startswith("--")]
    return named[0] if named else f"--{field.name.replace('_', '-')}"


def in_flags(text: str) -> str:
    """The same text with options in place of arguments; other words in backticks stay."""
    return MENTION.sub(_option, text)


def _option(mention: re.Match[str]) -> str:
    name, value = mention[1], mention[2].strip("'\"")
    if name not in flags():
        return mention[0]
    flag, metavar = flags()[name]
    if value == "True":
        return flag
    return f"{flag} {metavar if value == ANY_VALUE else value}".rstrip()
