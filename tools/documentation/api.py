"""Reference pages from docstrings: signatures, fields with what is written under or beside them, methods."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

from documentation.sources import Definition, definition, text_of

WIDEST_SIGNATURE = 88
CALLED_BY_ASE = ("initialize", "read", "todict", "log", "step")  # of an optimizer; nobody else calls them
Field = tuple[str, str, str, str]  # name, type, default, meaning


def described(root: Path, module_name: str, name: str) -> str:
    """Heading, signature, docstring, fields, methods of a public name."""
    thing = getattr(import_module(module_name), name)
    path = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "")
    node = definition(path, thing.__qualname__)
    source = path.resolve().relative_to(root).as_posix()
    parts = [f"### {name}", _signature(node, name), _prose(ast.get_docstring(node) or "")]
    if isinstance(node, ast.ClassDef):
        parts += [_init_words(node), _field_list(_fields(node, path)), _methods(node)]
    parts.append(f"From `{module_name}` ([source]({'../' * _depth}{source})).")
    return "\n\n".join(part for part in parts if part)


_depth = 2  # reference pages lie in docs/reference


def _signature(node: Definition, name: str) -> str:
    function = node
    if isinstance(node, ast.ClassDef):
        function = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    return f"```python\n{_call(function, name)}\n```"


def _call(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    arguments = [text for text in _arguments(function.args) if text not in ("self", "cls")]
    returns = "" if function.returns is None or name[0].isupper() else f" -> {text_of(function.returns)}"
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= WIDEST_SIGNATURE:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def _arguments(arguments: ast.arguments) -> list[str]:
    """As written, one text each."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        texts.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        texts.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    texts += [_argument(one, default) for one, default in pairs]
    return texts + ([f"**{_argument(arguments.kwarg, None)}"] if arguments.kwarg else [])


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg if one.annotation is None else f"{one.arg}: {text_of(one.annotation)}"
    if default is None:
        return text
    return f"{text}{' = ' if one.annotation else '='}{text_of(default)}"


def _init_words(node: ast.ClassDef) -> str:
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    return _prose(ast.get_docstring(init) or "") if init else ""


def _fields(node: ast.ClassDef, path: Path) -> list[Field]:
    """Annotated names of the class body; the meaning is the string below or the comment beside."""
    lines = path.read_text().splitlines()
    fields = []
    for place, child in enumerate(node.body):
        if not (isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)):
            continue
        if child.target.id.startswith("_") or "ClassVar" in text_of(child.annotation):
            continue
        below = node.body[place + 1] if place + 1 < len(node.body) else None
        beside = lines[(child.end_lineno or child.lineno) - 1].partition("  # ")[2]
        words = beside
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            words = inspect.cleandoc(below.value.value)
        fields.append((child.target.id, text_of(child.annotation), _default(child.value), words))
    return fields


def _default(value: ast.expr | None) -> str:
    """Of a plain assignment, or of pydantic's Field(default=…)."""
    if isinstance(value, ast.Call) and text_of(value.func) in ("Field", "field"):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        value = named.get("default") or (value.args[0] if value.args else None)
    return "" if value is None else text_of(value)


def _field_list(fields: list[Field]) -> str:
    return "\n".join(_entry(_field_head(name, kind, default), words) for name, kind, default, words in fields)


def _field_head(name: str, kind: str, default: str) -> str:
    shown = f", default `{' '.join(default.split())}`" if default else ""
    return f"`{name}` (`{kind}`{shown})"


def _methods(node: ast.ClassDef) -> str:
    """Public ones that say something of themselves."""
    rows = []
    for child in node.body:
        words = ast.get_docstring(child) if isinstance(child, ast.FunctionDef) else None
        if (
            not isinstance(child, ast.FunctionDef)
            or child.name.startswith("_")
            or child.name in CALLED_BY_ASE
            or not words
        ):
            continue
        is_property = any(text_of(decorator).endswith("property") for decorator in child.decorator_list)
        call = child.name if is_property else f"{child.name}({_short_arguments(child.args)})"
        rows.append(_entry(f"**`{call}`**", words.split("\n\n")[0]))
    return "\n".join(rows)


def _entry(head: str, words: str) -> str:
    """One item of a list."""
    text = " ".join(_escaped(words).split())
    return wrapped(f"{head}: {text}" if text else head, first="- ", others="  ")


def _short_arguments(arguments: ast.arguments) -> str:
    """Names and defaults only: the row of a table is no place for types."""
    bare = ast.parse(f"def f({text_of(arguments)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    for one in ast.walk(bare.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    return ", ".join(text for text in _arguments(bare.args) if text not in ("self", "cls"))


def _prose(docstring: str) -> str:
    """Doctest lines become code, arguments a list; stars and angle brackets stay what they are."""
    blocks = []
    for block in docstring.split("\n\n"):
        if block.startswith("Args:\n"):
            lines = textwrap.dedent(block.partition("\n")[2])
            blocks.append(_escaped(re.sub(r"^(\w+): ", r"- `\1`: ", lines, flags=re.MULTILINE)))
        elif block.lstrip().startswith(">>>"):
            blocks.append("```python\n" + re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE) + "\n```")
        else:
            blocks.append(_escaped(block))
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    text = re.sub(r" ?\(R\d[\d., R]*\)| of R\d+\.\d+", "", text)  # ids of requirements are for those who read the code
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*<_|\[\]])", r"\\\1", piece) for piece in pieces)


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """Lines of at most 120 characters, none of which begins like another item of a list."""
    lines = textwrap.wrap(
        text, 120, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join([lines[0], *(re.sub(r"^( *)([-+*]) ", r"\1\\\2 ", line) for line in lines[1:])])
