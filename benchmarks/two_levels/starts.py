"""What is relaxed with two potentials: an expensive and a cheap one, and the starts of each family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, fcc111
from ase.constraints import FixAtoms

from relaxion.potentials.base import Potential
from relaxion.potentials.engines import Gfn2
from relaxion.potentials.registry import make_potential
from relaxion.train.data.dataset import ELEMENTS
from relaxion.train.data.kinds import KindSettings, file_structures
from relaxion.train.data.perturbations import displaced, random_strain, strained

BENCHMARKS = Path(__file__).parent.parent
sys.path += [str(BENCHMARKS / "dft"), str(BENCHMARKS / "relaxation")]
from flexible_molecules import flexible_molecule  # noqa: E402
from systems import METAL, System, boxed, hydrogen_on_aluminium, rutile, vacancy  # noqa: E402

FIRST_SEED = 9000  # and all above it are for measuring
RATTLE_ANGSTROM = 0.1
LARGEST_STRAIN = 0.03


def slab_with(symbols: str, facet: Callable[..., Atoms], size: tuple[int, int, int], site: str, height: float) -> Atoms:
    """An aluminium slab, the lowest layer fixed, with an atom or OH upright on top."""
    slab = facet("Al", size, a=3.98, vacuum=4.0)
    guest = Atoms(symbols, positions=[(0, 0, 0.98 * place) for place in range(len(Atoms(symbols)))])
    add_adsorbate(slab, guest, height, site)
    lowest = slab.positions[:, 2].min()
    slab.set_constraint(FixAtoms(mask=slab.positions[:, 2] < lowest + 0.1))
    slab.pbc = True
    slab.info.clear()
    return slab


def hydrogen_in_aluminium() -> Atoms:
    atoms = bulk("Al", a=4.0, cubic=True)
    return atoms + Atoms("H", positions=[(1.3, 0.8, 1.1)])  # between a tetrahedral and an octahedral hole


def silicon_with_carbon() -> Atoms:
    atoms = bulk("Si", a=5.40, cubic=True)
    atoms.symbols[0] = "C"
    return atoms


def oxide_with_vacancy() -> Atoms:
    atoms = bulk("MgO", "rocksalt", a=4.18, cubic=True)
    del atoms[int(np.flatnonzero(atoms.numbers == 8)[0])]
    return atoms


def dense(name: str, edge: float, cutoff: float) -> System:
    """A molecule in a box."""
    return System(lambda: boxed(name, edge), cutoff, None)


DFT: dict[str, System] = {
    "H on Al(100)": System(hydrogen_on_aluminium, 14, (4, 4, 1), METAL),
    "H on Al(111) 2x1": System(lambda: slab_with("H", fcc111, (2, 1, 3), "bridge", 1.0), 14, (2, 4, 1), METAL),
    "O on Al(111)": System(lambda: slab_with("O", fcc111, (1, 1, 3), "fcc", 1.2), 25, (4, 4, 1), METAL),
    "OH on Al(100)": System(lambda: slab_with("OH", fcc100, (1, 1, 3), "hollow", 1.2), 25, (4, 4, 1), METAL),
    "Al7, a vacancy": System(lambda: vacancy(bulk("Al", a=3.98).repeat(2)), 12, (2, 2, 2), METAL),
    "MgO7, an O vacancy": System(oxide_with_vacancy, 25, (1, 1, 1), METAL),
    "Si7C": System(silicon_with_carbon, 20, (1, 1, 1), METAL),
    "Si2H6 in a box": dense("Si2H6", 7.5, 14),
    "H2O in a box": System(lambda: boxed("H2O", 5.5), 25, None, rattle_angstrom=0.05),
    "CH3OH in a box": System(lambda: boxed("CH3OH", 6.5), 25, None, rattle_angstrom=0.05),
    "TiO2 rutile, cell": System(rutile, 25, (1, 1, 2), rattle_angstrom=0.07, strain=0.03, cell=True),
    "Al3, a vacancy, cell": System(
        lambda: vacancy(bulk("Al", a=3.98, cubic=True)), 12, (3, 3, 3), METAL, strain=0.03, cell=True
    ),
    "Al4H, cell": System(hydrogen_in_aluminium, 14, (3, 3, 3), METAL, rattle_angstrom=0.05, strain=0.03, cell=True),
}


@dataclass(frozen=True)
class Family:
    """Starts, and which potential is expensive there and which cheap."""

    title: str
    expensive: str  # a name that `--calc` knows; "gfn1" is GFN1-xTB
    cheap: str
    number: int
    make: Callable[[int, int, Path | None], list[Atoms]]  # number, seed, the file of crystals
    fmax: tuple[float, ...] = (0.05,)
    free_cell: bool = False


def calculator(name: str) -> Potential:
    """As `make_potential`, which has no name for GFN1-xTB."""
    return gfn1() if name == "gfn1" else make_potential(name)


def gfn1() -> Gfn2:
    """The older of the two tight bindings."""
    made = Gfn2(method="GFN1-xTB")
    made.name = "GFN1-xTB"
    return made


def molecules(number: int, seed: int, crystals: Path | None) -> list[Atoms]:
    """Chains, peptides and sugars of 20 to 40 atoms."""
    del crystals
    return [flexible_molecule(np.random.default_rng([seed, place]), place, (20, 40)) for place in range(number)]


def crystals(number: int, seed: int, file: Path | None, *, strain: bool = False, sizes: tuple[int, int] = (4, 12)):
    """Crystals of the Materials Project, rattled; below seed 9000 those that may be trained on, else the others."""
    if file is None:
        raise SystemExit("this family needs --mp20 FILE, a file of MP-20")
    kind = KindSettings(
        make="file", files=(str(file),), engine="sevennet", number=1, smallest_n_atoms=sizes[0],
        largest_n_atoms=sizes[1],
    )  # fmt: skip
    side = "assessment" if seed >= FIRST_SEED else "training"
    known = [atoms for atoms in file_structures(kind, side) if not ELEMENTS & set(atoms.get_chemical_symbols())]
    order = np.random.default_rng(seed).permutation(len(known))[:number]
    return [_shaken(known[place], np.random.default_rng([seed, int(place)]), strain) for place in order]


def _shaken(atoms: Atoms, random: np.random.Generator, strain: bool) -> Atoms:
    moved = displaced(Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True), random, RATTLE_ANGSTROM)
    return strained(moved, random_strain(random, LARGEST_STRAIN)) if strain else moved


def strained_crystals(number: int, seed: int, file: Path | None) -> list[Atoms]:
    return crystals(number, seed, file, strain=True)


L3I5 = "sevennet:7net-l3i5"
FAMILIES: dict[str, Family] = {
    "molecules": Family("flexible molecules, 20–40 atoms", "gfn2", "gfn1", 12, molecules, (0.05, 0.01)),
    "crystals": Family("crystals, 4–12 atoms", L3I5, "sevennet", 30, crystals),
    "crystals-cell": Family("the same, free cell", L3I5, "sevennet", 30, strained_crystals, free_cell=True),
    "crystals-chgnet": Family("crystals, 4–12 atoms", L3I5, "chgnet", 30, crystals),
    "crystals-chgnet-cell": Family("the same, free cell", L3I5, "chgnet", 30, strained_crystals, free_cell=True),
}
