"""Slabs of metals with any low-index facet, flat or with a step, bare or with atoms and small molecules on top."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from ase import Atoms
from ase.build import bcc100, bcc110, bcc111, fcc100, fcc110, fcc111, fcc211, hcp0001
from ase.constraints import FixAtoms

from relaxion.errors import SettingsError
from relaxion.train.data.alloys import MOST_BUILT, lattice_edges, lattices_of, mean_volume, random_symbols
from relaxion.train.data.perturbations import RATTLE
from relaxion.train.data.slabs import ADSORBATES, LIFT, NARROWEST, PURE_SLABS, THINNEST, put_on, random_guest

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
            build, size = fcc211, (3 * size[0], *size[1:])
        if not sizes[0] <= math.prod(size) <= 2 * sizes[1] or (stepped and size[0] < 2):
            continue
        symbols = random_symbols(random, elements, math.prod(size))
        symbols = symbols[:1] * len(symbols) if pure else symbols
        atoms = build("Cu", size, **lattice_edges(lattice, mean_volume(symbols)), vacuum=6.0)
        atoms.set_chemical_symbols(symbols)
        if stepped and build is not fcc211:
            atoms = _with_step(atoms, size[0], random)
        width, thickness = atoms.cell.lengths()[:2].min(), np.ptp(atoms.positions[:, 2])
        if sizes[0] <= len(atoms) <= sizes[1] and width >= NARROWEST and thickness > THINNEST:
            return atoms
    raise SettingsError(f"no slab of {sizes[0]} to {sizes[1]} atoms was found; allow more sizes")


def _with_step(atoms: Atoms, rows: int, random: np.random.Generator) -> Atoms:
    """Without some neighbouring rows of the top layer: a terrace, a step down and a step up."""
    taken = int(random.integers(1, rows))
    row = np.round(atoms.get_scaled_positions()[:, 0] * rows)
    return atoms[(atoms.get_tags() != 1) | (row % rows >= taken)]
