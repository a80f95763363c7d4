"""Where relaxations begin: what recipes call a source, and starts with `sample(generator, n_structures)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.data import atomic_numbers, covalent_radii
from ase.formula import Formula
from torch import Generator

from relaxion.errors import SettingsError
from relaxion.potentials.base import Potential
from relaxion.potentials.engines import is_installed
from relaxion.potentials.registry import EXTRAS
from relaxion.settings import nearest
from relaxion.structures import Structures
from relaxion.train.data import dataset
from relaxion.train.data.alloys import (
    BODY_CENTRED,
    EMT_METALS,
    ball,
    bicrystal,
    defective_crystal,
    fcc_alloys,
    lattices_of,
    mean_volume,
    pack,
    packed,
    random_alloy,
    random_symbols,
    strewn,
    summed_volume,
)
from relaxion.train.data.perturbations import (
    RATTLE,
    Perturbation,
    compose,
    random_displacements,
    random_strain,
    strained,
)
from relaxion.train.data.slabs import alloy_slab, faceted_slab

PACKED_APART = 1.6  # Å; no two atoms of a packing are nearer


Source: TypeAlias = Callable[[int, Generator, Potential], list[Atoms]]
"""So many structures where they are made at random, all there are elsewhere; before any perturbation."""


def structure_source(text: str) -> Source:
    """From `file:PATH@SLICE`, `b2:AlFe`, `alloys:Al-Cu:2-16` or `packings:Al-Fe:2-20`, or several joined by ` + `."""
    if len(words := text.split(" + ")) > 1:
        return partial(_together, [structure_source(word) for word in words])
    kind, _, rest = text.strip().partition(":")
    match kind:
        case "file":
            return partial(_file, rest)
        case "b2":
            elements = tuple(Formula(rest))
            if len(elements) != 2:
                raise SettingsError(f"structures = '{text}': b2 needs two elements, for example b2:AlFe")
            return partial(_cubic_pair, elements)
        case "alloys":
            return partial(_alloys, *_elements_and_sizes(text, rest))
        case "packings":
            return partial(_packings, *_elements_and_sizes(text, rest))
    known = ("file", "b2", "alloys", "packings")
    raise SettingsError(f"structures = '{text}': unknown source '{kind}': {nearest(kind, known)}")


def _together(parts: Sequence[Source], number: int, generator: Generator, potential: Potential) -> list[Atoms]:
    """Each part gives its share of the number asked for: near and far starts, say."""
    share, rest = divmod(number, len(parts))
    found = [part(share + (place < rest), generator, potential) for place, part in enumerate(parts)]
    return [atoms for images in found for atoms in images]


def _file(place: str, *_others: Any) -> list[Atoms]:
    path, _, index = place.partition("@")
    found = dataset.read(path, index or ":")
    for atoms in found:
        atoms.calc = None
    return found


def _cubic_pair(elements: Sequence[str], _number: int, _generator: Generator, potential: Potential) -> list[Atoms]:
    """The B2 (CsCl) cell of two elements at the volume the potential likes best."""
    cell = partial(bulk, "".join(elements), "cesiumchloride")
    contact = 2 / 3**0.5 * sum(covalent_radii[atomic_numbers[element]] for element in elements)
    best = contact
    low = 0.8 * contact
    high = 1.3 * contact
    for _ in range(4):  # each time 50 times finer: 1e-7 Å in the end
        edges = np.linspace(low, high, 101)
        energies = potential(Structures.from_ase([cell(a=a) for a in edges])).energies
        best = float(edges[int(energies.argmin())])
        low = best - (edges[1] - edges[0])
        high = best + (edges[1] - edges[0])
    return [cell(a=best)]


def _alloys(
    elements: Sequence[str], sizes: tuple[int, int], number: int, generator: Generator, _: Potential
) -> list[Atoms]:
    """Random alloys on a close-packed lattice."""
    drawn = _random_sizes(sizes, number, generator)
    return [fcc_alloys(elements, 1, generator, n_atoms=size).to_ase()[0] for size in drawn]


def _packings(
    elements: Sequence[str], sizes: tuple[int, int], number: int, generator: Generator, _: Potential
) -> list[Atoms]:
    """Random packings of random compositions at the mean of the elements' volumes."""
    images = []
    for size in _random_sizes(sizes, number, generator):
        which = torch.randint(len(elements), (size,), generator=generator)
        symbols = [elements[int(number)] for number in which]
        volume = summed_volume(symbols) / size
        found = pack(
            ["".join(symbols)], generator, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=PACKED_APART
        )
        images += found.to_ase()
    return images


def _random_sizes(sizes: tuple[int, int], number: int, generator: Generator) -> list[int]:
    return torch.randint(sizes[0], sizes[1] + 1, (number,), generator=generator).tolist()


def _elements_and_sizes(text: str, rest: str) -> tuple[tuple[str, ...], tuple[int, int]]:
    words, _, numbers = rest.partition(":")
    elements = tuple(words.split("-"))
    for element in elements:
        if element not in atomic_numbers or element == "X":
            raise SettingsError(f"structures = '{text}': '{element}' is not an element")
    low, _, high = numbers.partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
        raise SettingsError(f"structures = '{text}': write the numbers of atoms as 2-16, got '{numbers}'")
    return elements, (int(low), int(high or low))


def first_at_hand(text: str, at_hand: Callable[[str], bool]) -> str:
    """Of the alternatives `first | second` the first that can be had; the last one is taken on trust."""
    words = [word.strip() for word in text.split("|")]
    return next((word for word in words[:-1] if at_hand(word)), words[-1])


def potential_at_hand(word: str) -> bool:
    """Its file or its package is there."""
    if word.startswith("eam:"):
        return Path(word.removeprefix("eam:")).is_file()
    return word not in EXTRAS or is_installed(EXTRAS[word].package)


def source_at_hand(word: str) -> bool:
    """Its files are there; what is built here always is."""
    files = [part.strip() for part in word.split(" + ") if part.strip().startswith("file:")]
    return all(Path(part.removeprefix("file:").partition("@")[0]).is_file() for part in files)


def held_apart_sides(rule: str, pools: Sequence[Sequence[Atoms]]) -> tuple[list[Atoms], ...]:
    """(training, validation, held out), which share nothing that the rule names.

    One pool per side in (made with other seeds where random), the part that may stand there out.
    """
    name, _, value = rule.partition(":")
    if name in ("seed", "starts") and not value:
        return tuple(list(pool) for pool in pools)
    if name == "elements" and value:
        held = [element.strip() for element in value.split(",")]
        parts = [dataset.Dataset.of(pool).hold_out(held) for pool in pools]
        return tuple(list(part[number == 2].images) for number, part in enumerate(parts))
    share = _share(rule, value)
    fractions = (1 - 1.5 * share, 0.5 * share)  # validation takes half of what results take
    splits = [dataset.Dataset.of(pool, name).split(*fractions) for pool in pools]
    return tuple(list(split[number].images) for number, split in enumerate(splits))


def _share(rule: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 0.6:
        raise SettingsError(
            f"held_apart = '{rule}': write seed, starts, elements:Pd,Pt or a key with a share between 0 and "
            "0.6, for example composition:0.2"
        )
    return share


# ---- Where relaxations begin: anything with `sample(generator, n_structures) -> Structures`.


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
        names = list(self.shares)
        weights = np.array(list(self.shares.values()))
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
