"""Where relaxations begin: anything with `sample(generator, n_structures) -> Structures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from ase import Atoms
from torch import Generator

from relaxion.errors import SettingsError
from relaxion.settings import nearest
from relaxion.structures import Structures
from relaxion.train.data.alloys import BODY_CENTRED, EMT_METALS, lattices_of, mean_volume, random_alloy, random_symbols
from relaxion.train.data.clusters import ball, strewn
from relaxion.train.data.defects import bicrystal, defective_crystal
from relaxion.train.data.facets import faceted_slab
from relaxion.train.data.packings import packed
from relaxion.train.data.perturbations import (
    RATTLE,
    Perturbation,
    compose,
    random_displacements,
    random_strain,
    strained,
)
from relaxion.train.data.slabs import alloy_slab


class Starts(Protocol):
    """A source of structures to relax; all randomness comes from the generator."""

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        """So many structures."""
        ...


@dataclass(frozen=True)
class PerturbedStarts:
    """Structures of a pool, drawn with equal chance, then perturbed."""

    pool: Structures
    perturbations: Sequence[Perturbation] = field(default=())

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        which = torch.randint(self.pool.n_structures, (n_structures,), generator=generator)
        return compose(*self.perturbations)(self.pool.select(which), generator)


@dataclass(frozen=True)
class MetalStarts:
    """Random structures of random kinds; `shares` says how many of which kind."""

    elements: tuple[str, ...] = EMT_METALS
    sizes: tuple[int, int] = (2, 16)
    shares: Mapping[str, float] = field(default_factory=lambda: {"alloy": 1.0})
    rattle_angstrom: tuple[float, float] = (0.03, 0.3)
    free_share: float = 0.4
    """Of the crystals, those whose cells are strained and relax too."""
    largest_strain: float = 0.04
    adsorbates: tuple[str, ...] = ()
    """Elements of atoms that may sit on slabs beside the metals."""
    largest_slab: int | None = None
    """Atoms of the largest slab, atoms on top not counted; None: as of every other kind."""
    largest_defect: int | None = None
    """Atoms of the largest crystal with a defect or a boundary; None: as of every other kind."""
    largest_particle: int | None = None
    """Atoms of the largest particle; None: as of every other kind."""

    def __post_init__(self) -> None:
        for name in self.shares:
            if name not in KINDS:
                raise SettingsError(f"unknown kind of start '{name}': {nearest(name, KINDS)}")

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        """So many starts. The seed of NumPy's generator is drawn from the one given."""
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        names, weights = list(self.shares), np.array(list(self.shares.values()))
        chosen = random.choice(len(names), n_structures, p=weights / weights.sum())
        images = [self._displaced(KINDS[names[number]](self, random), random) for number in chosen]
        free = [bool(atoms.pbc.all()) and random.random() < self.free_share for atoms in images]
        for atoms, is_free in zip(images, free, strict=True):
            if is_free:
                strained(atoms, random_strain(random, self.largest_strain))
        return Structures.from_ase(images, cell_free=free)

    def _displaced(self, atoms: Atoms, random: np.random.Generator) -> Atoms:
        width = 0.0 if atoms.info.pop("far", False) else random.uniform(*self.rattle_angstrom)
        width *= atoms.info.pop(RATTLE, 1.0)
        atoms.positions += random_displacements(atoms, random, width)
        return atoms


def _alloy(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    centred = 0.4 if set(BODY_CENTRED) & set(starts.elements) else 0.0
    return random_alloy(random, starts.elements, starts.sizes, centred_share=centred)


def _vacancy(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    atoms = _alloy(starts, random)
    if len(atoms) >= 6:
        del atoms[int(random.integers(len(atoms)))]
    return atoms


def _slab(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    sizes = starts.sizes[0], starts.largest_slab or starts.sizes[1]
    return alloy_slab(random, starts.elements, sizes, starts.adsorbates)


def _cluster(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """At the mean of the elements' volumes."""
    size = int(random.integers(max(3, starts.sizes[0]), starts.sizes[1] + 1))
    symbols = random_symbols(random, starts.elements, size)
    edge = float((mean_volume(symbols) * size) ** (1 / 3))
    places = strewn(random, size, edge, growth=1.001)  # ends for any size
    return Atoms(symbols, places, info={"far": True})


def _packing(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """A random cell at the mean volume, no two atoms nearer than 1.8 Å."""
    symbols = random_symbols(random, starts.elements, int(random.integers(starts.sizes[0], starts.sizes[1] + 1)))
    volume = 1.05 * mean_volume(symbols)
    atoms = packed(random, symbols, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=1.8)
    atoms.info["far"] = True
    return atoms


def _surface(starts: MetalStarts, random: np.random.Generator, *, stepped: bool = False) -> Atoms:
    sizes = max(6, starts.sizes[0]), starts.largest_slab or starts.sizes[1]
    return faceted_slab(random, starts.elements, sizes, light=bool(starts.adsorbates), stepped=stepped)


def _defect(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    sizes = max(8, starts.sizes[0]), starts.largest_defect or starts.sizes[1]
    return defective_crystal(random, starts.elements, sizes, starts.adsorbates)


def _boundary(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    return bicrystal(random, starts.elements, (starts.sizes[0], starts.largest_defect or starts.sizes[1]))


def _particle(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """Cut from a crystal, or at random and then far from any minimum."""
    if random.random() < 0.5:
        return _cluster(replace(starts, sizes=(starts.sizes[0], starts.largest_particle or starts.sizes[1])), random)
    size = int(random.integers(max(3, starts.sizes[0]), (starts.largest_particle or starts.sizes[1]) + 1))
    return ball(random, random_symbols(random, starts.elements, size), str(random.choice(lattices_of(starts.elements))))


KINDS: dict[str, Callable[[MetalStarts, np.random.Generator], Atoms]] = {
    "alloy": _alloy,
    "vacancy": _vacancy,
    "slab": _slab,
    "cluster": _cluster,
    "packing": _packing,
    "surface": _surface,
    "step": partial(_surface, stepped=True),
    "defect": _defect,
    "boundary": _boundary,
    "particle": _particle,
}
