"""MkDocs calls these: pieces of code and reference into pages, files outside docs/ as pages, navigation as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils.meta import get_data

from documentation.navigation import completed, pages
from documentation.outside import everything_linked, relinked
from documentation.pieces import filled
from documentation.sources import NoSuchName

ROOT = Path(__file__).resolve().parents[1]
_paths: dict[str, str] = {}  # page of the site -> where it lies in the repository
_texts: dict[str, str] = {}  # repository path -> page with every piece in place


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Fill the pages in, then add what they link to."""
    _paths.clear()
    _texts.clear()
    for file in files.documentation_pages():
        path = f"docs/{file.src_uri}"
        _paths[file.src_uri] = path
        try:
            _texts[path] = filled(ROOT, get_data(file.content_string)[0])
        except (OSError, LookupError, AttributeError, ImportError, NoSuchName) as error:
            raise PluginError(f"{path} asks for a piece that cannot be made: {error}") from error
    # README and navigation are not pages, but what they name shall be
    named = "".join(f"[]({page}) " for page in pages(config.nav or []))
    linked_from = _texts | {"README.md": (ROOT / "README.md").read_text(), "mkdocs.yml": named}
    for outside in everything_linked(ROOT, linked_from):
        if outside.content is None:
            files.append(File.generated(config, outside.uri, abs_src_path=str(ROOT / outside.path)))
            continue
        files.append(File.generated(config, outside.uri, content=outside.content))
        _paths[outside.uri], _texts[outside.path] = outside.path, outside.content
    config.nav = completed(config.nav or [], sorted(_paths))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """As the site has it: pieces in place, links where the site has those files."""
    path = _paths[page.file.src_uri]
    text = _texts[path] if path.startswith("docs/") else markdown
    return relinked(ROOT, path, text)
