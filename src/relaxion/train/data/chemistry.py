"""Elements as chemists see them: electronegativity, oxidation states, lengths of bonds, who can stand in for whom."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ase.data import atomic_numbers, chemical_symbols, covalent_radii

from relaxion.errors import MissingExtraError

NO_DATA = {"Po", "At", "Rn", "Fr", "Ra"}  # between hydrogen and plutonium, unknown to the usual potentials
COMMON_ELEMENTS = tuple(symbol for symbol in chemical_symbols[1:95] if symbol not in NO_DATA)
"""The 89 that potentials trained on the Materials Project know."""
NOBLE = ("He", "Ne", "Ar", "Kr", "Xe")
NOBLE_DISTANCES = {"He": 2.9, "Ne": 3.1, "Ar": 3.75, "Kr": 4.0, "Xe": 4.35}  # Å, in their crystals
ANION_RADII = {  # Å; Shannon, for coordination six where known
    "H": 1.25, "C": 1.35, "N": 1.32, "O": 1.26, "F": 1.19, "Si": 1.75, "P": 1.75, "S": 1.70, "Cl": 1.67, "Ge": 1.8,
    "As": 1.85, "Se": 1.84, "Br": 1.82, "Sn": 1.95, "Sb": 2.0, "Te": 2.07, "I": 2.06, "Bi": 2.05,
}  # fmt: skip
IONIC = 1.2  # difference of electronegativities from which a bond is as long as ions are


@lru_cache(maxsize=128)
def _element(symbol: str) -> Any:
    try:
        from pymatgen.core import Element
    except ImportError as error:
        raise MissingExtraError(
            "radii and oxidation states come from pymatgen; try: pip install 'relaxion[pymatgen]'"
        ) from error
    return Element(symbol)


@lru_cache(maxsize=128)
def electronegativity(symbol: str) -> float:
    """Pauling's; noble gases without one count as inert (2.5: no order with anything)."""
    if symbol in NOBLE:
        return 2.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(_element(symbol).X)


@lru_cache(maxsize=128)
def common_states(symbol: str) -> tuple[int, ...]:
    """Usual oxidation states; a few more for metals that often take others than the tables' most common ones."""
    more = {"Ti": (3,), "V": (3, 4), "Mn": (3,), "Cu": (1,), "Cr": (2, 4), "Nb": (3, 4), "Mo": (3,), "U": (4,)}
    return tuple(_element(symbol).common_oxidation_states) + more.get(symbol, ())


def is_noble(symbol: str) -> bool:
    return symbol in NOBLE


@lru_cache(maxsize=128)
def group(symbol: str) -> int:
    return int(_element(symbol).group)


@lru_cache(maxsize=128)
def is_metal(symbol: str) -> bool:
    return bool(_element(symbol).is_metal)


@lru_cache(maxsize=16384)
def bond_length(first: str, second: str) -> float:
    """Natural distance of two neighbours in a crystal, Å: ions, metals or covalent atoms."""
    if is_noble(first) or is_noble(second):
        own = [NOBLE_DISTANCES.get(s, 2 * _covalent(s)) for s in (first, second)]
        return sum(own) / 2
    low, high = sorted((first, second), key=electronegativity)
    if electronegativity(high) - electronegativity(low) > IONIC and high in ANION_RADII:
        cation = float(_element(low).average_cationic_radius or 0.0)
        return ANION_RADII[high] + (cation if cation > 0.2 else 0.7 * _covalent(low))
    return (
        _neutral(first) + _neutral(second) if is_metal(first) and is_metal(second) else _covalent(low) + _covalent(high)
    )


@lru_cache(maxsize=128)
def _neutral(symbol: str) -> float:
    """The metallic radius, where there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(_element(symbol).metallic_radius or _covalent(symbol))


def same_column(first: str, second: str) -> bool:
    return is_noble(first) == is_noble(second) and "H" not in (first, second) and group(first) == group(second)


def packing_fraction(symbols: Iterable[str], volume_angstrom3: float) -> float:
    """Share of the volume inside spheres of the covalent radii: 0.8 in copper, 0.5 in table salt, 0.2 in graphite."""
    return sum(4 / 3 * math.pi * _covalent(symbol) ** 3 for symbol in symbols) / volume_angstrom3


def _covalent(symbol: str) -> float:
    return float(covalent_radii[atomic_numbers[symbol]])


@lru_cache(maxsize=16384)
def similar(old: str, new: str) -> bool:
    """Whether `new` may stand where `old` stood: same column, or metals or non-metals of like size and character."""
    if is_noble(old) or is_noble(new):
        return is_noble(old) and is_noble(new)
    if "H" in (old, new):
        return {old, new} <= {"H", "F", "Cl"}
    if same_column(old, new):
        return True
    if is_metal(old) != is_metal(new):
        return False
    ratio = _covalent(new) / _covalent(old)
    apart = abs(electronegativity(new) - electronegativity(old))
    if is_metal(old):
        return apart <= 0.45 and 0.8 <= ratio <= 1.25
    return apart <= 0.6 and 0.75 <= ratio <= 1.35
