"""Molecules and slabs, without downloads.

Molecules: ASE's G2 set, and larger ones joined from its members at hydrogen atoms. Slabs of metals, and those cut from
any crystal: with a fixed bottom or without, bare or with something on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from ase import Atom, Atoms
from ase.build import add_adsorbate, bcc100, bcc110, bcc111, fcc100, fcc110, fcc111, fcc211, hcp0001, molecule, surface
from ase.collections import g2
from ase.constraints import FixAtoms
from ase.data import atomic_numbers, covalent_radii
from ase.neighborlist import neighbor_list

from relaxion.errors import SettingsError, StructureError
from relaxion.train.data.alloys import MOST_BUILT, lattice_edges, lattices_of, mean_volume, random_symbols
from relaxion.train.data.dataset import CAP, JOINT, LABEL, NAME, Side, belongs, reasons_of
from relaxion.train.data.perturbations import RATTLE
from relaxion.train.data.prototypes import (
    COMMON_ELEMENTS,
    CRYSTAL,
    NOBLE,
    bond_length,
    is_metal,
    prototypes,
    random_crystal,
)

HEAVY = ("C", "N", "O", "S", "Si", "P")  # that take part in joints
CAPS = ("F", "Cl", "Br", "I")  # may take the place of a hydrogen atom
CARBENES = ("CH2_", "SiH2_")  # G2 has them in two spin states; nothing is joined to them
LARGEST_PART = 12  # atoms of a fragment
TOO_NEAR = 1.3  # of the sum of covalent radii, between atoms of different fragments that share no bond
TORSIONS = 24  # angles tried at a joint
JOININGS = 500


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
    for _ in range(JOININGS):
        if random.random() < joined_share:
            atoms = _joined(random, int(random.choice([2, 3, 4], p=[0.6, 0.3, 0.1])))
        else:
            members = list(g2_molecules().values())
            atoms = members[int(random.integers(len(members)))].copy()
        if atoms is None or not sizes[0] <= len(atoms) <= sizes[1]:
            continue
        if belongs(reasons_of(atoms), side):
            return atoms
    raise StructureError(
        f"no molecule of {sizes[0]} to {sizes[1]} atoms was found for {side} in {JOININGS} draws; allow more sizes"
    )


@lru_cache(maxsize=1)
def _fragments() -> tuple[Atoms, ...]:
    """Members of G2 that have a hydrogen atom to give, and electrons in pairs: joints of radicals would be odd ones."""
    small = [a for name, a in g2_molecules().items() if 3 <= len(a) <= LARGEST_PART and not name.startswith(CARBENES)]
    return tuple(atoms for atoms in small if hydrogens_of(atoms) and sum(atoms.numbers) % 2 == 0)


def hydrogens_of(atoms: Atoms) -> list[tuple[int, int]]:
    """Hydrogen atoms with the heavy atom that each is bound to."""
    symbols = atoms.get_chemical_symbols()
    distances = atoms.get_all_distances()
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
    joints = hydrogens_of(first)
    others = hydrogens_of(second)
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
    kept = np.delete(np.arange(len(first)), hydrogen)
    added = np.delete(np.arange(len(second)), other_hydrogen)
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


INDICES = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1))
GUESTS = ("H", "C", "N", "O", "S", "F", "Cl", "OH", "CO", "NO", "NH2", "H2O", "NH3", "CH3", "CH3OH")
LOWEST = {"OH": 0, "CO": 1, "NO": 0, "NH2": 0, "H2O": 0, "NH3": 0, "CH3": 0, "CH3OH": 1, "N2": 0, "O2": 0}
"""Molecules, and the atom of each that binds."""
THINNEST, NARROWEST = 3.5, 2.7  # Å
LIFT, MOST_LIFTS = 0.1, 60  # Å; an adsorbate is raised until nothing is nearer than its bond
METAL_SHARE = 0.35  # of the slabs: what surfaces are mostly calculated of
METAL_LATTICES = ("A_cF4_225_a", "A_cI2_229_a", "A_hP2_194_c")
FIXED_SHARE = 0.6  # of the slabs, those whose lower part is fixed
KEPT_SHARE = 0.5  # of the bonds, at the worst place
SLAB_TRIES = 2000
ADSORBATES = ("H", "C", "N", "O")  # that EMT knows
PURE_SLABS = 0.4  # of alloy slabs; surfaces that people look at are mostly of one metal


def random_surface(
    random: np.random.Generator,
    *,
    side: Side,
    sizes: tuple[int, int] = (4, 24),
    adsorbate_share: float = 0.4,
) -> Atoms:
    """A slab of a crystal that `random_crystal` draws; vacuum along the third axis, periodic there in half of them.

    Adsorbates are not looked up among what is held out: H, C, N, O and so on are trained in any case.
    """
    for _ in range(SLAB_TRIES):
        simple = random.random() < METAL_SHARE
        crystal = _metal(random, side) if simple else random_crystal(random, side=side, sizes=(1, 12))
        slab = None if crystal is None else _cut(crystal, random, sizes)
        if crystal is None or slab is None:
            continue
        slab.info = {name: crystal.info[name] for name in (LABEL, CRYSTAL)}
        if random.random() < FIXED_SHARE:
            heights = slab.positions[:, 2]
            low = heights < heights.min() + 0.4 * (heights.max() - heights.min())
            slab.set_constraint(FixAtoms(mask=low))
        if random.random() < adsorbate_share:
            slab = _with_adsorbate(slab, random)
        slab.pbc = [True, True, bool(random.integers(2))]
        return slab
    raise StructureError(
        f"no slab of {sizes[0]} to {sizes[1]} atoms was found for {side} in {SLAB_TRIES} draws; allow more sizes"
    )


def _metal(random: np.random.Generator, side: Side) -> Atoms | None:
    """A metal on a close-packed or body-centred lattice; None where this draw is of the other side."""
    lattice = str(random.choice(METAL_LATTICES))
    prototype = next(p for p in prototypes() if p.label == lattice)
    atoms = prototype.with_elements(
        {prototype.species[0]: str(random.choice([s for s in COMMON_ELEMENTS if is_metal(s)]))}
    )
    atoms.info[CRYSTAL] = atoms.copy()
    return atoms if belongs(reasons_of(atoms), side) else None


def _cut(crystal: Atoms, random: np.random.Generator, sizes: tuple[int, int]) -> Atoms | None:
    """One to four layers of a low-index face; None where it is too thin, too narrow or not of the sizes asked for."""
    indices = INDICES[int(random.integers(len(INDICES)))]
    slab = surface(crystal, indices, int(random.integers(1, 5)), vacuum=float(random.uniform(5.5, 8.0)))
    for axis in (0, 1):
        while slab.cell.lengths()[axis] < NARROWEST and len(slab) <= sizes[1]:
            slab = slab * [2 if k == axis else 1 for k in range(3)]
    if not sizes[0] <= len(slab) <= sizes[1] or np.ptp(slab.positions[:, 2]) < THINNEST:
        return None
    if (
        crystal.get_chemical_symbols()[0] in NOBLE
        or _coordination(slab).min() < KEPT_SHARE * _coordination(crystal).min()
    ):  # would fall to pieces or reconstruct
        return None
    return Atoms(slab.get_chemical_symbols(), slab.positions, cell=slab.cell, pbc=True)


def _coordination(atoms: Atoms) -> np.ndarray:
    """Neighbours of each atom within 1.2 natural lengths."""
    symbols = atoms.get_chemical_symbols()
    cutoffs = {(a, b): 1.2 * bond_length(a, b) for a in set(symbols) for b in set(symbols)}
    return np.bincount(neighbor_list("i", atoms, cutoffs), minlength=len(atoms))


def _with_adsorbate(slab: Atoms, random: np.random.Generator) -> Atoms:
    """Something above a random place between the topmost atom and a neighbour of it."""
    guest, binding = random_guest(random, GUESTS)
    top = slab.positions[int(np.argmax(slab.positions[:, 2]))]
    along = random.uniform(0, 0.5, 2)
    return put_on(slab, guest, binding, top + along @ slab.cell.array[:2])


def random_guest(random: np.random.Generator, names: Sequence[str]) -> tuple[Atoms, int]:
    """An atom or a molecule of these names, upright, and which atom of it is to bind; that one is at the origin."""
    name = str(random.choice(names))
    guest = molecule(name) if name in LOWEST else Atoms(name)
    binding = LOWEST.get(name, 0)
    guest.positions -= guest.positions[binding]
    upwards = guest.positions.mean(axis=0)
    if np.linalg.norm(upwards) > 0.1:  # the rest upwards; flat ones may lie
        guest.rotate(upwards, "z", center=(0, 0, 0))
    guest.rotate(float(random.uniform(0, 360)), "z", center=(0, 0, 0))
    return guest, binding


def put_on(slab: Atoms, guest: Atoms, binding: int, place: np.ndarray) -> Atoms:
    """Both, the guest above this place as low as its bonds allow."""
    guest.positions += place
    natural = np.array([[bond_length(a, b) for b in guest.get_chemical_symbols()] for a in slab.get_chemical_symbols()])
    natural[:, np.arange(len(guest)) != binding] *= 1.1
    for _ in range(MOST_LIFTS):
        distances = (slab + guest).get_all_distances(mic=True)[: len(slab), len(slab) :]
        if (distances > 0.95 * natural).all():
            break
        guest.positions[:, 2] += LIFT
    both = slab + guest
    both.info = slab.info
    both.set_constraint(slab.constraints)
    return both


# Close-packed faces of metals and alloys


def slab_with_adsorbate(random: np.random.Generator, metals: Sequence[str]) -> Atoms:
    """fcc(111) of one metal, 12 atoms, lowest layer fixed, one atom on top, all displaced by 0.08 Å."""
    atoms = fcc111(random.choice(metals), (2, 2, 3), vacuum=7)
    place = random.choice(["ontop", "bridge", "fcc"])
    add_adsorbate(atoms, random.choice(ADSORBATES), 1.2, place)
    lowest = np.flatnonzero(atoms.get_tags() == 3)
    atoms.positions += random.normal(0, 0.08, (len(atoms), 3))
    atoms.set_constraint(FixAtoms(lowest))
    return atoms


def alloy_slab(
    random: np.random.Generator, elements: Sequence[str], sizes: tuple[int, int], adsorbates: Sequence[str] = ()
) -> Atoms:
    """Two to four layers of a metal or an alloy, often with the lowest fixed, often with atoms on top."""
    build = fcc111 if random.random() < 0.6 else fcc100
    size = _slab_size(random, sizes)
    symbols = random_symbols(random, elements, math.prod(size))
    if random.random() < PURE_SLABS:
        symbols = symbols[:1] * len(symbols)
    atoms = build("Cu", size, a=float((4 * mean_volume(symbols)) ** (1 / 3)), vacuum=6.0)
    atoms.set_chemical_symbols(symbols)
    lowest = np.flatnonzero(atoms.get_tags() == size[2])
    if random.random() < (0.7 if adsorbates else 0.4):
        atoms += _on_top(atoms, size, elements, adsorbates, random)
    atoms.pbc = [True, True, False]
    if random.random() < 0.6:
        atoms.set_constraint(FixAtoms(lowest))
    return atoms


def _slab_size(random: np.random.Generator, sizes: tuple[int, int]) -> tuple[int, int, int]:
    """Atoms along both directions of the surface, and layers."""
    for _ in range(MOST_BUILT):
        size = (int(random.integers(1, 4)), int(random.integers(2, 4)), int(random.integers(2, 5)))
        if sizes[0] <= math.prod(size) <= sizes[1]:
            return size
    raise SettingsError(f"no slab of {sizes[0]} to {sizes[1]} atoms was found: they have 4 to 36; allow others")


def _on_top(
    atoms: Atoms,
    size: tuple[int, int, int],
    elements: Sequence[str],
    adsorbates: Sequence[str],
    random: np.random.Generator,
) -> Atoms:
    """Atoms above places of the slab, no two above the same: metals, or nearer to it adsorbates."""
    top = atoms[atoms.get_tags() == 1]
    places = random.permutation(len(top))[: max(1, min(int(random.integers(1, 4)), len(top) // 2))]
    edges = atoms.cell.array[0] / size[0], atoms.cell.array[1] / size[1]
    found = []
    for place in places:
        along, across = random.choice((0.0, 1 / 3, 0.5, 2 / 3), 2) if random.random() < 0.5 else random.uniform(0, 1, 2)
        if adsorbates and random.random() < 0.7:
            symbol = str(random.choice(adsorbates))
            height = random.uniform(0.9, 1.6)
        else:
            symbol = random_symbols(random, elements, 1)[0]
            height = random.uniform(1.7, 2.4)
        found.append(Atom(symbol, top.positions[place] + along * edges[0] + across * edges[1] + [0, 0, height]))
    return Atoms(found)


# ---- Slabs of metals with any low-index facet, flat or with a step, bare or with atoms and small molecules on top.

FACETS: dict[str, tuple[Callable[..., Atoms], ...]] = {
    "fcc": (fcc100, fcc110, fcc111),
    "bcc": (bcc100, bcc110, bcc111),
    "hcp": (hcp0001,),
}
SMALL = (*ADSORBATES, "OH", "CO", "NO", "N2", "O2")  # of elements that EMT knows
LIGHT_SHARE = 0.7  # of what sits on slabs, where light elements may; the rest are metal atoms
MOLECULE_RATTLE = 0.3  # short bonds do not bear what metals do
LAYERS, ALONG = (2, 7), (1, 5)  # fewest, and one above the most


def faceted_slab(
    random: np.random.Generator, elements: Sequence[str], sizes: tuple[int, int], *, light: bool, stepped: bool
) -> Atoms:
    """A metal or an alloy, the lower part often fixed, often with up to three atoms or molecules on top."""
    atoms = _bare(random, elements, sizes, stepped)
    heights = atoms.positions[:, 2]
    fixed = heights < heights.min() + 0.4 * np.ptp(heights)
    sites = np.flatnonzero(heights > heights.max() - LIFT)
    atoms.pbc = [True, True, False]
    if random.random() < 0.6:
        atoms.set_constraint(FixAtoms(mask=fixed))
    if random.random() < 0.8:
        most = max(1, min(3, len(sites) // 2))
        for site in random.permutation(sites)[: int(random.integers(1, most + 1))]:
            guest, binding = random_guest(random, SMALL if light and random.random() < LIGHT_SHARE else elements)
            aside = np.append(random.uniform(-1.5, 1.5, 2), 0.0)  # Å, to any site about this atom
            atoms = put_on(atoms, guest, binding, atoms.positions[site] + aside)
            if len(guest) > 1:
                atoms.info[RATTLE] = MOLECULE_RATTLE
    return atoms


def _bare(random: np.random.Generator, elements: Sequence[str], sizes: tuple[int, int], stepped: bool) -> Atoms:
    """Thick and wide enough, as many atoms as asked for."""
    pure = random.random() < PURE_SLABS
    for _ in range(MOST_BUILT):
        lattice = str(random.choice(lattices_of(elements)))
        size = (*random.integers(*ALONG, 2).tolist(), int(random.integers(*LAYERS)))
        build = FACETS[lattice][int(random.integers(len(FACETS[lattice])))]
        if stepped and lattice == "fcc" and random.random() < 0.3:
            build = fcc211
            size = (3 * size[0], *size[1:])
        if not sizes[0] <= math.prod(size) <= 2 * sizes[1] or (stepped and size[0] < 2):
            continue
        symbols = random_symbols(random, elements, math.prod(size))
        symbols = symbols[:1] * len(symbols) if pure else symbols
        atoms = build("Cu", size, **lattice_edges(lattice, mean_volume(symbols)), vacuum=6.0)
        atoms.set_chemical_symbols(symbols)
        if stepped and build is not fcc211:
            # without some neighbouring rows of the top layer: a terrace, a step down and a step up
            taken = int(random.integers(1, size[0]))
            row = np.round(atoms.get_scaled_positions()[:, 0] * size[0])
            atoms = atoms[(atoms.get_tags() != 1) | (row % size[0] >= taken)]
        width = atoms.cell.lengths()[:2].min()
        thickness = np.ptp(atoms.positions[:, 2])
        if sizes[0] <= len(atoms) <= sizes[1] and width >= NARROWEST and thickness > THINNEST:
            return atoms
    raise SettingsError(f"no slab of {sizes[0]} to {sizes[1]} atoms was found; allow more sizes")
