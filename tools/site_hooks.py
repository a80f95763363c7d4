"""MkDocs calls these: files outside docs/ that pages link to become pages too, and links lead there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from documentation.outside import everything_linked, pages, relinked
from documentation.pieces import REFERENCE, filled

ROOT = Path(__file__).resolve().parents[1]
_paths: dict[str, str] = {}  # page of the site -> where it lies in the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to."""
    _paths.clear()
    _paths.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    # README and navigation are not pages, but what they name shall be
    named = "".join(f"[]({page}) " for page in pages(config.nav or []))
    linked_from = {path: _text(path) for path in ["README.md", *_paths.values()]} | {"mkdocs.yml": named}
    for outside in everything_linked(ROOT, linked_from):
        if outside.content is None:
            files.append(File.generated(config, outside.uri, abs_src_path=str(ROOT / outside.path)))
            continue
        files.append(File.generated(config, outside.uri, content=outside.content))
        _paths[outside.uri] = outside.path
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The reference is made now; links lead to where the site has those files."""
    path = _paths[page.file.src_uri]
    return relinked(ROOT, path, filled(ROOT, markdown) if path.startswith(REFERENCE) else markdown)


def _text(path: str) -> str:
    text = (ROOT / path).read_text()
    return filled(ROOT, text) if path.startswith(REFERENCE) else text
