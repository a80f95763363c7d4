"""Where relaxations begin: anything with `sample(generator, n_structures) -> Structures`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from ase.build import bulk
from ase.data import atomic_numbers, chemical_symbols, reference_states
from torch import Generator

from relaxion.errors import SettingsError
from relaxion.generators.packings import pack
from relaxion.generators.perturbations import Perturbation, compose
from relaxion.structures import Structures


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
class PackedStarts:
    """Random packings of the formulas, drawn with equal chance."""

    formulas: Sequence[str]
    volume_per_atom_angstrom3: float
    minimum_distance_angstrom: float = 1.0
    cell_free: bool = False

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        which = torch.randint(len(self.formulas), (n_structures,), generator=generator)
        return pack(
            [self.formulas[int(number)] for number in which],
            generator,
            volume_per_atom_angstrom3=self.volume_per_atom_angstrom3,
            minimum_distance_angstrom=self.minimum_distance_angstrom,
            cell_free=self.cell_free,
        )


@dataclass(frozen=True)
class MixedStarts:
    """Several kinds of starts, each with its share."""

    parts: Sequence[Starts]
    shares: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.shares) or not self.parts or min(self.shares) <= 0:
            raise SettingsError(
                f"{len(self.parts)} kinds of starts need as many shares above 0, got {list(self.shares)}"
            )

    @cached_property
    def _weights(self) -> torch.Tensor:
        return torch.tensor(self.shares, dtype=torch.float64)

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        kinds = torch.multinomial(self._weights, n_structures, replacement=True, generator=generator)
        wanted = torch.bincount(kinds, minlength=len(self.parts)).tolist()
        drawn = [part.sample(generator, n) for part, n in zip(self.parts, wanted, strict=True) if n]
        # drawn kind by kind: the k-th place takes the next one of kind kinds[k]
        places = torch.argsort(torch.argsort(kinds, stable=True))
        return Structures.concatenate(drawn).select(places)


def fcc_alloys(
    elements: Sequence[str],
    n_structures: int,
    generator: Generator,
    *,
    n_atoms: int = 8,
    cell_free: bool = False,
) -> Structures:
    """Random alloys on a close-packed lattice with the mean of the elements' atomic volumes."""
    images = []
    for _ in range(n_structures):
        which = torch.randint(len(elements), (n_atoms,), generator=generator)
        numbers = [atomic_numbers[str(elements[int(number)])] for number in which]
        volume = sum(atomic_volume(number) for number in numbers) / n_atoms
        atoms = bulk("X", "fcc", a=(4 * volume) ** (1 / 3)).repeat(_compact_box(n_atoms))
        atoms.numbers = numbers
        images.append(atoms)
    return Structures.from_ase(images, cell_free=cell_free)


def atomic_volume(number: int) -> float:
    """Å³ per atom of the pure metal."""
    reference = reference_states[number] or {}
    a = reference.get("a", 0.0)
    match reference.get("symmetry"):
        case "fcc":
            return a**3 / 4
        case "bcc":
            return a**3 / 2
        case "hcp":
            return 3**0.5 / 4 * a**3 * reference["c/a"]
    raise SettingsError(f"{chemical_symbols[number]} is no simple metal (fcc, bcc, hcp): no alloy lattice known")


def _compact_box(count: int) -> tuple[int, int, int]:
    """Three whole numbers with this product, as equal as can be."""
    first = max(n for n in range(1, round(count ** (1 / 3)) + 1) if count % n == 0)
    rest = count // first
    second = max(n for n in range(1, int(rest**0.5) + 1) if rest % n == 0)
    return first, second, rest // second
