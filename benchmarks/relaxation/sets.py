"""The structures the classical core is judged on. Seeds here are used nowhere else: nothing is tuned on these sets."""

from __future__ import annotations

import numpy as np
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111
from ase.constraints import FixAtoms

from relaxion.structures.packing import pack

LATTICE_CONSTANTS = {"Al": 4.05, "Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92}  # Å
METALS = list(LATTICE_CONSTANTS)


def alloys(number: int, seed: int, rattle: tuple[float, float] = (0.05, 0.3)) -> list[Atoms]:
    """Random fcc alloys of 2–32 atoms and 1–4 elements, every atom displaced by a Gaussian of random width (Å)."""
    generator = np.random.default_rng(seed)
    return [_alloy(generator, rattle) for _ in range(number)]


def _alloy(generator: np.random.Generator, rattle: tuple[float, float]) -> Atoms:
    while True:
        repeats, cubic = generator.integers(1, 5, 3), bool(generator.integers(2))
        if 2 <= repeats.prod() * (4 if cubic else 1) <= 32:
            break
    atoms = bulk("Cu", cubic=cubic) * repeats
    elements = generator.choice(METALS, generator.integers(1, 5), replace=False)
    symbols = generator.choice(elements, len(atoms))
    scale = np.mean([LATTICE_CONSTANTS[symbol] for symbol in symbols]) / LATTICE_CONSTANTS["Cu"]
    atoms.set_chemical_symbols(list(symbols))
    atoms.set_cell(atoms.cell * scale, scale_atoms=True)
    displacements = generator.normal(0, generator.uniform(*rattle), (len(atoms), 3))
    atoms.positions += displacements - displacements.mean(axis=0)
    return atoms


def strained_alloys(number: int, seed: int) -> list[Atoms]:
    """The same with a random symmetric strain of up to ±3 % on top, to be relaxed with the cell."""
    generator = np.random.default_rng(seed)
    images = [_alloy(generator, (0.05, 0.15)) for _ in range(number)]
    for atoms in images:
        strain = generator.uniform(-0.03, 0.03, (3, 3))
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    return images


def slabs(number: int, seed: int) -> list[Atoms]:
    """fcc(111) slabs of 12 atoms, lowest layer fixed, one adsorbate, free atoms displaced by 0.08 Å."""
    generator = np.random.default_rng(seed)
    images = []
    for _ in range(number):
        atoms = fcc111(generator.choice(METALS), (2, 2, 3), vacuum=7)
        place = generator.choice(["ontop", "bridge", "fcc"])
        add_adsorbate(atoms, generator.choice(["H", "C", "N", "O"]), 1.2, place)
        fixed = [atom.index for atom in atoms if atom.tag == 3]
        atoms.positions += generator.normal(0, 0.08, (len(atoms), 3))
        atoms.set_constraint(FixAtoms(fixed))
        images.append(atoms)
    return images


def clusters(number: int, seed: int) -> list[Atoms]:
    """Random clusters of 6–20 atoms of two metals, no two nearer than 2 Å: far from any minimum."""
    generator = np.random.default_rng(seed)
    return [_cluster(generator) for _ in range(number)]


def _cluster(generator: np.random.Generator) -> Atoms:
    size = int(generator.integers(6, 21))
    edge, positions = (14.0 * size) ** (1 / 3), []
    while len(positions) < size:
        place = generator.uniform(0, edge, 3)
        if all(np.linalg.norm(place - other) > 2.0 for other in positions):
            positions.append(place)
    return Atoms(generator.choice(generator.choice(METALS, 2, replace=False), size), positions)


def packings(number: int, seed: int) -> list[Atoms]:
    """Random Al–Fe cells of 2–16 atoms, 12 Å³ per atom ±5 %, no two atoms nearer than 1 Å, self-images included."""
    sizes = np.random.default_rng(seed)
    formulas = [f"Al{sizes.integers(1, 9)}Fe{sizes.integers(1, 9)}" for _ in range(number)]
    return pack(
        formulas,
        torch.Generator().manual_seed(seed),
        volume_per_atom_angstrom3=12.0,
        minimum_distance_angstrom=1.0,
        volume_spread=0.05,
    ).to_ase()
