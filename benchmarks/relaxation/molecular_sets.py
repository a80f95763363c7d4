"""Sets of starts that only benchmarks use: flexible molecules, and molecules beside others.

These are dimers of ASE's S22, molecules on slabs, and molecular crystals from published cells.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from ase import Atoms
from ase.build import fcc111
from ase.collections import s22
from ase.constraints import FixAtoms
from ase.spacegroup import crystal
from flexible_molecules import flexible_molecule
from scipy.spatial.transform import Rotation

from relaxion.apps import comparison as sets
from relaxion.apps.comparison import StartSet, strained_at_random
from relaxion.train.data.perturbations import displaced
from relaxion.train.data.slabs import g2_molecules

METALS = ("Cu", "Ag", "Pd", "Pt", "Ni", "Al")
GUESTS = ("CO", "H2O", "NH3", "CH3OH", "HCOOH", "C2H4", "H2CO", "H3CNH2", "C2H2", "CH3CN", "CO2", "CH3SH")
HEIGHT = (2.1, 2.7)  # Å between the topmost metal atoms and the lowest atom of a molecule
NEAREST = 0.6  # Å; no two displaced atoms come nearer
TURN, SHIFT = 0.3, 0.3  # rad and Å by which a molecule of a dimer is moved

Random = np.random.Generator

# name: space group, cell (Å, degrees), atoms with fractional coordinates
CRYSTALS: dict[str, tuple[int, list[float], dict[str, list[tuple[float, float, float]]]]] = {
    # A. Simon, K. Peters, Acta Cryst. B 36, 2750 (1980)
    "carbon dioxide": (205, [5.624, 5.624, 5.624, 90, 90, 90], {"C": [(0, 0, 0)], "O": [(0.1185, 0.1185, 0.1185)]}),
    # S. Swaminathan, B. M. Craven, R. K. McMullan, Acta Cryst. B 40, 300 (1984)
    "urea": (
        113,
        [5.565, 5.565, 4.684, 90, 90, 90],
        {
            "C": [(0, 0.5, 0.3260)],
            "O": [(0, 0.5, 0.5953)],
            "N": [(0.1459, 0.6459, 0.1766)],
            "H": [(0.2575, 0.7575, 0.2827), (0.1441, 0.6441, -0.0380)],
        },
    ),
    # A. W. Hewat, C. Riekel, Acta Cryst. A 35, 569 (1979)
    "ammonia": (
        198,
        [5.048, 5.048, 5.048, 90, 90, 90],
        {"N": [(0.2107, 0.2107, 0.2107)], "H": [(0.3689, 0.2671, 0.1159)]},
    ),
    # R. K. McMullan, Å. Kvick, P. Popelier, Acta Cryst. B 48, 726 (1992)
    "acetylene": (205, [6.105, 6.105, 6.105, 90, 90, 90], {"C": [(0.056, 0.056, 0.056)], "H": [(0.156, 0.156, 0.156)]}),
    # ice VIII: W. F. Kuhs, J. L. Finney, C. Vettier, D. V. Bliss, J. Chem. Phys. 81, 3612 (1984)
    "ice": (141, [4.656, 4.656, 6.775, 90, 90, 90], {"O": [(0, 0.25, 0.1071)], "H": [(0, 0.4157, 0.1935)]}),
    # G. E. Bacon, N. A. Curry, S. A. Wilson, Proc. R. Soc. A 279, 98 (1964), at 218 K
    "benzene": (
        61,
        [7.44, 9.55, 6.92, 90, 90, 90],
        {
            "C": [(-0.0569, 0.1387, -0.0054), (-0.1335, 0.0460, 0.1264), (-0.0774, -0.0925, 0.1295)],
            "H": [(-0.0976, 0.2447, -0.0177), (-0.2409, 0.0794, 0.2218), (-0.1371, -0.1631, 0.2312)],
        },
    ),
}
SECOND_ORIGIN = (141,)  # space groups whose origin is at a centre of inversion here


def dimer(random: Random, index: int) -> Atoms:
    """One of S22 in turn, one of its molecules moved and turned as a whole, all atoms displaced by 0.05 Å."""
    name = s22.names[index % len(s22.names)]
    known = s22[name]
    atoms = Atoms(known.get_chemical_symbols(), known.positions)
    second = np.arange(len(atoms)) >= _first_size(name)
    center = atoms.positions[second].mean(axis=0)
    turned = Rotation.from_rotvec(random.normal(0, TURN / np.sqrt(3), 3)).apply(atoms.positions[second] - center)
    away = center - atoms.positions[~second].mean(axis=0)
    outwards = random.uniform(0, SHIFT) * away / np.linalg.norm(away)  # never into each other
    atoms.positions[second] = turned + center + outwards
    return displaced(atoms, random, 0.05, nearest=NEAREST)


@lru_cache(maxsize=32)
def _first_size(name: str) -> int:
    """Atoms of the first molecule: the two are listed one after the other, and no bond joins them."""
    atoms = s22[name]
    distances = atoms.get_all_distances()
    gaps = [float(distances[:k, k:].min()) for k in range(1, len(atoms))]
    return int(np.argmax(gaps)) + 1


def adsorbate(random: Random, index: int) -> Atoms:
    """A small molecule, turned at random, above fcc(111) of one metal, 12 or 18 atoms, lowest layer fixed."""
    slab = fcc111(str(random.choice(METALS)), (2, 2, 3) if index % 2 else (3, 2, 3), vacuum=7.0, periodic=True)
    guest = g2_molecules()[GUESTS[index % len(GUESTS)]].copy()
    guest.positions = Rotation.random(rng=random).apply(guest.positions - guest.positions.mean(axis=0))
    where = random.uniform(0, 1, 2) @ slab.cell.array[:2]
    height = slab.positions[:, 2].max() + random.uniform(*HEIGHT) - guest.positions[:, 2].min()
    guest.positions += [*where[:2], height]
    lowest = np.flatnonzero(slab.get_tags() == 3)
    both = Atoms(
        [*slab.symbols, *guest.symbols], np.concatenate([slab.positions, guest.positions]), cell=slab.cell, pbc=True
    )
    both = displaced(both, random, 0.05, nearest=NEAREST)
    both.set_constraint(FixAtoms(lowest))
    return both


def molecular_crystal(random: Random, index: int) -> Atoms:
    """One of `CRYSTALS` in turn, atoms displaced by 0.05 Å."""
    group, cell, places = CRYSTALS[list(CRYSTALS)[index % len(CRYSTALS)]]
    symbols = [symbol for symbol, rows in places.items() for _ in rows]
    basis = [row for rows in places.values() for row in rows]
    built = crystal(symbols, basis, spacegroup=group, cellpar=cell, setting=1 + (group in SECOND_ORIGIN))
    atoms = Atoms(built.get_chemical_symbols(), built.positions, cell=built.cell, pbc=True)
    return displaced(atoms, random, 0.05, nearest=NEAREST)


def strained_crystal(random: Random, index: int) -> Atoms:
    return strained_at_random(molecular_crystal(random, index), random)


FLEXIBLE = "chains, peptides and sugars with random torsions, 20–60 atoms, GFN2-xTB"
DIMERS = "dimers of S22, one molecule moved, GFN2-xTB, rattle 0.05 Å"
ADSORBATES = "small molecules on metal slabs, 15–25 atoms, CHGNet, rattle 0.05 Å"
MOLECULAR = "molecular crystals with free cell, 12–48 atoms, CHGNet, rattle 0.05 Å, strain ±3 %"
KNOWN = (
    StartSet("flexible", FLEXIBLE, flexible_molecule, "gfn2", 15, without_gpmin=True),
    StartSet("dimers", DIMERS, dimer, "gfn2", 22),
    StartSet("adsorbates", ADSORBATES, adsorbate, "chgnet", 12, without_gpmin=True),
    StartSet("molecular-crystals", MOLECULAR, strained_crystal, "chgnet", 8, free_cell=True),
)
MOLECULAR_SETS: dict[str, StartSet] = {known.name: known for known in KNOWN}


def find_set(name: str) -> StartSet:
    """One of these, or of those that `relaxion bench` knows."""
    return MOLECULAR_SETS.get(name) or sets.find_set(name)
