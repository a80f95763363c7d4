"""Starts of a collection: seed, kind and number decide about each, so any of them can be made again by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list

from relaxion.errors import StructureError
from relaxion.structures import Structures
from relaxion.train.collecting.settings import CollectSettings, KindSettings
from relaxion.train.data import dataset
from relaxion.train.data.alloys import EMT_METALS
from relaxion.train.data.dataset import LABEL, Side, belongs, reasons_of
from relaxion.train.data.molecules import random_molecule
from relaxion.train.data.packings import packed
from relaxion.train.data.perturbations import random_displacements, random_strain, strained
from relaxion.train.data.prototypes import CRYSTAL, random_crystal, random_element, random_perovskite
from relaxion.train.data.slabs import random_surface
from relaxion.train.data.starts import MetalStarts

NEAREST_SHARE = 0.6  # of the sum of covalent radii: displaced atoms do not come nearer
PACKED_ANGSTROM = 1.0  # nor do those of a random packing
TRIES = 30


@dataclass(frozen=True, eq=False)
class Start:
    """One relaxation to be done, and everything about it that is random."""

    key: str
    kind: str
    number: int
    atoms: Atoms  # where they are before anything is displaced
    crystal: Atoms | None  # whose volume decides about that of the atoms
    strain: np.ndarray | None  # (3, 3) symmetric; None: the cell stays
    displacements: np.ndarray  # (n_atoms, 3) Å

    def structure(self, scale: float = 1.0) -> Structures:
        """Grown by `scale` along all axes, then strained and displaced; less where atoms would come too near."""
        atoms = self.atoms.copy()
        atoms.set_constraint()
        atoms.set_cell(atoms.cell.array * scale, scale_atoms=True)
        if self.strain is not None:
            strained(atoms, self.strain)
        places = atoms.positions.copy()
        for attempt in range(TRIES):
            atoms.positions = places + 0.9**attempt * self.displacements
            if not self.displacements.any() or not _too_near(atoms):
                break
        atoms.set_constraint(self.atoms.constraints)
        return Structures.from_ase(atoms, cell_free=self.strain is not None)


def make_start(settings: CollectSettings, kind: str, number: int) -> Start:
    """The start of this kind and number."""
    own = settings.kinds[kind]
    mixed = hashlib.sha256(f"{settings.seed} {kind} {number}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(mixed[:8], "little"))
    atoms = _MAKERS[own.make](own, settings.side, random)
    free = bool(atoms.pbc.all()) and random.random() < own.free_cell_share
    strain = random_strain(random, own.largest_strain) if free else None
    width = random.uniform(own.smallest_rattle_angstrom, own.largest_rattle_angstrom)
    displacements = random_displacements(atoms, random, width)
    crystal = atoms.info.get(CRYSTAL) if own.sizing_force_calls else None
    return Start(settings.key(kind, number), kind, number, atoms, crystal, strain, displacements)


def _too_near(atoms: Atoms) -> bool:
    radii = NEAREST_SHARE * covalent_radii[atoms.numbers]
    return len(neighbor_list("i", atoms, radii)) > 0


def _packing(own: KindSettings, side: Side, random: np.random.Generator) -> Atoms:
    """The composition and the volume of a crystal, its atoms anywhere but too near."""
    for _ in range(TRIES):
        crystal = random_crystal(random, side=side, sizes=(2, own.largest_n_atoms))
        most = own.largest_n_atoms // len(crystal)
        least = -(-own.smallest_n_atoms // len(crystal))
        if least > most:
            continue
        formula = "".join(crystal.get_chemical_symbols() * int(random.integers(least, most + 1)))
        volume = crystal.get_volume() / len(crystal)
        try:
            atoms = packed(random, formula, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=PACKED_ANGSTROM)
        except StructureError:  # too dense for this distance
            continue
        atoms.info = crystal.info
        return atoms
    raise StructureError(
        f"no packing of {own.smallest_n_atoms} to {own.largest_n_atoms} atoms was found; allow more sizes"
    )


def _metal(own: KindSettings, side: Side, random: np.random.Generator) -> Atoms:  # noqa: ARG001 (no EMT metal is held out)
    """An alloy of the metals that EMT knows: for trials without an expensive potential."""
    starts = MetalStarts(elements=EMT_METALS, sizes=own.sizes, rattle_angstrom=(0.0, 1e-9), free_share=0.0)
    generator = torch.Generator().manual_seed(int(random.integers(2**62)))
    return starts.sample(generator, 1).to_ase()[0]


def _file(own: KindSettings, side: Side, random: np.random.Generator) -> Atoms:
    usable = file_structures(own, side)
    return usable[int(random.integers(len(usable)))].copy()


def file_structures(own: KindSettings, side: Side) -> list[Atoms]:
    """Structures of the files that are there, those of this side and of the sizes asked for."""
    images = [atoms for name in own.files if Path(name).is_file() for atoms in _read(name)]
    fitting = [atoms for atoms in images if own.smallest_n_atoms <= len(atoms) <= own.largest_n_atoms]
    return [atoms for atoms in fitting if belongs(reasons_of(atoms), side)]


@lru_cache(maxsize=8)
def _read(name: str) -> tuple[Atoms, ...]:
    """Of pure elements each structure is a prototype of its own; all others go by their composition."""
    found = []
    for place, atoms in enumerate(dataset.read(name)):
        bare = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        if len(set(atoms.numbers.tolist())) == 1:
            bare.info[LABEL] = f"{Path(name).name.partition('.')[0]}/{place}"
        found.append(bare)
    return tuple(found)


_MAKERS: dict[str, Callable[[KindSettings, Side, np.random.Generator], Atoms]] = {
    "prototype": lambda own, side, random: random_crystal(random, side=side, sizes=own.sizes),
    "element": lambda own, side, random: random_element(random, side=side, sizes=own.sizes, element=own.element),
    "perovskite": lambda _own, side, random: random_perovskite(random, side=side),
    "packing": _packing,
    "surface": lambda own, side, random: random_surface(random, side=side, sizes=own.sizes),
    "molecule": lambda own, side, random: random_molecule(random, side=side, sizes=own.sizes),
    "metal": _metal,
    "file": _file,
}
