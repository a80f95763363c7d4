"""The command line's reference, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from documentation.api import wrapped
from relaxion.apps.cli.app import app


def reference() -> str:
    """All commands: what they do, usage, options, examples."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items() if not command.hidden)


def _command(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(["relaxion", name, *map(_argument_word, arguments), "[OPTIONS]"])
    parts = [f"## {name}", wrapped(_plain(command.help or "")), f"```\n{usage}\n```", _list(command.params)]
    return "\n\n".join(part for part in [*parts, _below(command.epilog or "")] if part)


def _argument_word(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()) + ("…" if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _list(parameters: list[Any]) -> str:
    shown = [one for one in parameters if not getattr(one, "hidden", False) and one.name != "help"]
    return "\n".join(wrapped(f"{_names(one)}: {_plain(one.help or '')}{_default(one)}", "- ", "  ") for one in shown)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _code(_argument_word(parameter))
    word = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
    names = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return _code(names + word)


def _kind(parameter: Any) -> str:
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}.get(getattr(annotation, "__name__", ""), "VALUE")


def _default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, False, "", ()) or callable(value) or parameter.required:
        return ""
    return f" Default: {_code(str(value))}."


def _below(epilog: str) -> str:
    """Examples as a block of commands, the rest as sentences."""
    lines = [line.strip() for line in epilog.split("\n")]
    commands = [line for line in lines if line.startswith("relaxion ")]
    words = _plain(" ".join(line for line in lines if line and not line.startswith(("relaxion ", "[bold]Examples"))))
    words = re.sub(r" (?=\*\*Exit)", "\n\n", re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", words))
    words = "\n\n".join(wrapped(block) for block in words.split("\n\n") if block)
    return "\n\n".join(part for part in ("```\n" + "\n".join(commands) + "\n```" if commands else "", words) if part)


def _plain(text: str) -> str:
    """One line, with nothing in it that Markdown would take for its own."""
    return re.sub(r"([*<_])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return f"`{text}`"
