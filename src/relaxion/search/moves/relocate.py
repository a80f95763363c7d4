"""A weakly bound atom leaves its place for another one, where it touches three others: hollows of a surface."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.geometry import find_mic

from relaxion.search.geometry import BONDED, Distances, placed

TRIES = 40
TEMPERATURE = 2.0  # neighbours; an atom with two neighbours less is chosen e times as often
ROOM = 0.85  # bonds; a place with an atom nearer than this is taken


def relocate(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None where no place with room is found, as inside a dense crystal."""
    if not len(free) or len(atoms) < 4:
        return None
    geometry = Distances.of(atoms)
    weights = np.exp(-geometry.coordination[free] / TEMPERATURE)
    mover = int(random.choice(free, p=weights / weights.sum()))
    bonded = geometry.distances < BONDED * geometry.bonds
    bonded[:, mover] = False
    anchors = np.delete(np.arange(len(atoms)), mover)
    for _ in range(TRIES):
        # `integers` takes a twentieth of the time of `choice`, and this loop is where draws spend theirs
        anchor = int(anchors[random.integers(len(anchors))])
        around = np.flatnonzero(bonded[anchor])
        if len(around) < 2:
            continue
        first = int(random.integers(len(around)))
        second = (first + 1 + int(random.integers(len(around) - 1))) % len(around)
        pair = around[[first, second]]
        place = _touching(geometry, mover, anchor, pair, random)
        if place is not None and _has_room(atoms, geometry, mover, anchor, place):
            positions = atoms.get_positions()
            positions[mover] = positions[anchor] + place
            return placed(atoms, positions)
    return None


def _touching(
    geometry: Distances, mover: int, anchor: int, pair: np.ndarray, random: np.random.Generator
) -> np.ndarray | None:
    """From the anchor to a point one bond away from it and from both of the pair, (3,) Å; None where there is none."""
    first = geometry.vectors[anchor, pair[0]]
    second = geometry.vectors[anchor, pair[1]]
    normal = np.cross(first, second)
    square = float(normal @ normal)
    if square < 1e-6:
        return None
    reach = geometry.bonds[mover, [anchor, *pair]] ** 2
    # p·first and p·second follow from the three distances; p = in-plane part ± height · normal
    along = np.array([reach[0] - reach[1] + first @ first, reach[0] - reach[2] + second @ second]) / 2
    gram = np.array([[first @ first, first @ second], [first @ second, second @ second]])
    share = np.linalg.solve(gram, along)
    in_plane = share[0] * first + share[1] * second
    height_square = float(reach[0] - in_plane @ in_plane)
    if height_square <= 0:
        return None
    sign = 1.0 if random.random() < 0.5 else -1.0
    return in_plane + sign * np.sqrt(height_square / square) * normal


def _has_room(atoms: Atoms, geometry: Distances, mover: int, anchor: int, place: np.ndarray) -> bool:
    """Whether no other atom is near, and the place is not the one that was left."""
    to_others = geometry.vectors[anchor] - place
    if atoms.pbc.any():
        to_others = find_mic(to_others, atoms.cell, atoms.pbc)[0]  # pyright: ignore[reportArgumentType]
    distances = np.linalg.norm(to_others, axis=1)
    return bool((distances > ROOM * geometry.bonds[mover]).all())
