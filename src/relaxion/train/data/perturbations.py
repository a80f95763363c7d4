"""Away from the minimum: rattled, strained, with vacancies, or packed at random. Randomness is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from ase import Atoms
from ase.geometry import get_distances
from torch import Generator

from relaxion.errors import SettingsError, StructureError
from relaxion.potentials.base import Potential
from relaxion.settings import nearest
from relaxion.structures.structures import PER_ATOM, Move, Structures, per_structure_sum, rows_of

Perturbation = Callable[[Structures, Generator], Structures]

NEAREST_ANGSTROM = 1.0  # no displaced start has two atoms nearer than this
RATTLE = "rattle"  # in `Atoms.info` of a start: how far its atoms may be displaced, in units of the usual


def rattle(structures: Structures, generator: Generator, *, size_angstrom: float) -> Structures:
    """Gaussian displacements of the movable atoms, `size_angstrom` along each axis, without a rigid shift.

    A uniform displacement of [0, 1) is mostly a rigid shift, which costs nothing to undo; so the mean is
    removed and what is left is scaled back to the asked size. Where an atom is fixed it holds the frame, and
    nothing is removed.
    """
    index = structures.structure_index
    number = structures.n_structures
    noise = torch.randn(structures.positions.shape, generator=generator, dtype=structures.dtype)
    noise = noise * structures.movable[:, None]
    counts = structures.counts
    movable = per_structure_sum(structures.movable.to(torch.int64), index, number)
    floating = (movable == counts)[:, None]  # (n_structures, 1) nothing is fixed
    means = torch.where(floating, per_structure_sum(noise, index, number) / counts[:, None], 0.0)
    # taking the mean away leaves a variance of (n - 1)/n; a lone atom has nowhere to go
    growth = torch.where(floating[:, 0] & (counts > 1), (counts / (counts - 1).clamp_min(1)).sqrt(), 1.0)
    displacements = size_angstrom * growth.to(structures.dtype)[index, None] * (noise - means[index])
    return replace(structures, positions=structures.positions + displacements * structures.movable[:, None])


def uniform(structures: Structures, generator: Generator, *, largest_angstrom: float) -> Structures:
    """`largest_angstrom` · U[0, 1) added to every coordinate of the movable atoms, a rigid shift included.

    As in the published AlFe task; `rattle` is the better choice elsewhere.
    """
    draws = torch.rand(structures.positions.shape, generator=generator, dtype=structures.dtype)
    return replace(structures, positions=structures.positions + largest_angstrom * draws * structures.movable[:, None])


def strain(structures: Structures, generator: Generator, *, largest: float) -> Structures:
    """A symmetric strain in a random frame, its largest stretch uniform between 0 and `largest`.

    Cells and positions of fully periodic structures; others have no cell that could be strained.
    """
    number = structures.n_structures
    noise = torch.randn((number, 3, 3), generator=generator, dtype=structures.dtype)
    sizes = largest * torch.rand(number, generator=generator, dtype=structures.dtype)
    symmetric = noise + noise.transpose(1, 2)
    stretches = torch.linalg.eigvalsh(symmetric).abs().amax(dim=1)  # (n_structures,)
    strains = symmetric * (sizes / stretches * structures.periodic.all(dim=1))[:, None, None]
    return structures.moved(Move(torch.zeros_like(structures.positions), strains))


def vacancy(structures: Structures, generator: Generator, *, count: int = 1) -> Structures:
    """Without `count` movable atoms of each structure, chosen at random."""
    index = structures.structure_index
    number = structures.n_structures
    movable = per_structure_sum(structures.movable.to(torch.int64), index, number)
    poor = ((movable < count) | (structures.counts <= count)).nonzero().flatten().tolist()
    if poor:
        raise StructureError(
            f"structure {poor[0]} has {structures.counts[poor[0]]} atoms, {movable[poor[0]]} movable ones: "
            f"too few to take {count} away and keep one"
        )
    lots = torch.rand(structures.n_atoms, generator=generator, dtype=torch.float64) + 2.0 * ~structures.movable
    order = torch.argsort(4.0 * index + lots)  # structure by structure, lowest lot first, fixed atoms last
    starts = structures.counts.cumsum(0) - structures.counts
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(structures.n_atoms) - starts[index]
    return replace(structures, **rows_of(structures, PER_ATOM, ranks >= count))


def compose(*perturbations: Perturbation) -> Perturbation:
    """One after the other."""

    def all_of_them(structures: Structures, generator: Generator) -> Structures:
        for perturb in perturbations:
            structures = perturb(structures, generator)
        return structures

    return all_of_them


def perturbation(text: str) -> Perturbation:
    """From words, as recipes and the command line write them: `rattle:0.1`, `vacancy:1+strain:0.05`."""
    return compose(*[_one(part.strip()) for part in text.split("+")])


def _one(part: str) -> Perturbation:
    name, _, value = part.partition(":")
    if name not in _NAMED:
        raise SettingsError(f"unknown perturbation '{name}': {nearest(name, _NAMED)}")
    kind, make = _NAMED[name]
    try:
        size = kind(value)
    except ValueError as error:
        raise SettingsError(f"'{part}': write {name}:{kind.__name__}, for example {name}:{kind(1)}") from error
    if not 0 <= size < float("inf"):
        raise SettingsError(f"'{part}': the size must not be negative or infinite")
    return make(size)


_NAMED: dict[str, tuple[type, Callable[[float], Perturbation]]] = {
    "rattle": (float, lambda size: lambda s, generator: rattle(s, generator, size_angstrom=size)),
    "uniform": (float, lambda size: lambda s, generator: uniform(s, generator, largest_angstrom=size)),
    "strain": (float, lambda size: lambda s, generator: strain(s, generator, largest=size)),
    "vacancy": (int, lambda size: lambda s, generator: vacancy(s, generator, count=int(size))),
}


# The same for single ASE structures, with NumPy's generators


def random_displacements(atoms: Atoms, random: np.random.Generator, width: float) -> np.ndarray:
    """Gaussians of this width (Å), zero for fixed atoms; where none is fixed the centre stays."""
    displacements = random.normal(0, width, (len(atoms), 3))
    fixed = atoms.constraints[0].index if atoms.constraints else []
    displacements[fixed] = 0
    return displacements if len(fixed) else displacements - displacements.mean(axis=0)  # (n_atoms, 3) Å


def displaced(atoms: Atoms, random: np.random.Generator, width: float, nearest: float = NEAREST_ANGSTROM) -> Atoms:
    """Every atom by a Gaussian of this width (Å); drawn again where two come too near."""
    while True:
        moved = atoms.copy()
        moved.positions += random_displacements(atoms, random, width)
        if closest(moved) > nearest:
            return moved


def closest(atoms: Atoms) -> float:
    """Å; images of an atom itself left out, they are a lattice vector away."""
    distances = get_distances(atoms.positions, cell=atoms.cell, pbc=atoms.pbc)[1]
    return float((distances + np.diag(np.full(len(atoms), np.inf))).min())


def random_strain(random: np.random.Generator, largest: float) -> np.ndarray:
    """Symmetric, (3, 3), no element above `largest`."""
    noise = random.uniform(-largest, largest, (3, 3))
    return (noise + noise.T) / 2


def strained(atoms: Atoms, strain: np.ndarray) -> Atoms:
    """The cell, and the atoms with it, in place."""
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


# ---- crystals brought to the volume that a potential gives them, before they are displaced

FIRST_MODULUS, MODULI = 0.6, (0.03, 4.0)  # eV/Å³: 96 GPa; noble gases to diamond
LARGEST_SIZING, LARGEST_CHANGE, SIZED = 0.2, 0.8, 0.01  # of ln V: in a step, in all, and where it is good enough


class Sizing:
    """A crystal whose volume follows its pressure: Newton's method on ln V, the bulk modulus learned on the way."""

    def __init__(self, crystal: Atoms, most_calls: int) -> None:
        self.crystal = crystal
        self.calls_left = most_calls
        self.log_volume = 0.0  # relative to the crystal as it was made
        self.modulus = FIRST_MODULUS
        self.last: tuple[float, float] | None = None  # log volume and pressure
        self.done = self.failed = False

    @property
    def scale(self) -> float:
        return float(np.exp(self.log_volume / 3))

    @property
    def structure(self) -> Structures:
        atoms = self.crystal.copy()
        atoms.set_cell(atoms.cell.array * self.scale, scale_atoms=True)
        return Structures.from_ase(atoms)

    def take(self, pressure: float | None) -> None:
        """The pressure (eV/Å³) at the present volume, None where the potential failed; the next volume, or the last."""
        if pressure is None or not np.isfinite(pressure):
            self.done = self.failed = True
            return
        if self.last is not None and abs(self.log_volume - self.last[0]) > 1e-6:
            slope = (self.last[1] - pressure) / (self.log_volume - self.last[0])
            self.modulus = float(np.clip(slope, *MODULI))
        self.last = self.log_volume, pressure
        step = float(np.clip(pressure / self.modulus, -LARGEST_SIZING, LARGEST_SIZING))
        self.log_volume = float(np.clip(self.log_volume + step, -LARGEST_CHANGE, LARGEST_CHANGE))
        self.calls_left -= 1
        self.done = self.calls_left <= 0 or abs(step) < SIZED


def bring_to_volume(potential: Potential, sizings: Sequence[Sizing]) -> None:
    """All of them, side by side."""
    while under_way := [sizing for sizing in sizings if not sizing.done]:
        for sizing, pressure in zip(under_way, pressures(potential, [s.structure for s in under_way]), strict=True):
            sizing.take(pressure)


def pressures(potential: Potential, structures: Sequence[Structures]) -> list[float | None]:
    """eV/Å³; None for those where the potential fails, by themselves as well as in company."""
    try:
        stresses = potential(Structures.concatenate(structures), stresses=True).stresses
        assert stresses is not None
        return (-stresses.double().diagonal(dim1=1, dim2=2).sum(dim=1) / 3).tolist()
    except Exception:  # noqa: BLE001 - engines of other packages raise what they like where a calculation fails
        if len(structures) == 1:
            return [None]
        return [pressure for one in structures for pressure in pressures(potential, [one])]
