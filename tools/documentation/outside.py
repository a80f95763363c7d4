"""Files outside docs/ that pages link to: Markdown becomes a page, code a page that shows it, the rest is copied."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documentation.prose import links, with_links

CODE = {
    ".py": "python",
    ".toml": "toml",
    ".js": "javascript",
    ".css": "css",
    ".cff": "yaml",
    ".yml": "yaml",
    "": "bash",
}


class MissingFile(Exception):
    """A link into the repository that leads nowhere."""


@dataclass(frozen=True)
class Outside:
    """A file of the repository and where the site has it."""

    path: str  # in the repository
    uri: str  # of the page, among the sources of the site
    content: str | None  # None: copied as it is


def home_of(root: Path, path: str) -> str:
    """Where the site has a path of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    if path.endswith(".md"):
        return path
    if (root / path).is_dir():
        readme = posixpath.join(path, "README.md")
        return readme if (root / readme).exists() else f"source/{path}.md"
    return f"source/{path}.md" if _is_code(path) else path


def target_of(page_path: str, link: str) -> str:
    """The path in the repository that a link on a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page_path), link))


def everything_linked(root: Path, pages: dict[str, str]) -> list[Outside]:
    """All files outside docs/ that pages (repository path -> text) lead to, pages found on the way included."""
    found: dict[str, Outside] = {}
    waiting = list(pages.items())
    while waiting:
        path, text = waiting.pop()
        for link, _ in links(text):
            target = target_of(path, link) if link else path
            if not (root / target).exists() or target.startswith("docs/") or target == "README.md":
                continue  # MkDocs itself says what is wrong with it, or has it already
            if (root / target).is_dir() and (root / target / "README.md").exists():
                target = posixpath.join(target, "README.md")
            if target not in found:
                found[target] = _outside(root, target)
                if target.endswith(".md"):
                    waiting.append((target, (root / target).read_text()))
    return sorted(found.values(), key=lambda one: one.path)


def _outside(root: Path, path: str) -> Outside:
    uri = home_of(root, path)
    if (root / path).is_dir():
        return Outside(path, uri, _listing(root, path))
    if path.endswith(".md"):
        return Outside(path, uri, (root / path).read_text())
    if not _is_code(path):
        return Outside(path, uri, None)
    return Outside(path, uri, source_page(path, (root / path).read_text()))


def _is_code(path: str) -> bool:
    return posixpath.splitext(path)[1] in CODE


def source_page(path: str, text: str) -> str:
    language = CODE[posixpath.splitext(path)[1]]
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    code = f'~~~~~~ {{ .{language} linenums="1" }}\n{text.rstrip()}\n~~~~~~\n'
    return f"{hidden}# {posixpath.basename(path)}\n\n`{path}`\n\n{code}"


def _listing(root: Path, path: str) -> str:
    names = sorted(
        one.name + ("/" if one.is_dir() else "") for one in (root / path).iterdir() if one.name[0] not in "._"
    )
    return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)


def relinked(root: Path, page_path: str, text: str) -> str:
    """Links that leave docs/ point to where the site has those files."""
    here = posixpath.dirname(home_of(root, page_path))

    def change(link: str) -> str | None:
        target = target_of(page_path, link)
        inside = page_path.startswith("docs/") and target.startswith("docs/")
        if inside or not (root / target).exists():
            return None
        return posixpath.relpath(home_of(root, target), here or ".")

    return with_links(text, change)


def pages(nav: list[Any]) -> list[str]:
    """All that a navigation names, in order: "page.md", {"Title": "page.md"} or {"Section": [entries]}."""
    named = []
    for entry in nav:
        inside = entry if isinstance(entry, str) else next(iter(entry.values()))
        named += [inside] if isinstance(inside, str) else pages(inside)
    return named
