"""Conditions of a relaxation that the command line asks for: which strains are free, which symmetry is kept."""

from __future__ import annotations

from importlib.util import find_spec

from ase import Atoms

from relaxion.cli.early import AXES
from relaxion.errors import MissingExtraError, StructureError

SYMMETRY_TOLERANCE_ANGSTROM = 0.01


def cell_mask(words: str) -> tuple[bool, ...] | None:
    """From `xx,yy`; None where nothing is said."""
    named = {word.strip() for word in words.split(",") if word.strip()}
    return tuple(axis in named for axis in AXES) if named else None


def symmetric(atoms: Atoms) -> Atoms:
    """The same, held to the space group that it has within the tolerance."""
    if find_spec("spglib") is None:
        raise MissingExtraError("--keep-symmetry needs the package spglib; try: pip install spglib")
    if not atoms.pbc.all():
        raise StructureError("--keep-symmetry is for structures that are periodic along all axes")
    from ase.constraints import FixSymmetry

    held = atoms.copy()
    held.set_constraint([*atoms.constraints, FixSymmetry(held, symprec=SYMMETRY_TOLERANCE_ANGSTROM)])
    return held
