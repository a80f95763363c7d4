"""The one place that turns what the library says about its arguments into options of the command line.

The library names Python arguments in backticks, `memory=relaxations` or `resume=True`. Whoever reads the command line's
output is told `--memory relaxations` and `--resume`. The table comes from the declared options.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from typer.main import get_command

MENTION = re.compile(r"`([a-z_]+)=([^`]*)`")
ANY_VALUE = "..."  # in a mention: a value of the reader's own


def declared_options() -> dict[str, list[Any]]:
    """The options of every command, as typer has them."""
    from relaxion.apps.cli.app import app  # which has loaded every command, and they say their sentences by this module

    commands: dict[str, Any] = getattr(get_command(app), "commands")  # noqa: B009 - of a group, which this is
    return {
        name: [one for one in command.params if one.param_type_name == "option"] for name, command in commands.items()
    }


def flag_of(declared: Any) -> str:
    """The long name: the first that begins with two hyphens."""
    return next(name for name in declared.opts if name.startswith("--"))


@cache
def flags() -> dict[str, tuple[str, str]]:
    """Flag and word for its value, by the name of the parameter. A test holds all commands to the same ones."""
    found: dict[str, tuple[str, str]] = {}
    for options in declared_options().values():
        for one in options:
            found.setdefault(one.name, (flag_of(one), one.metavar or ""))
    return found


def in_flags(text: str) -> str:
    """The same text with options in place of arguments; other words in backticks stay."""
    return MENTION.sub(_option, text)


def _option(mention: re.Match[str]) -> str:
    name = mention[1]
    value = mention[2].strip("'\"")
    if name not in flags():
        return mention[0]
    flag, metavar = flags()[name]
    if value == "True":
        return flag
    return f"{flag} {metavar if value == ANY_VALUE else value}".rstrip()
