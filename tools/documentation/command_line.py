"""The command line's reference, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from relaxion.cli.app import app


def reference() -> str:
    """All commands: what they do, usage, options, examples."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items() if not command.hidden)


def _command(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(["relaxion", name, *map(_argument_word, arguments), "[OPTIONS]"])
    parts = [f"## {name}", _plain(command.help or ""), f"```\n{usage}\n```", _table(command.params)]
    return "\n\n".join(part for part in [*parts, _below(command.epilog or "")] if part)


def _argument_word(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()) + ("…" if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _table(parameters: list[Any]) -> str:
    rows = [
        f"| {_names(one)} | {_default(one)} | {_plain(one.help or '')} |"
        for one in parameters
        if not getattr(one, "hidden", False) and one.name != "help"
    ]
    return "\n".join(["| argument or option | default | |", "|---|---|---|", *rows]) if rows else ""


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
    return _code(str(value))


def _below(epilog: str) -> str:
    """Examples as a block of commands, the rest as sentences."""
    lines = [line.strip() for line in epilog.split("\n")]
    commands = [line for line in lines if line.startswith("relaxion ")]
    words = _plain(" ".join(line for line in lines if line and not line.startswith(("relaxion ", "[bold]Examples"))))
    words = re.sub(r" (?=\*\*Exit)", "\n\n", re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", words))
    return "\n\n".join(part for part in ("```\n" + "\n".join(commands) + "\n```" if commands else "", words) if part)


def _plain(text: str) -> str:
    """One line, with nothing in it that Markdown would take for its own."""
    return _cell(re.sub(r"([*<_])", r"\\\1", " ".join(text.split())))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    """In a table of this Markdown a bar inside backticks needs no escape, and shows one."""
    return f"`{text}`"
