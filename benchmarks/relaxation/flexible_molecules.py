"""Flexible molecules built by rule: chains, peptides and sugars with random torsions, at ideal lengths and angles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.geometry import get_distances

from relaxion.errors import StructureError
from relaxion.train.data.slabs import g2_molecules, hydrogens_of

LINKS = ("CH4", "CH4", "C2H6", "CH3OCH3", "CH3SCH3", "H3CNH2", "CH3CONH2", "C2H4", "C6H6", "CH3COOH")
ENDS = ("CH4", "H2O", "NH3", "CH3CN", "C2H2", "CH3Cl")
ROOM = 1.5  # sums of covalent radii between atoms that are three or more bonds apart
TRIES = 300
TWO_RINGS = 0.4  # of the sugars
TURNS = 40  # torsions tried at a joint

Random = np.random.Generator


def flexible_molecule(random: Random, index: int, sizes: tuple[int, int] = (20, 60)) -> Atoms:
    """A chain, a peptide and a sugar in turn, of so many atoms."""
    build: Callable[[Random], Atoms | None] = (_chain, _peptide, _sugar)[index % 3]
    for _ in range(TRIES):
        found = build(random)
        if found is not None and sizes[0] <= len(found) <= sizes[1]:
            return found
    raise StructureError(f"no flexible molecule of {sizes[0]} to {sizes[1]} atoms in {TRIES} draws; allow more sizes")


def _chain(random: Random) -> Atoms | None:
    """Four to ten small molecules joined one after the other, some with a branch."""
    whole: Atoms | None = _part(str(random.choice(LINKS)))
    newest = np.arange(len(whole))
    for _ in range(int(random.integers(3, 10))):
        grown = _joined(whole, newest, _part(str(random.choice(LINKS))), random)
        if grown is None:
            return None
        whole, newest = grown
        if random.random() < 0.25 and (branched := _joined(whole, newest, _part(str(random.choice(ENDS))), random)):
            whole, newest = branched[0], newest[newest < len(branched[0])]
    return whole


def _peptide(random: Random) -> Atoms | None:
    """Two to five residues of glycine, alanine or serine: acetamides joined from nitrogen to carbon."""
    whole = _part("CH3CONH2")
    newest = np.arange(len(whole))
    for _ in range(int(random.integers(1, 5))):
        grown = _joined(whole, newest, _part("CH3CONH2"), random, at=("N", "C"))
        if grown is None:
            return None
        whole, newest = grown
    for _ in range(int(random.integers(0, 4))):  # side chains
        side = _joined(whole, np.arange(len(whole)), _part(str(random.choice(["CH4", "CH3OH"]))), random, ("C", "C"))
        whole = whole if side is None else side[0]
    return whole


def _sugar(random: Random) -> Atoms | None:
    """A six-membered ring with an oxygen, four hydroxyl groups and a hydroxymethyl group around it; or two of them."""
    whole = _pyranose(random)
    if whole is None or random.random() > TWO_RINGS:
        return whole
    second = _pyranose(random)
    both = None if second is None else _joined(whole, np.arange(len(whole)), second, random, at=("O", "C"))
    return None if both is None else both[0]


def _pyranose(random: Random) -> Atoms | None:
    whole = _ring()
    ring = [k for k, symbol in enumerate(whole.get_chemical_symbols()) if symbol == "C"]
    for name, atom in zip(("CH3OH", "H2O", "H2O", "H2O", "H2O"), random.permutation(5), strict=True):
        carbon = whole.positions[ring[int(atom)]]
        nearby = np.flatnonzero(np.linalg.norm(whole.positions - carbon, axis=1) < 1.2)  # it and its hydrogen atoms
        partner = "C" if name == "CH3OH" else "O"
        grown = _joined(whole, nearby, _part(name), random, at=("C", partner))
        if grown is None:
            return None
        whole = grown[0]
        ring = [int(np.linalg.norm(whole.positions - place, axis=1).argmin()) for place in _ring_places()[1:]]
    return whole


def _ring_places() -> np.ndarray:
    angles = np.arange(6) * np.pi / 3
    return np.column_stack([1.44 * np.cos(angles), 1.44 * np.sin(angles), 0.24 * (-1.0) ** np.arange(6)])


def _ring() -> Atoms:
    """Tetrahydropyran as an ideal chair: oxygen first, then the carbon atoms, two hydrogen atoms at each."""
    places = _ring_places()
    hydrogens = []
    for k in range(1, 6):
        before, after = (places[(k + n) % 6] - places[k] for n in (-1, 1))
        outwards, across = -(before + after), np.cross(before, after)
        outwards, across = outwards / np.linalg.norm(outwards), across / np.linalg.norm(across)
        hydrogens += [places[k] + 1.09 * (0.58 * outwards + sign * 0.815 * across) for sign in (1, -1)]
    return Atoms("OC5H10", np.concatenate([places, hydrogens]))


def _part(name: str) -> Atoms:
    atoms = g2_molecules()[name]
    return Atoms(atoms.get_chemical_symbols(), atoms.positions)


def _joined(
    first: Atoms, where: np.ndarray, second: Atoms, random: Random, at: Sequence[str] = ()
) -> tuple[Atoms, np.ndarray] | None:
    """Both without a hydrogen atom, heavy atoms bound instead, turned at random; and the numbers of the new atoms.

    `where`: atoms of the first that may be bound; `at`: elements of the two that are. None where there is no room.
    """
    joints = [pair for pair in hydrogens_of(first) if pair[1] in where and _fits(first, pair[1], at[:1])]
    others = [pair for pair in hydrogens_of(second) if _fits(second, pair[1], at[1:])]
    if not joints or not others:
        return None
    hydrogen, heavy = joints[int(random.integers(len(joints)))]
    other_hydrogen, other_heavy = others[int(random.integers(len(others)))]
    outwards = first.positions[hydrogen] - first.positions[heavy]
    outwards /= np.linalg.norm(outwards)
    moved = second.copy()
    moved.positions -= moved.positions[other_heavy]
    moved.rotate(moved.positions[other_hydrogen], -outwards)
    length = covalent_radii[first.numbers[heavy]] + covalent_radii[second.numbers[other_heavy]]
    moved.positions += first.positions[heavy] + length * outwards
    kept, added = np.delete(np.arange(len(first)), hydrogen), np.delete(np.arange(len(second)), other_hydrogen)
    for _ in range(TURNS):
        moved.rotate(float(random.uniform(0, 360)), outwards, center=moved.positions[other_heavy])
        if _has_room(first, moved, kept[kept != heavy], added[added != other_heavy], heavy, other_heavy):
            return first[kept] + moved[added], np.arange(len(kept), len(kept) + len(added))
    return None


def _fits(atoms: Atoms, atom: int, elements: Sequence[str]) -> bool:
    return not elements or atoms.symbols[atom] == elements[0]


def _has_room(first: Atoms, second: Atoms, kept: np.ndarray, added: np.ndarray, heavy: int, other_heavy: int) -> bool:
    """Whether nothing of one touches the other but across the new bond."""
    radii, other_radii = covalent_radii[first.numbers], covalent_radii[second.numbers]
    for rows, columns in ((kept, added), (kept, [other_heavy]), ([heavy], added)):
        if len(rows) == 0 or len(columns) == 0:
            continue
        natural = radii[rows][:, None] + other_radii[columns]
        distances = get_distances(first.positions[rows], second.positions[columns])[1]
        # neighbours of the new bond are two or three bonds apart: they are near in any molecule
        room = ROOM if len(rows) > 1 and len(columns) > 1 else 1.2
        if (distances < room * natural).any():
            return False
    return True
