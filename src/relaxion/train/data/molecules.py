"""Molecules without downloads: ASE's G2 set, and larger ones joined from its members at hydrogen atoms."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from ase import Atoms
from ase.collections import g2
from ase.data import atomic_numbers, covalent_radii

from relaxion.errors import StructureError
from relaxion.train.data.dataset import CAP, JOINT, NAME, Side, belongs, reasons_of

HEAVY = ("C", "N", "O", "S", "Si", "P")  # that take part in joints
CAPS = ("F", "Cl", "Br", "I")  # may take the place of a hydrogen atom
CARBENES = ("CH2_", "SiH2_")  # G2 has them in two spin states; nothing is joined to them
LARGEST_PART = 12  # atoms of a fragment
TOO_NEAR = 1.3  # of the sum of covalent radii, between atoms of different fragments that share no bond
TORSIONS = 24  # angles tried at a joint
TRIES = 500


@lru_cache(maxsize=1)
def g2_molecules() -> dict[str, Atoms]:
    """All of G2 with two atoms or more, by name."""
    found = {}
    for name in g2.names:
        atoms = g2[name]
        if len(atoms) > 1:
            found[name] = Atoms(atoms.get_chemical_symbols(), atoms.positions, info={NAME: name})
    return found


def random_molecule(
    random: np.random.Generator,
    *,
    side: Side,
    sizes: tuple[int, int] = (2, 24),
    joined_share: float = 0.7,
) -> Atoms:
    """A member of G2, or two to four of them joined; a joined one may have halogens in place of some hydrogen."""
    for _ in range(TRIES):
        joined = random.random() < joined_share
        atoms = _joined(random, int(random.choice([2, 3, 4], p=[0.6, 0.3, 0.1]))) if joined else _member(random)
        if atoms is None or not sizes[0] <= len(atoms) <= sizes[1]:
            continue
        if belongs(reasons_of(atoms), side):
            return atoms
    raise StructureError(
        f"no molecule of {sizes[0]} to {sizes[1]} atoms was found for {side} in {TRIES} draws; allow more sizes"
    )


def _member(random: np.random.Generator) -> Atoms:
    members = list(g2_molecules().values())
    return members[int(random.integers(len(members)))].copy()


@lru_cache(maxsize=1)
def _fragments() -> tuple[Atoms, ...]:
    """Members of G2 that have a hydrogen atom to give, and electrons in pairs: joints of radicals would be odd ones."""
    small = [a for name, a in g2_molecules().items() if 3 <= len(a) <= LARGEST_PART and not name.startswith(CARBENES)]
    return tuple(atoms for atoms in small if hydrogens_of(atoms) and sum(atoms.numbers) % 2 == 0)


def hydrogens_of(atoms: Atoms) -> list[tuple[int, int]]:
    """Hydrogen atoms with the heavy atom that each is bound to."""
    symbols, distances = atoms.get_chemical_symbols(), atoms.get_all_distances()
    found = []
    for hydrogen in (k for k, symbol in enumerate(symbols) if symbol == "H"):
        distances[hydrogen, hydrogen] = np.inf
        nearest = int(np.argmin(distances[hydrogen]))
        if symbols[nearest] in HEAVY:
            found.append((hydrogen, nearest))
    return found


def _joined(random: np.random.Generator, n_parts: int) -> Atoms | None:
    """None where fragments get in each other's way."""
    fragments = _fragments()
    whole = fragments[int(random.integers(len(fragments)))].copy()
    names = [whole.info[NAME]]
    for _ in range(n_parts - 1):
        part = fragments[int(random.integers(len(fragments)))]
        names.append(part.info[NAME])
        grown = _bound(whole, part, random)
        if grown is None:
            return None
        whole = grown
    caps = _capped(whole, random)
    whole.info = {NAME: JOINT.join(sorted(names)) + "".join(f"{CAP}{symbol}" for symbol in caps)}
    return whole


def _bound(first: Atoms, second: Atoms, random: np.random.Generator) -> Atoms | None:
    """Both without a hydrogen atom, their heavy atoms bound instead, turned about the new bond to the most room."""
    joints, others = hydrogens_of(first), hydrogens_of(second)
    if not joints or not others:
        return None
    hydrogen, heavy = joints[int(random.integers(len(joints)))]
    other_hydrogen, other_heavy = others[int(random.integers(len(others)))]
    outwards = first.positions[hydrogen] - first.positions[heavy]
    outwards /= np.linalg.norm(outwards)
    length = sum(covalent_radii[atoms.numbers[k]] for atoms, k in ((first, heavy), (second, other_heavy)))
    moved = second.copy()
    moved.positions -= moved.positions[other_heavy]
    moved.rotate(moved.positions[other_hydrogen], -outwards)
    moved.rotate(float(random.uniform(0, 360)), outwards, center=(0, 0, 0))
    moved.positions += first.positions[heavy] + length * outwards
    kept, added = np.delete(np.arange(len(first)), hydrogen), np.delete(np.arange(len(second)), other_hydrogen)
    natural = covalent_radii[first.numbers[kept]][:, None] + covalent_radii[moved.numbers[added]]
    rooms = []
    for _ in range(TORSIONS):
        moved.rotate(360 / TORSIONS, outwards, center=first.positions[heavy])
        distances = np.linalg.norm(first.positions[kept][:, None] - moved.positions[added], axis=2)
        reduced = distances / natural
        reduced[np.ix_(kept == heavy, added == other_heavy)] = np.inf
        rooms.append((float((reduced**-6).sum()), float(reduced.min()), moved.positions.copy()))
    _, nearest, moved.positions = min(rooms, key=lambda room: float(f"{room[0]:.6e}"))  # the first of equals
    if nearest < TOO_NEAR:
        return None
    return Atoms(
        np.concatenate([first.numbers[kept], moved.numbers[added]]),
        np.concatenate([first.positions[kept], moved.positions[added]]),
    )


def _capped(atoms: Atoms, random: np.random.Generator) -> list[str]:
    """Put halogens in the place of some hydrogen, in a third of the molecules; and their symbols."""
    if random.random() > 1 / 3:
        return []
    joints = hydrogens_of(atoms)
    places = random.permutation(len(joints))[: int(random.integers(1, 3))]
    caps = []
    for hydrogen, heavy in (joints[int(place)] for place in places):
        symbol = str(random.choice(CAPS))
        bond = atoms.positions[hydrogen] - atoms.positions[heavy]
        length = covalent_radii[atomic_numbers[symbol]] + covalent_radii[atoms.numbers[heavy]]
        atoms.positions[hydrogen] = atoms.positions[heavy] + bond * length / np.linalg.norm(bond)
        atoms.numbers[hydrogen] = atomic_numbers[symbol]
        caps.append(symbol)
    return sorted(caps)
