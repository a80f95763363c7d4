"""Starts from the whole periodic table, all of them held apart by the rule of `structures/splits.py`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk, graphene
from ase.filters import FrechetCellFilter

from relaxion.bench.displacements import displaced, strained
from relaxion.generators.chemistry import bond_length
from relaxion.generators.molecules import random_molecule
from relaxion.generators.packings import pack
from relaxion.generators.prototypes import random_crystal, random_perovskite
from relaxion.optimize.relaxer import Relaxer
from relaxion.potentials import potential
from relaxion.potentials.ase import PotentialCalculator
from relaxion.potentials.potential import Potential
from relaxion.structures.splits import Reason

RATTLE_ANGSTROM = 0.12
LARGEST_STRAIN = 0.03
EQUILIBRATION_STEPS = 40
MACS_FORMULAS = ("Sr8Ti8O24", "Y16O24", "Ca9Ti6O21", "Sr12Ti6O24")  # 36 to 42 atoms of the published four


@lru_cache(maxsize=4)
def engine(name: str) -> Potential:
    """One model per process."""
    return potential(name)


def equilibrium(atoms: Atoms, name: str = "chgnet") -> Atoms:
    """About as known crystals are: relaxed with the cell by the classical core, at most `EQUILIBRATION_STEPS` steps.

    (So these starts change where the core changes; they are the same for all who are compared.)
    """
    key = (name, atoms.numbers.tobytes(), atoms.positions.tobytes(), atoms.cell.array.tobytes())
    if key not in _EQUILIBRIA:
        found = atoms.copy()
        found.calc = PotentialCalculator(engine(name))
        Relaxer(FrechetCellFilter(found), policy=None, logfile=None).run(fmax=0.05, steps=EQUILIBRATION_STEPS)
        found.calc = None
        _EQUILIBRIA[key] = found
    return _EQUILIBRIA[key].copy()


_EQUILIBRIA: dict[tuple[str, bytes, bytes, bytes], Atoms] = {}  # the same starts are asked for again and again


def crystal(generator: np.random.Generator, why: Reason) -> Atoms:
    """An unseen crystal of 2–16 atoms at its equilibrium, displaced."""
    atoms = equilibrium(random_crystal(generator, side="assessment", why=why, sizes=(2, 16)))
    return displaced(atoms, generator, RATTLE_ANGSTROM)


def known_crystal(generator: np.random.Generator, index: int) -> Atoms:
    """Unseen compositions and unseen prototypes of elements that were seen, in turn."""
    return crystal(generator, "prototype" if index % 2 else "composition")


def strained_crystal(generator: np.random.Generator, index: int) -> Atoms:
    """The same with a strained cell."""
    return strained(known_crystal(generator, index), generator, LARGEST_STRAIN)


def new_element(generator: np.random.Generator, _index: int) -> Atoms:
    """With an element that was never trained on."""
    return crystal(generator, "element")


def random_oxide(generator: np.random.Generator, index: int) -> Atoms:
    """The published recipe of MACS: about 40 atoms thrown into a random cell, none nearer than 1 Å, volume ±5 %."""
    formula = MACS_FORMULAS[index % len(MACS_FORMULAS)]
    return pack(
        [formula],
        torch.Generator().manual_seed(int(generator.integers(2**62))),
        volume_per_atom_angstrom3=VOLUMES[formula],
        minimum_distance_angstrom=1.0,
        volume_spread=0.05,
    ).to_ase()[0]


VOLUMES = {
    "Sr8Ti8O24": 11.9,
    "Y16O24": 14.9,
    "Ca9Ti6O21": 11.7,
    "Sr12Ti6O24": 13.6,
}  # Å³ per atom, of the known crystals


def perovskite(generator: np.random.Generator, _index: int) -> Atoms:
    """Cubic ABX₃ of an unseen composition, displaced and strained; mostly unstable, so far from any minimum."""
    atoms = displaced(random_perovskite(generator, side="assessment"), generator, 0.1)
    return strained(atoms, generator, LARGEST_STRAIN)


def molecule(generator: np.random.Generator, _index: int) -> Atoms:
    """One that was held apart, or is joined from such, displaced."""
    atoms = random_molecule(generator, side="assessment", sizes=(3, 24))
    return displaced(atoms, generator, 0.05, nearest=0.6)


def carbon(generator: np.random.Generator, index: int) -> Atoms:
    """Diamond, graphite, lonsdaleite and others in turn, displaced and strained."""
    made = (_diamond, _graphite, _lonsdaleite, _rhombohedral, _double_diamond)[index % 5]()
    return strained(displaced(made, generator, 0.1), generator, LARGEST_STRAIN)


def _diamond() -> Atoms:
    return bulk("C", "diamond", a=3.57, cubic=True)


def _double_diamond() -> Atoms:
    return bulk("C", "diamond", a=3.57) * (2, 1, 1)


def _graphite() -> Atoms:
    """AB stacking."""
    layer = graphene(a=2.46, vacuum=0)
    flat = layer.positions[:, :2]
    shift = (layer.cell.array[0, :2] + layer.cell.array[1, :2]) / 3
    places = [[*p, 0.0] for p in flat] + [[*(p + shift), 3.35] for p in flat]
    cell = layer.cell.array.copy()
    cell[2] = [0, 0, 6.7]
    return Atoms("C4", places, cell=cell, pbc=True)


def _rhombohedral() -> Atoms:
    """ABC stacking."""
    layer = graphene(a=2.46, vacuum=0)
    shift = (layer.cell.array[0, :2] + layer.cell.array[1, :2]) / 3
    places = [[*(p + k * shift), 3.35 * k] for k in range(3) for p in layer.positions[:, :2]]
    cell = layer.cell.array.copy()
    cell[2] = [0, 0, 10.05]
    return Atoms("C6", places, cell=cell, pbc=True)


def _lonsdaleite() -> Atoms:
    """Hexagonal diamond."""
    length = bond_length("C", "C")
    a = length * (8 / 3) ** 0.5
    c = a * (8 / 3) ** 0.5
    u = 1 / 16
    fractions = [(1 / 3, 2 / 3, u), (2 / 3, 1 / 3, u + 0.5), (2 / 3, 1 / 3, 1 - u), (1 / 3, 2 / 3, 0.5 - u)]
    return Atoms("C4", scaled_positions=fractions, cell=[a, a, c, 90, 90, 120], pbc=True)
