"""Numbers, outcomes and structures in words, as pages write them: nothing here costs a force call."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list

from relaxion import __version__

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
    "non_finite": "answer not finite",
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


def count(value: float) -> str:
    """`20 000` with a thin space."""
    return f"{value:,.0f}".replace(",", THIN_SPACE)


def calls(number: int) -> str:
    return f"{number} force call{'' if number == 1 else 's'}"


def signed(value: float, style: str) -> str:
    """With a sign in front, and a minus that is as wide as a plus."""
    text = format(value, "+" + style)
    return "0" if float(text) == 0 else text.replace("-", "−")


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
