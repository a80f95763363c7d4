"""What a page takes from the code: everything between `<!-- code: FILE NAME -->` and the next `<!-- end -->`.

| comment | what stands below it |
|---|---|
| `code: FILE [NAME…]` | the file, or these classes and functions of it |
| `output: FILE` | what a tutorial printed |
| `api: MODULE NAME…` | reference entries from docstrings |
| `commands` | the reference of the command line |
| `alarms`, `numbers` | the tables of the training diagnostics |
| `results`, `core`, `tight`, `brief` | force calls from `benchmarks/relaxation/results`, for results page and README |
| `sets` | what `relaxion bench` knows by name |
| `readme` | the README from below its title to its first section |
| `requirements` | the list of `tests/requirements.toml` |
| `turned[: SYSTEM]` | what turning a setting did, from the results of `benchmarks/atoms/tuning_guide.py` |
| `learned: TASK` | what agents learned on `emt`, `al-fe` or `alfe`, from `benchmarks/atoms/results/learning` |

`python tools/fill_pages.py` writes them into the pages; a test compares the pages with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

from documentation import learning, results
from documentation.api import described
from documentation.command_line import reference
from documentation.diagnostics import alarms, numbers
from documentation.prose import with_links
from documentation.requirements import requirements
from documentation.sources import code_of

END = "<!-- end -->"
# filled when the site is built, not in the repository
REFERENCE = ("docs/reference/", "docs/results/", "docs/diagnostics.md", "docs/index.md", "docs/requirements.md")
KINDS = "code|output|api|commands|alarms|numbers|results|core|cells|sets|tight|brief|learned|turned|readme|requirements"
ASKED = re.compile(
    rf"^(?P<start><!-- (?P<kind>{KINDS})(?:: (?P<words>[^>]+?))? -->)(?:\n(?:(?!<!-- ).*\n)*?{END})?$", re.MULTILINE
)


def filled(root: Path, text: str) -> str:
    """The page with every piece as the code has it now."""

    def piece(match: re.Match[str]) -> str:
        made = _made(root, match["kind"], (match["words"] or "").split())
        return f"{match['start']}\n\n{made}\n\n{END}"

    return ASKED.sub(piece, text)


def _made(root: Path, kind: str, words: list[str]) -> str:
    match kind:
        case "code":
            return _code(root, *words)
        case "output":
            return f"```text\n{(root / words[0]).read_text().rstrip()}\n```"
        case "api":
            return "\n\n".join(described(root, words[0], name) for name in words[1:])
        case "results":
            return results.table(root)
        case "core":
            return results.core(root)
        case "cells":
            return results.cells(root)
        case "tight":
            return results.tight(root)
        case "brief":
            return results.brief(root)
        case "readme":
            return _beginning((root / "README.md").read_text())
        case "requirements":
            return requirements(root)
        case "learned":
            return learning.table(root, words[0])
        case "turned":
            return learning.turned(root, *words)
        case _:
            return {"commands": reference, "alarms": alarms, "numbers": numbers, "sets": results.sets}[kind]()


def _beginning(readme: str) -> str:
    text = readme.split("\n", 1)[1].split("\n## ", 1)[0].strip()
    return with_links(text, lambda path: path.removeprefix("docs/"))


def _code(root: Path, file: str, *names: str) -> str:
    path = root / file
    body = "\n\n\n".join(code_of(path, name) for name in names) if names else path.read_text().rstrip()
    return f"```python\n{body}\n```"
