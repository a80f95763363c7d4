"""What can be said about a structure and a run without another force call: symmetry, closest pair, versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list

from relaxion.version import __version__

SYMMETRY_TOLERANCE_ANGSTROM = 0.01
MOST_ATOMS_FOR_SYMMETRY = 2000  # spglib would take too long
PACKAGES = ("ase", "torch", "numpy", "scipy", "vesin", "spglib")
CITATION = f"""@software{{relaxion,
  title = {{Relaxion: learned relaxation of atomic structures}},
  author = {{{{The Relaxion developers}}}},
  version = {{{__version__}}},
  year = {{2026}},
}}"""


def space_group(atoms: Atoms, tolerance: float = SYMMETRY_TOLERANCE_ANGSTROM) -> str:
    """`Pm-3m (221)`, or why there is none to tell."""
    if not atoms.pbc.all():
        return f"none: periodic along {int(atoms.pbc.sum())} of 3 axes"
    if len(atoms) > MOST_ATOMS_FOR_SYMMETRY:
        return f"not determined: more than {MOST_ATOMS_FOR_SYMMETRY} atoms"
    if find_spec("spglib") is None:
        return "not determined: pip install spglib"
    import spglib

    cell: Any = (np.asarray(atoms.cell), atoms.get_scaled_positions(), atoms.numbers)
    found = spglib.get_symmetry_dataset(cell, symprec=tolerance)
    return "not determined: spglib found none" if found is None else f"{found.international} ({found.number})"


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


def versions() -> str:
    """`relaxion 0.1.0, ase 3.29.0, …, Python 3.11.2 on Linux`."""
    found = [f"relaxion {__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"])
