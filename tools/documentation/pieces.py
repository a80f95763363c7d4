"""What a page asks for in a comment, `<!-- code: FILE NAME -->`, put in its place when the site is built.

| comment | becomes |
|---|---|
| `code: FILE [NAME…]` | the file, or these classes and functions of it |
| `output: FILE` | what a tutorial printed, as a block of text |
| `api: MODULE NAME…` | reference entries from docstrings |
| `commands` | the reference of the command line |

On GitHub the comments are invisible and the link that stands beside them leads to the same code.
"""

from __future__ import annotations

import re
from pathlib import Path

from documentation.api import described
from documentation.command_line import reference
from documentation.sources import code_of

ASKED = re.compile(r"^<!-- (?P<kind>code|output|api|commands)(?:: (?P<words>.+?))? -->$", re.MULTILINE)


def filled(root: Path, text: str) -> str:
    """The page with every piece in place."""

    def piece(match: re.Match[str]) -> str:
        words = (match["words"] or "").split()
        match match["kind"]:
            case "code":
                return _code(root, *words)
            case "output":
                return f"```text\n{_read(root, words[0]).rstrip()}\n```"
            case "api":
                return "\n\n".join(described(root, words[0], name) for name in words[1:])
            case _:
                return reference()

    return ASKED.sub(piece, text)


def _code(root: Path, file: str, *names: str) -> str:
    path = root / file
    body = "\n\n\n".join(code_of(path, name) for name in names) if names else _read(root, file).rstrip()
    title = file if not names else f"{file}: {', '.join(names)}"
    return f'```{{ .python title="{title}" }}\n{body}\n```'


def _read(root: Path, file: str) -> str:
    return (root / file).read_text()
