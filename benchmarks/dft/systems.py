"""What is relaxed with Quantum ESPRESSO: small cells that the pseudopotentials of Debian allow, cheap settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, molecule
from ase.constraints import FixAtoms
from ase.spacegroup import crystal

METAL = {"occupations": "smearing", "smearing": "mv", "degauss": 0.03}
INSULATOR = {"occupations": "fixed"}
FILES = {
    "Al": "Al.pz-vbc.UPF", "As": "As.pz-bhs.UPF", "C": "C.pz-rrkjus.UPF", "H": "H.pz-vbc.UPF",
    "Mg": "Mg.pz-n-vbc.UPF", "Ni": "Ni.pz-nd-rrkjus.UPF", "O": "O.pz-rrkjus.UPF", "Si": "Si.pz-vbc.UPF",
    "Ti": "Ti.pz-sp-van_ak.UPF",
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """One start and the settings of pw.x for it."""

    build: Callable[[], Atoms]
    cutoff_ry: float
    kpts: tuple[int, int, int] | None  # None: Γ
    settings: dict[str, Any] = field(default_factory=lambda: dict(INSULATOR))
    rattle_angstrom: float = 0.1
    strain: float = 0.0
    cell: bool = False

    def start(self, seed: int = 9000) -> Atoms:
        atoms = self.build()
        random = np.random.default_rng(seed)
        if self.strain:
            tensor = self.strain * random.standard_normal((3, 3))
            atoms.set_cell(atoms.cell @ (np.eye(3) + (tensor + tensor.T) / 2), scale_atoms=True)
        moves = self.rattle_angstrom * random.standard_normal((len(atoms), 3))
        atoms.set_positions(atoms.positions + moves)  # which keeps fixed atoms where they are
        return atoms

    @property
    def pw_settings(self) -> dict[str, Any]:
        # where the cell moves, tables for longer wave vectors; without a cell relaxation pw.x does not read the number
        moving = {"calculation": "vc-relax", "cell_factor": 2.0} if self.cell else {}
        return {"ecutwfc": self.cutoff_ry, **moving, **self.settings}


def vacancy(atoms: Atoms) -> Atoms:
    del atoms[0]
    return atoms


def hydrogen_on_aluminium() -> Atoms:
    slab = fcc100("Al", (1, 1, 3), a=3.98, vacuum=4.0)
    add_adsorbate(slab, "H", 1.0, "hollow")
    slab.set_constraint(FixAtoms(indices=[0]))
    slab.pbc = True
    slab.info.clear()
    return slab


def boxed(name: str, edge: float) -> Atoms:
    atoms = molecule(name, cell=[edge] * 3, pbc=True)
    atoms.center()
    return atoms


def rutile() -> Atoms:
    atoms = crystal(["Ti", "O"], [(0, 0, 0), (0.305, 0.305, 0)], spacegroup=136, cellpar=[4.55, 4.55, 2.93, 90, 90, 90])
    return Atoms(atoms.symbols, positions=atoms.positions, cell=atoms.cell, pbc=True)


def _two(formula: str, structure: str, edge: float, cutoff_ry: float) -> System:
    """The primitive cell of a semiconductor, strained."""
    made = lambda: bulk(formula, structure, a=edge)  # noqa: E731
    return System(made, cutoff_ry, (2, 2, 2), rattle_angstrom=0.05, strain=0.03, cell=True)


SYSTEMS: dict[str, System] = {
    "Si8": System(lambda: bulk("Si", a=5.40, cubic=True), 12, (2, 2, 2)),
    "Si2, cell": System(lambda: bulk("Si", a=5.40), 14, (3, 3, 3), rattle_angstrom=0.05, strain=0.03, cell=True),
    "Al4, cell": System(
        lambda: bulk("Al", a=3.98, cubic=True), 12, (4, 4, 4), METAL, rattle_angstrom=0.1, strain=0.03, cell=True
    ),
    "MgO2, cell": System(
        lambda: bulk("MgO", "rocksalt", a=4.18), 30, (2, 2, 2), rattle_angstrom=0.05, strain=0.03, cell=True
    ),
    "H on Al(100)": System(hydrogen_on_aluminium, 14, (4, 4, 1), METAL),
    "SiH4 in a box": System(lambda: boxed("SiH4", 6.5), 14, None),
    "H2O in a box": System(lambda: boxed("H2O", 5.5), 25, None, rattle_angstrom=0.05),
    "Al3, a vacancy": System(lambda: vacancy(bulk("Al", a=3.98, cubic=True)), 12, (3, 3, 3), METAL),
    "AlAs2, cell": _two("AlAs", "zincblende", 5.60, 12),
    "SiC2, cell": _two("SiC", "zincblende", 4.33, 25),
    "C2, cell": _two("C", "diamond", 3.54, 25),
    "Al7, a vacancy": System(lambda: vacancy(bulk("Al", a=3.98).repeat(2)), 12, (2, 2, 2), METAL),
    "MgO8": System(lambda: bulk("MgO", "rocksalt", a=4.18, cubic=True), 25, (1, 1, 1)),
    "SiC8": System(lambda: bulk("SiC", "zincblende", a=4.33, cubic=True), 25, (2, 2, 2)),
    "AlAs8": System(lambda: bulk("AlAs", "zincblende", a=5.60, cubic=True), 12, (2, 2, 2)),
    "TiO2 rutile": System(rutile, 25, (1, 1, 2), rattle_angstrom=0.07),
    "C8": System(lambda: bulk("C", "diamond", a=3.54, cubic=True), 25, (2, 2, 2), rattle_angstrom=0.07),
    "Ni4": System(lambda: bulk("Ni", a=3.43, cubic=True), 24, (2, 2, 2), METAL),
}
