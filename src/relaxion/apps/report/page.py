"""A page: one HTML file that opens from disk and asks nobody for anything; and the words on it.

The data goes in as JSON, the browser builds the page from it (`pages/*.js`), and whatever a file or a user wrote is
text on the way through: `<` cannot end the JSON block, the scripts only ever set text, and a content security policy
lets no script run but ours, by their hashes, and no request leave.

Frames become whole thousandths of an Å and are thinned out until they fit the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols, covalent_radii
from ase.data.colors import jmol_colors
from ase.neighborlist import neighbor_list

from relaxion import __version__
from relaxion.errors import FileError
from relaxion.files import replace_file
from relaxion.optimizer.point import Frame
from relaxion.train.judge.runs import Reading

SYMMETRY_TOLERANCES_ANGSTROM = (0.01, 0.05, 0.1)
MOST_ATOMS_FOR_SYMMETRY = 2000  # spglib would take too long
PACKAGES = ("ase", "torch", "numpy", "scipy", "vesin", "spglib")
CITATION = f"""@software{{relaxion,
  title = {{Relaxion: learned relaxation of atomic structures}},
  author = {{{{The Relaxion developers}}}},
  version = {{{__version__}}},
  year = {{2026}},
}}"""
OUTCOMES = {  # others are called what they are
    "step_limit": "step limit reached",
    "non_finite": "not finite",
    "error": "failed",
    "running": "still running",
}
THIN_SPACE = "\u202f"  # no line ends inside a number


def outcome_words(outcome: str, fmax: float | None = None) -> str:
    """`step limit reached, fmax 0.3 eV/Å`."""
    return OUTCOMES.get(outcome, outcome) + ("" if fmax is None else f", fmax {fmax:.2g} eV/Å")


def short(value: float | None) -> str:
    """Three digits that count, and a minus as wide as a plus."""
    if value is None:
        return "–"
    size = abs(value)
    if size and (size >= 1e6 or size < 1e-3):
        text = f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    else:
        text = count(value) if size >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")


def fixed(value: float | None, style: str) -> str:
    """In this format, with a minus as wide as a plus."""
    return "–" if value is None else format(value, style).replace("-", "−")


def formula(atoms: Atoms) -> str:
    return atoms.symbols.formula.format("metal")


def count(value: float) -> str:
    """`20 000` with a thin space."""
    return f"{value:,.0f}".replace(",", THIN_SPACE)


def calls(number: int) -> str:
    return f"{number} force call{'' if number == 1 else 's'}"


def signed(value: float, style: str) -> str:
    """With a sign in front, and a minus that is as wide as a plus."""
    text = fixed(value, "+" + style)
    return "0" if not text.strip("+−0.") else text


def rounded(values: Iterable[float], digits: int = 6) -> list[float]:
    """As many digits as a plot can show."""
    return [float(f"{value:.{digits}g}") for value in values]


def duration(seconds: Any) -> str:
    """`38 s`, `12 min`, `3.4 h`."""
    if not isinstance(seconds, int | float) or seconds < 0:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def space_group(atoms: Atoms) -> str:
    """`P1 (1) within 0.01 Å; Pm-3m (221) within 0.05 Å`, or why there is none to tell.

    Relaxed structures have the symmetry of their minimum only as far as they have converged.
    """
    if not atoms.pbc.all():
        return f"none: periodic along {int(atoms.pbc.sum())} of 3 axes"
    if len(atoms) > MOST_ATOMS_FOR_SYMMETRY:
        return f"not determined: more than {MOST_ATOMS_FOR_SYMMETRY} atoms"
    if find_spec("spglib") is None:
        return "not determined: pip install spglib"
    found: dict[str, float] = {}  # with the smallest tolerance of each
    for tolerance in SYMMETRY_TOLERANCES_ANGSTROM:
        found.setdefault(_space_group_within(atoms, tolerance), tolerance)
    return "; ".join(f"{group} within {tolerance:g} Å" for group, tolerance in found.items())


def _space_group_within(atoms: Atoms, tolerance_angstrom: float) -> str:
    import spglib

    cell: Any = (np.asarray(atoms.cell), atoms.get_scaled_positions(), atoms.numbers)
    found = spglib.get_symmetry_dataset(cell, symprec=tolerance_angstrom)
    return "none found" if found is None else f"{found.international} ({found.number})"


def closest_pair(atoms: Atoms) -> str:
    """`Cu–Au 2.51 Å (atoms 3 and 7)`; images count."""
    largest = float(covalent_radii[atoms.numbers].max())
    for reach in (2.4 * largest, 5 * largest, 20.0):
        first, second, distances = neighbor_list("ijd", atoms, reach)
        if len(distances):
            nearest = int(np.argmin(distances))
            i, j = sorted((int(first[nearest]), int(second[nearest])))
            who = f"atom {i} and its image" if i == j else f"atoms {i} and {j}"
            return f"{atoms.symbols[i]}–{atoms.symbols[j]} {distances[nearest]:.3f} Å ({who})"
    return "none within 20 Å"


def atoms_words(atoms: Atoms) -> str:
    """`12, 4 of them held`."""
    indices = [constraint.todict()["kwargs"].get("indices", []) for constraint in atoms.constraints]
    held = {index for some in indices for index in np.ravel(some)}
    return f"{len(atoms)}" + (f", {len(held)} of them held" if held else "")


def cell_words(atoms: Atoms) -> str:
    """`3.61 × 3.61 × 20.000 Å, 90.0°, 90.0°, 90.0°, periodic along a, b`."""
    if not atoms.pbc.any():
        return "none"
    lengths = " × ".join(f"{length:.3f}" for length in atoms.cell.lengths())
    angles = ", ".join(f"{angle:.1f}°" for angle in atoms.cell.angles())
    axes = ", ".join(axis for axis, on in zip("abc", atoms.pbc, strict=True) if on)
    return f"{lengths} Å, {angles}" + ("" if atoms.pbc.all() else f", periodic along {axes}")


def versions() -> str:
    """`relaxion 0.2.0, ase 3.29.0, …, Python 3.11.2 on Linux`."""
    found = [f"relaxion {__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"])


# ---- Pages

LARGEST_BYTES = 1_000_000  # of the whole file
FORMAT = "relaxion-page"
FORMAT_VERSION = 1
SCRIPTS = ("vendor/uPlot.iife.min.js", "parts.js", "film.js", "plot.js", "main.js")
FILMS = ("film", "gallery")  # kinds that need the library
LIBRARY = "vendor/3Dmol-min.js"
LICENCES = "vendor/LICENSES.txt"
FOOT = (
    f"Made by Relaxion {__version__}. The page is complete in itself: it needs no network and sends nothing.",
    "3D view: 3Dmol.js (N. Rego and D. Koes, Bioinformatics 31, 1322, 2015); plots: uPlot (L. Sorokin). Their licences "
    "are in this page's source.",
)

Part = dict[str, Any]  # {"kind": ..., "title": ..., "span": columns of 12, ...}; kinds are those of pages/*.js
COPIED = ("Command", "Reproduce", "BibTeX")  # facts somebody will want to paste


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


def table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str] | Mapping[str, Any]], *,
    text: Sequence[str] = (), long: Sequence[str] = (), **more: Any,
) -> Part:  # fmt: skip
    """Rows of cells, or of cells with a tone.

    text: columns that are no numbers. long: columns whose cells may take several lines.
    """
    columns = [{"label": one, "text": one in (*text, *long), "long": one in long} for one in headings]
    plain = [row if isinstance(row, Mapping) else {"cells": row} for row in rows]
    return {"kind": "table", "caption": caption, "columns": columns, "rows": plain, **more}


def plot(
    title: str, x_label: str, y_label: str, series: Sequence[Mapping[str, Any]], summary: str, **more: Any
) -> Part:
    """Curves, stairs or dots; `summary` is what a screen reader reads instead. What else there is: pages/plot.js."""
    own = {"title": title, "x_label": x_label, "y_label": y_label, "series": series, "summary": summary}
    return {"kind": "plot", **own, **more}


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


FILM_BYTES = 330_000  # of all films of a page; library, style and scripts need about 600 000
LEAST_BYTES_PER_ATOM = 6  # of one frame: three zeros and their commas
MOST_FRAMES = 400  # of one film: more than anybody looks at
NONMETALS = frozenset([1, 2, *range(5, 11), *range(14, 19), *range(32, 37), *range(51, 55)])  # drawn with sticks
MOST_STICK_ATOMS = 150
METHODS = {
    "policy": "the policy",
    "internal": "internal coordinates",
    "springs": "springs",
    "plain": "plain L-BFGS",
    "fire": "damped FIRE",
    "saddle": "the step away from a saddle point",
    "curvature": "the check for negative curvature",
}
HOW_TO_TURN = "Drag to rotate, Ctrl and wheel to zoom."
HOW = f"Each frame is one force call. {HOW_TO_TURN}"
FAINT = "Faint atoms are held fixed."
MILLI = 1000  # units of the browser's lengths per Å


@dataclass(frozen=True)
class Reel:
    """One film with what is said beside it."""

    name: str
    numbers: np.ndarray  # (n_atoms,) atomic numbers
    periodic: bool  # along any axis: the cell is drawn
    frames: Sequence[Frame]
    readings: Sequence[Reading]  # of every force call
    end: str  # what is said from the last force call on
    converged: bool
    winner: bool = False
    fixed: frozenset[int] = frozenset()  # atoms that are held


def film_parts(reels: Sequence[Reel], largest_bytes: int = FILM_BYTES) -> tuple[list[dict[str, Any]], list[str]]:
    """The films as plain data, and sentences about what was left out."""
    films = []
    notes = []
    for reel in reels:
        film = _fitted(reel, largest_bytes // len(reels))
        films.append(film)
        notes += _left_out(reel, len(film["species"]), len(film["calls"]))
    return films, notes


def _left_out(reel: Reel, atoms: int, frames: int) -> list[str]:
    said = []
    if atoms < len(reel.numbers):
        said.append(f"only the {atoms} of {len(reel.numbers)} atoms that move farthest are drawn")
    if frames < len(reel.frames):
        said.append(f"only {frames} of {len(reel.frames)} force calls are shown")
    return [f"{reel.name}: to keep the page small, {' and '.join(said)}; the curves are complete."] if said else []


def _fitted(reel: Reel, largest_bytes: int) -> dict[str, Any]:
    """First fewer frames, then fewer atoms: the start and the end are always there."""
    atoms = np.arange(len(reel.numbers))
    wanted = min(len(reel.frames), MOST_FRAMES, max(2, largest_bytes // (LEAST_BYTES_PER_ATOM * len(atoms))))
    while True:
        frames = [reel.frames[i] for i in sorted({round(i) for i in np.linspace(0, len(reel.frames) - 1, wanted)})]
        film = _film(reel, frames if len(frames) == len(reel.frames) else _joined(frames), atoms)
        size = len(json.dumps(film, separators=(",", ":")))
        if size <= largest_bytes or (wanted <= 2 and len(atoms) <= 1):
            return film
        share = 0.95 * largest_bytes / size
        if wanted > 2:
            wanted = max(2, int(share * wanted))
        else:
            travelled = np.linalg.norm(reel.frames[-1].positions - reel.frames[0].positions, axis=1)
            atoms = np.sort(np.argsort(-travelled, kind="stable")[: max(1, int(share * len(atoms)))])


def _joined(frames: Sequence[Frame]) -> list[Frame]:
    """Where frames between them are missing, a move is the way from one to the next."""
    before = [None, *(frame.call for frame in frames)]
    return [replace(frame, base_call=call, proposed=None) for frame, call in zip(frames, before, strict=False)]


def _film(reel: Reel, frames: Sequence[Frame], atoms: np.ndarray) -> dict[str, Any]:
    numbers = reel.numbers[atoms]
    kinds = sorted(set(numbers.tolist()))
    sticks = not reel.periodic and len(numbers) <= MOST_STICK_ATOMS and bool(NONMETALS.intersection(kinds))
    start = _milli(frames[0].positions[atoms])
    says = {reading.call: reading for reading in reel.readings}
    last = max(says, default=frames[-1].call)
    elements = zip(*np.unique(reel.numbers, return_counts=True), strict=True)
    what = ", ".join(f"{count} {chemical_symbols[kind]}" for kind, count in elements)
    return {
        "name": reel.name,
        "description": f"{len(reel.numbers)} atoms ({what}){' in their cell' if reel.periodic else ''}",
        "symbols": [chemical_symbols[kind] for kind in kinds],
        "colours": ["#" + bytes(np.rint(255 * jmol_colors[kind]).astype(np.uint8)).hex() for kind in kinds],
        "radii": [round(float(covalent_radii[kind]) * (0.42 if sticks else 0.55), 3) for kind in kinds],
        "bond_radii": [round(float(covalent_radii[kind]), 3) for kind in kinds],
        "sticks": sticks,
        "species": [kinds.index(number) for number in numbers.tolist()],
        "calls": [frame.call for frame in frames],
        "start": start.tolist(),
        "shifts": [(_milli(frame.positions[atoms]) - start).tolist() for frame in frames],
        "cells": _cells(frames) if reel.periodic else None,
        "bases": [frame.base_call for frame in frames] if any(frame.base_call for frame in frames) else None,
        "proposed": [None if frame.proposed is None else _milli(frame.proposed[atoms]).tolist() for frame in frames],
        "readings": [_reading(says.get(frame.call)) for frame in frames],
        "end_call": last,
        "end": reel.end,
        "converged": reel.converged,
        "winner": reel.winner,
        "fixed": [place for place, atom in enumerate(atoms.tolist()) if atom in reel.fixed],
    }


def _reading(reading: Reading | None) -> str:
    """What is said of a force call."""
    if reading is None:
        return ""
    if reading.fmax_ev_per_angstrom is None:
        return "energy or forces were not finite"
    words = [f"fmax {reading.fmax_ev_per_angstrom:.3g} eV/Å"]
    words += [f"by {METHODS.get(reading.method, reading.method)}"] if reading.method not in ("", "start") else []
    words += [] if reading.accepted else ["rejected"]
    return ", ".join(words)


def _cells(frames: Sequence[Frame]) -> list[list[float]]:
    """One where all are the same."""
    cells = [[round(float(value), 4) for value in frame.cell.ravel()] for frame in frames]
    return cells[:1] if all(cell == cells[0] for cell in cells) else cells


def _milli(lengths: np.ndarray) -> np.ndarray:
    return np.rint(np.asarray(lengths, dtype=np.float64) * MILLI).astype(np.int64).ravel()
