"""Pieces of Python files by name, cut out with `ast`: what a page shows is what runs."""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class NoSuchName(Exception):
    """A page asks for code that is not there (any more)."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definition(path: Path, dotted: str) -> Definition:
    """A class, function or method of the file: `TD3.explore`."""
    body = parsed(path).body
    found: Definition | None = None
    for name in dotted.split("."):
        found = next((node for node in body if isinstance(node, Definition) and node.name == name), None)
        if found is None:
            known = ", ".join(node.name for node in body if isinstance(node, Definition))
            raise NoSuchName(f"{path} has no '{dotted}'; there are: {known}")
        body = found.body
    assert found is not None
    return found


def code_of(path: Path, dotted: str) -> str:
    """Its text, decorators included, moved to the left margin."""
    node = definition(path, dotted)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = path.read_text().splitlines()[first - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def text_of(node: ast.AST) -> str:
    return ast.unparse(node)
