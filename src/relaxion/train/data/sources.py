"""Where structures come from, as recipes write it: a file, a crystal built here, random alloys, random packings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

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
from relaxion.train.data.alloys import fcc_alloys, summed_volume
from relaxion.train.data.packings import pack

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
    best, low, high = contact, 0.8 * contact, 1.3 * contact
    for _ in range(4):  # each time 50 times finer: 1e-7 Å in the end
        edges = np.linspace(low, high, 101)
        energies = potential(Structures.from_ase([cell(a=a) for a in edges])).energies
        best = float(edges[int(energies.argmin())])
        low, high = best - (edges[1] - edges[0]), best + (edges[1] - edges[0])
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
