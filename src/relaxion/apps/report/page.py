"""A page: one HTML file that opens from disk and asks nobody for anything.

The data goes in as JSON, the browser builds the page from it (`pages/*.js`), and whatever a file or a user wrote is
text on the way through: `<` cannot end the JSON block, the scripts only ever set text, and a content security policy
lets no script run but ours, by their hashes, and no request leave.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from relaxion import __version__
from relaxion.errors import FileError
from relaxion.files import replace_file

LARGEST_BYTES = 1_000_000  # of the whole file
FORMAT = "relaxion-page"
FORMAT_VERSION = 1
SCRIPTS = ("vendor/uPlot.iife.min.js", "dom.js", "film.js", "plot.js", "parts.js", "main.js")
FILMS = ("film", "gallery")  # kinds that need the library
LIBRARY = "vendor/3Dmol-min.js"
LICENCES = "vendor/LICENSES.txt"
FOOT = (
    f"Made by Relaxion {__version__}. The page is complete in itself: it needs no network and sends nothing.",
    "3D view: 3Dmol.js (N. Rego and D. Koes, Bioinformatics 31, 1322, 2015); plots: uPlot (L. Sorokin). Their licences "
    "are in this page's source.",
)

Part = dict[str, Any]  # {"kind": ..., "title": ..., "span": columns of 12, ...}; kinds are those of pages/*.js
COPIED = ("Command", "The same again", "BibTeX")  # facts somebody will want to paste


def tile(label: str, value: str, unit: str = "", note: str = "", tone: str = "") -> dict[str, str]:
    """A number that stands out; tones are good, warn and bad."""
    return {"label": label, "value": value, "unit": unit, "note": note, "tone": tone}


def facts(title: str, found: Iterable[tuple[str, Any]], span: int = 12, **more: Any) -> Part:
    """Labels and values; those without a value are left out."""
    shown = [{"label": label, "value": str(value)} for label, value in found if value]
    shown = [{**fact, "code": True} if fact["label"] in COPIED else fact for fact in shown]
    return {"kind": "facts", "title": title, "span": span, "facts": shown, **more}


def notes(said: Sequence[str], **more: Any) -> list[Part]:
    """None where there is nothing to say."""
    return [{"kind": "notes", "title": "Worth knowing", "notes": list(said), **more}] if said else []


def columns(headings: Sequence[str], text: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Of a table; `text`: those that are no numbers."""
    return [{"label": heading, "text": heading in text} for heading in headings]


@dataclass(frozen=True)
class Page:
    """What a page says. `html` is the file, `save` writes it, Jupyter shows it by itself."""

    title: str
    eyebrow: str  # the small line above the title
    lead: str  # the sentence below it
    parts: Sequence[Part]
    last_call: int | None = None  # of the clock that films and plots follow; None: nothing moves
    foot: Sequence[str] = FOOT
    scripts: Sequence[str] = SCRIPTS  # in the order they run
    more: Mapping[str, Any] = field(default_factory=dict)  # what scripts of other pages want to know

    @property
    def data(self) -> dict[str, Any]:
        """What the browser gets."""
        own = {name: getattr(self, name) for name in ("title", "eyebrow", "lead", "last_call", "parts", "foot")}
        return {"format": FORMAT, "version": FORMAT_VERSION, **own, **self.more}

    @property
    def needs_library(self) -> bool:
        return any(part["kind"] in FILMS for part in self.parts)

    def security_policy(self, scripts: Sequence[str]) -> str:
        """No request to anywhere; these scripts and no others."""
        digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
        hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
        return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"

    @property
    def html(self) -> str:
        """The whole file."""
        library = f"/*\n{_source(LICENCES).replace('*/', '* /')}\n*/\n{_source(LIBRARY)}"
        scripts = [*([library] if self.needs_library else []), *(_source(name) for name in self.scripts)]
        blanks = {
            "policy": self.security_policy(scripts),
            "generator": f"relaxion {__version__}",
            "title": html.escape(self.title),
            "style": _source("vendor/uPlot.min.css") + _source("page.css"),
            "data": as_data_block(self.data),
            "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        }
        filled = re.sub(r"\{\{(\w+)}}", lambda blank: blanks[blank[1]], _source("page.html"))
        return filled.encode("utf-8", "replace").decode()  # half characters out of damaged files

    def save(self, path: str | Path, *, force: bool = True) -> Path:
        """Write the file, whole or not at all."""
        path = Path(path)
        if path.exists() and not force:
            raise FileError(f"{path} exists; `force=True` replaces it, or choose another name")
        try:
            replace_file(path, self.html.encode())
        except OSError as error:
            raise FileError(f"{path} cannot be written ({error.strerror or error}); name another file") from error
        return path

    def view(self) -> Page:
        """The page itself: as the last line of a cell, or given to `display`, Jupyter shows it."""
        return self

    def _repr_html_(self) -> str:
        """In a frame of its own, so that neither page nor notebook can disturb the other."""
        source = html.escape(self.html, quote=True)
        return (
            f'<iframe title="{html.escape(self.title, quote=True)}" sandbox="allow-scripts" '
            f'style="width:100%;height:860px;border:0" srcdoc="{source}"></iframe>'
        )


def as_json(data: Any) -> str:
    """Without spaces; NaN is refused: it is no JSON."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def as_data_block(data: Any) -> str:
    """JSON that can stand inside a script element: no `<` is left in it."""
    return as_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _source(name: str) -> str:
    return files("relaxion.apps.report").joinpath("pages", *name.split("/")).read_text(encoding="utf-8")


def own_bytes(scripts: Sequence[str] = SCRIPTS) -> int:
    """Of a page with a film that says nothing: what is left of `LARGEST_BYTES` is for data."""
    return len(Page("", "", "", [{"kind": "film", "films": []}], scripts=scripts).html.encode("utf-8"))
