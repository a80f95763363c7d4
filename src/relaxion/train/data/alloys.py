"""Random alloys on the lattices of metals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.data import atomic_numbers, chemical_symbols, reference_states
from torch import Generator

from relaxion.errors import SettingsError
from relaxion.structures import Structures

EMT_METALS = ("Al", "Cu", "Ag", "Au", "Ni", "Pd", "Pt")
EAM_METALS = ("Cu", "Ag", "Au", "Ni", "Pd", "Pt", "Al", "Pb", "Fe", "Mo", "Ta", "W", "Mg", "Co", "Ti", "Zr")
BODY_CENTRED = ("Fe", "Mo", "Ta", "W")
HEXAGONAL = ("Mg", "Co", "Ti", "Zr")
LATTICE_CONSTANTS = {"Al": 4.05, "Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92}  # Å
MOST_BUILT = 1000  # tries to make a structure of the sizes asked for


def random_symbols(random: np.random.Generator, elements: Sequence[str], number: int) -> list[str]:
    """Of an alloy of one to four of the elements."""
    few = random.choice(elements, min(len(elements), int(random.integers(1, 5))), replace=False)
    return [str(symbol) for symbol in random.choice(few, number)]


def by_volume(atoms: Atoms) -> float:
    """The factor that brings a lattice to the mean of its elements' volumes."""
    return (mean_volume(atoms.get_chemical_symbols()) * len(atoms) / atoms.get_volume()) ** (1 / 3)


def by_lattice_constant(atoms: Atoms) -> float:
    """The factor from copper's lattice to the mean of the elements' lattice constants."""
    constants = [LATTICE_CONSTANTS[symbol] for symbol in atoms.get_chemical_symbols()]
    return float(np.mean(constants) / LATTICE_CONSTANTS["Cu"])


def random_alloy(
    random: np.random.Generator,
    elements: Sequence[str],
    sizes: tuple[int, int],
    *,
    centred_share: float = 0.0,
    edge_angstrom: float = 1.0,
    scale: Callable[[Atoms], float] = by_volume,
) -> Atoms:
    """A close-packed or, in this share, body-centred lattice of 1–4 elements, built with this edge, then scaled."""
    for _ in range(MOST_BUILT):
        repeats, cubic = random.integers(1, 5, 3), bool(random.integers(2))
        lattice = "bcc" if centred_share and random.random() < centred_share else "fcc"
        atoms = bulk("Cu", lattice, a=edge_angstrom, cubic=cubic) * repeats
        if sizes[0] <= len(atoms) <= sizes[1]:
            break
    else:
        raise SettingsError(f"no crystal of {sizes[0]} to {sizes[1]} atoms was found; allow more sizes")
    atoms.set_chemical_symbols(random_symbols(random, elements, len(atoms)))
    atoms.set_cell(atoms.cell * scale(atoms), scale_atoms=True)
    return atoms


def lattices_of(elements: Sequence[str]) -> tuple[str, ...]:
    """That metals among these crystallise in; the close-packed cubic one is always among them."""
    others = {"bcc": BODY_CENTRED, "hcp": HEXAGONAL}
    return ("fcc", *(lattice for lattice, own in others.items() if set(own) & set(elements)))


def lattice_edges(lattice: str, volume: float) -> dict[str, Any]:
    """What ASE's builders ask for (Å), for this volume per atom (Å³); hcp with the ratio of spheres."""
    if lattice == "hcp":
        a = (2**0.5 * volume) ** (1 / 3)
        return {"a": a, "c": a * (8 / 3) ** 0.5}
    return {"a": ({"fcc": 4, "bcc": 2}[lattice] * volume) ** (1 / 3)}


def fcc_alloys(
    elements: Sequence[str],
    n_structures: int,
    generator: Generator,
    *,
    n_atoms: int = 8,
    cell_free: bool = False,
) -> Structures:
    """Alloys of a given size, as compact as can be: each atom any of the elements, by a generator of torch's."""
    images = []
    for _ in range(n_structures):
        which = torch.randint(len(elements), (n_atoms,), generator=generator)
        symbols = [str(elements[int(number)]) for number in which]
        edge = (4 * (summed_volume(symbols) / n_atoms)) ** (1 / 3)
        atoms = bulk("X", "fcc", a=edge).repeat(_compact_box(n_atoms))
        atoms.set_chemical_symbols(symbols)
        images.append(atoms)
    return Structures.from_ase(images, cell_free=cell_free)


def mean_volume(symbols: Sequence[str]) -> float:
    """Å³ per atom."""
    return float(np.mean([atomic_volume(atomic_numbers[symbol]) for symbol in symbols]))


def summed_volume(symbols: Sequence[str]) -> float:
    """Å³ of all; added one by one, which for many atoms differs from NumPy's mean in the last digit."""
    return sum(atomic_volume(atomic_numbers[symbol]) for symbol in symbols)


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
    raise SettingsError(f"{chemical_symbols[number]} is not a simple metal (fcc, bcc, hcp)")


def _compact_box(count: int) -> tuple[int, int, int]:
    """Three whole numbers with this product, as equal as can be."""
    first = max(n for n in range(1, round(count ** (1 / 3)) + 1) if count % n == 0)
    rest = count // first
    second = max(n for n in range(1, int(rest**0.5) + 1) if rest % n == 0)
    return first, second, rest // second
