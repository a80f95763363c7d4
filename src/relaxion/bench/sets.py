"""Named sets of starts. A start depends on set, seed and place only, so fewer structures are the first of the many.

Seeds from 9000 on belong to measuring: nothing is trained or tuned on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import numpy as np
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111
from ase.constraints import FixAtoms

from relaxion.bench import chemistry_sets as chemistry
from relaxion.bench.displacements import NEAREST_ANGSTROM, displaced, strained
from relaxion.errors import SettingsError
from relaxion.generators.packings import pack
from relaxion.potentials import potential
from relaxion.potentials.pair import LennardJones
from relaxion.potentials.potential import Potential
from relaxion.settings import nearest

FIRST_SEED = 9000  # and all above it are for measuring
LATTICE_CONSTANTS = {"Al": 4.05, "Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92}  # Å
METALS = list(LATTICE_CONSTANTS)

Make = Callable[[np.random.Generator, int], Atoms]  # the number is the place in the set


@dataclass(frozen=True)
class StartSet:
    """Starts of one kind, and how they are to be relaxed."""

    name: str
    title: str
    make: Make
    make_potential: Callable[[], Potential]
    calculator: str  # what `make_potential` makes, in words
    number: int = 50  # of structures, unless another is asked for: a minute or two
    free_cell: bool = False
    without_gpmin: bool = False  # whose time grows with (calls × atoms)³: minutes per structure, far from a minimum

    def starts(self, number: int, seed: int) -> list[Atoms]:
        """The first `number` starts of this seed."""
        place = list(SETS).index(self.name)
        return [self.make(np.random.default_rng([seed, place, index]), index) for index in range(number)]


def find_set(name: str) -> StartSet:
    """The set of this name."""
    if name not in SETS:
        raise SettingsError(f"unknown set '{name}': {nearest(name.lower(), SETS)} Or name a structure file.")
    return SETS[name]


def _alloy(generator: np.random.Generator, sizes: tuple[int, int], rattle: tuple[float, float]) -> Atoms:
    """A random fcc alloy of 1–4 elements, every atom displaced by a Gaussian of random width (Å)."""
    while True:
        repeats, cubic = generator.integers(1, 5, 3), bool(generator.integers(2))
        if sizes[0] <= repeats.prod() * (4 if cubic else 1) <= sizes[1]:
            break
    atoms = bulk("Cu", cubic=cubic) * repeats
    elements = generator.choice(METALS, generator.integers(1, 5), replace=False)
    symbols = generator.choice(elements, len(atoms))
    scale = np.mean([LATTICE_CONSTANTS[symbol] for symbol in symbols]) / LATTICE_CONSTANTS["Cu"]
    atoms.set_chemical_symbols(list(symbols))
    atoms.set_cell(atoms.cell * scale, scale_atoms=True)
    return displaced(atoms, generator, generator.uniform(*rattle))


def _bulk(generator: np.random.Generator, _index: int) -> Atoms:
    return _alloy(generator, (4, 32), (0.05, 0.3))


def _large(generator: np.random.Generator, _index: int) -> Atoms:
    return _alloy(generator, (24, 64), (0.05, 0.3))


def _strained(generator: np.random.Generator, _index: int) -> Atoms:
    return strained(_alloy(generator, (4, 32), (0.05, 0.15)), generator, 0.03)


def _slab(generator: np.random.Generator, _index: int) -> Atoms:
    """fcc(111), 12 atoms, lowest layer fixed, one adsorbate, free atoms displaced by 0.08 Å."""
    atoms = fcc111(generator.choice(METALS), (2, 2, 3), vacuum=7)
    place = generator.choice(["ontop", "bridge", "fcc"])
    add_adsorbate(atoms, generator.choice(["H", "C", "N", "O"]), 1.2, place)
    fixed = [atom.index for atom in atoms if atom.tag == 3]
    atoms.positions += generator.normal(0, 0.08, (len(atoms), 3))
    atoms.set_constraint(FixAtoms(fixed))
    return atoms


def _cluster(generator: np.random.Generator, _index: int) -> Atoms:
    """6–20 atoms of two metals thrown into a cube of 14 Å³ per atom, no two nearer than 2 Å."""
    size = int(generator.integers(6, 21))
    edge, positions = (14.0 * size) ** (1 / 3), []
    while len(positions) < size:
        place = generator.uniform(0, edge, 3)
        if all(np.linalg.norm(place - other) > 2.0 for other in positions):
            positions.append(place)
    return Atoms(generator.choice(generator.choice(METALS, 2, replace=False), size), positions)


def _near_or_far(generator: np.random.Generator, index: int) -> Atoms:
    """Bulk displaced by 0.1–0.5 Å and loose clusters, in turn."""
    return _cluster(generator, index) if index % 2 else _alloy(generator, (4, 32), (0.1, 0.5))


def _packing(generator: np.random.Generator, _index: int) -> Atoms:
    """A random Al–Fe cell of 2–16 atoms, 12 Å³ per atom ±5 %, no two atoms nearer than 1 Å, self-images included."""
    formula = f"Al{generator.integers(1, 9)}Fe{generator.integers(1, 9)}"
    return pack(
        [formula],
        torch.Generator().manual_seed(int(generator.integers(2**62))),
        volume_per_atom_angstrom3=12.0,
        minimum_distance_angstrom=NEAREST_ANGSTROM,
        volume_spread=0.05,
    ).to_ase()[0]


def _lj38(generator: np.random.Generator, _index: int) -> Atoms:
    """38 atoms by the rule of OptBench (henkelmangroup/optbench, `bin/random_cluster.py`).

    Hydrogens, one after the other, uniformly in a cube of edge (k · 4/3 π r / 0.1)^(1/3) for the k-th, kept when
    their nearest neighbour is 0.8–1.3 bonds away; a bond is 2r = 0.62, so all pairs begin squeezed (a Lennard-Jones
    bond is 1.12).
    """
    radius = 0.31
    positions = np.zeros((1, 3))
    while len(positions) < 38:
        edge = ((len(positions) + 1) * 4 / 3 * pi * radius / 0.1) ** (1 / 3)
        place = generator.uniform(-edge / 2, edge / 2, 3)
        if 0.8 < np.linalg.norm(positions - place, axis=1).min() / (2 * radius) < 1.3:
            positions = np.vstack([positions, place])
    return Atoms("H38", positions)


def _emt() -> Potential:
    return potential("emt")


def _eam() -> Potential:
    return potential("eam")


def _chgnet() -> Potential:
    return chemistry.engine("chgnet")


def _gfn2() -> Potential:
    return chemistry.engine("gfn2")


def _lennard_jones() -> Potential:
    """ε = σ = 1, with a cutoff (OptBench's 15 σ) beyond every distance in a cluster."""
    return LennardJones(cutoff=15.0)


_KNOWN = (  # their order is part of the seeds: new sets go to the end
    StartSet("emt-bulk", "random EMT alloys, 4–32 atoms, rattle 0.05–0.3 Å", _bulk, _emt, "emt", 100),
    StartSet(
        name="emt-large",
        title="random EMT alloys, 24–64 atoms, rattle 0.05–0.3 Å",
        make=_large,
        make_potential=_emt,
        calculator="emt",
        without_gpmin=True,
    ),
    StartSet(
        name="emt-bulk-cell",
        title="EMT alloys with free cell, 4–32 atoms, rattle 0.05–0.15 Å, strain ±3 %",
        make=_strained,
        make_potential=_emt,
        calculator="emt",
        free_cell=True,
    ),
    StartSet("emt-slabs", "EMT slabs with an adsorbate", _slab, _emt, "emt"),
    StartSet("emt-clusters", "random EMT clusters, 6–20 atoms", _cluster, _emt, "emt", without_gpmin=True),
    StartSet("alfe", "random Al–Fe packings, 2–16 atoms", _packing, _eam, "eam", without_gpmin=True),
    StartSet(
        name="alfe-cell",
        title="random Al–Fe packings with free cell, 2–16 atoms",
        make=_packing,
        make_potential=_eam,
        calculator="eam",
        free_cell=True,
        without_gpmin=True,
    ),
    StartSet(
        name="lj38",
        title="random LJ38 clusters (OptBench)",
        make=_lj38,
        make_potential=_lennard_jones,
        calculator="lj, ε = 1 eV, σ = 1 Å, cutoff 15 Å",
        without_gpmin=True,
    ),
    StartSet(
        name="mixed",
        title="EMT: bulk displaced by 0.1–0.5 Å and loose clusters, in turn",
        make=_near_or_far,
        make_potential=_emt,
        calculator="emt",
        without_gpmin=True,
    ),
    StartSet(
        name="crystals",
        title="unseen crystals, 2–16 atoms, CHGNet, rattle 0.12 Å",
        make=chemistry.known_crystal,
        make_potential=_chgnet,
        calculator="chgnet",
        number=40,
    ),
    StartSet(
        name="crystals-cell",
        title="unseen crystals with free cell, 2–16 atoms, CHGNet, rattle 0.12 Å, strain ±3 %",
        make=chemistry.strained_crystal,
        make_potential=_chgnet,
        calculator="chgnet",
        number=40,
        free_cell=True,
    ),
    StartSet(
        name="new-elements",
        title="crystals with an element never trained on, 2–16 atoms, CHGNet, rattle 0.12 Å",
        make=chemistry.new_element,
        make_potential=_chgnet,
        calculator="chgnet",
        number=40,
    ),
    StartSet(
        name="macs",
        title="random oxides of about 40 atoms (the recipe of MACS), CHGNet",
        make=chemistry.random_oxide,
        make_potential=_chgnet,
        calculator="chgnet",
        number=20,
        without_gpmin=True,
    ),
    StartSet(
        name="perovskites-cell",
        title="unseen cubic perovskites with free cell, 5 atoms, CHGNet, rattle 0.1 Å, strain ±3 %",
        make=chemistry.perovskite,
        make_potential=_chgnet,
        calculator="chgnet",
        number=30,
        free_cell=True,
    ),
    StartSet(
        name="carbon-cell",
        title="carbon allotropes with free cell, 4–8 atoms, CHGNet, rattle 0.1 Å, strain ±3 %",
        make=chemistry.carbon,
        make_potential=_chgnet,
        calculator="chgnet",
        number=25,
        free_cell=True,
    ),
    StartSet(
        name="molecules",
        title="unseen organic molecules, 3–24 atoms, GFN2-xTB, rattle 0.05 Å",
        make=chemistry.molecule,
        make_potential=_gfn2,
        calculator="gfn2",
        number=40,
    ),
)
SETS: dict[str, StartSet] = {known.name: known for known in _KNOWN}
