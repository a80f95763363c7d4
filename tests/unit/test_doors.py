"""Each door speaks of itself: the library of arguments, the command line of options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxion.apps.cli.progress import declared_options, flag_of, flags, in_flags
from relaxion.settings import command_words

PACKAGE = Path(__file__).parents[2] / "src" / "relaxion"
COMMAND_LINE = PACKAGE / "apps" / "cli"
FLAG = re.compile(r"(?<![\w-])--[a-z]")
MENTION = re.compile(r"`([a-z_]+)=")
# a call with arguments such as Relaxer(atoms, ...), and an argument with a value of Python
PYTHON = re.compile(r"\b(?:[A-Z]\w+|relaxion\.\w+)\([^)]|\b[a-z_]+=(?:True|False|None|\.\.\.)")


def literals(file: Path, *, docstrings: bool) -> Iterator[tuple[int, str]]:
    """Every string of a module with its line; of an f-string the fixed parts."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings of any kind
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (docstrings or id(node) not in statements)
        ):
            yield node.lineno, node.value


def library() -> list[Path]:
    files = [file for file in PACKAGE.rglob("*.py") if COMMAND_LINE not in file.parents]
    assert len(files) > 100
    return files


def test_the_library_names_no_option_of_the_command_line():
    found = [
        f"{file.relative_to(PACKAGE)}:{line}: {text[:80]}"
        for file in library()
        for line, text in literals(file, docstrings=True)
        if FLAG.search(text)
    ]
    assert found == []


def test_the_command_line_names_no_python():
    found = [
        f"{file.relative_to(PACKAGE)}:{line}: {text[:80]}"
        for file in COMMAND_LINE.glob("*.py")
        for line, text in literals(file, docstrings=False)
        if PYTHON.search(text)
    ]
    assert found == []


def test_every_argument_that_the_library_mentions_has_an_option():
    mentioned = {
        name for file in library() for _, text in literals(file, docstrings=False) for name in MENTION.findall(text)
    }
    assert {"allow_unseen", "force", "database", "resume"} <= mentioned
    assert mentioned <= flags().keys()


def test_an_argument_has_the_same_option_in_every_command():
    for command, options in declared_options().items():
        for one in options:
            assert flags()[one.name][0] == flag_of(one), (command, one.name)
    assert flags()["as_json"][0] == "--json"
    assert flags()["origin"][0] == "--from"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("`allow_unseen=True` uses it", "--allow-unseen uses it"),
        ("relax with `database='a b'` first", "relax with --database a b first"),
        ("`database=...` or `from_weights=...`", "--database DIR or --from RUN|FILE|POLICY"),
        ("a file `x=3` and `no_such_argument=True` stay", "a file `x=3` and `no_such_argument=True` stay"),
        ("got 'steps=3'", "got 'steps=3'"),
    ],
)
def test_mentions_become_options(said, shown):
    assert in_flags(said) == shown


def test_commands_to_be_shown():
    words = command_words("train", "al-fe", seed=3, agent=None, resume=True, set=["a=1", "b=2"], **{"from": "old"})
    expected = "relaxion train al-fe --seed 3 --resume --set a=1 --set b=2 --from old"
    assert " ".join(words) == expected
