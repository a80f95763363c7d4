"""The corrector: a step that would bring two atoms too near is shortened just enough. One for training and for use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ase.data import covalent_radii
from torch import Tensor

from relaxion.errors import StructureError
from relaxion.structures import Move, Structures
from relaxion.structures.state import Pairs
from relaxion.structures.structures import per_structure_max

# A longer step is first cut to this length: no runaway atom may ask for a search over the whole crystal.
LONGEST_STEP_ANGSTROM = 4.0
LARGEST_STRAIN = 0.5  # so that no step can turn a cell inside out


@dataclass(frozen=True)
class Nearest:
    """How near two atoms may come: an absolute distance, or a share of the sum of their covalent radii; the larger."""

    distance_angstrom: float = 0.0
    share_of_radii: float = 0.0

    def limits(self, sums_of_radii: Tensor) -> Tensor:
        """Å, for pairs with these sums of covalent radii."""
        return (self.share_of_radii * sums_of_radii).clamp_min(self.distance_angstrom)

    def between(self, first: Tensor, second: Tensor, dtype: torch.dtype) -> float | Tensor:
        """Å, for pairs of atoms with these atomic numbers; one number where it is the same for all."""
        if not self.share_of_radii:
            return self.distance_angstrom
        radii = torch.from_numpy(covalent_radii).to(dtype)
        return self.limits(radii[first] + radii[second])


@dataclass(frozen=True, eq=False)
class Correction:
    """What may be done of a move, and the fraction that was undone (0 free … 1 blocked)."""

    executed: Move
    back_off: Tensor  # (n_structures,) between 0 and 1


def correct(structures: Structures, move: Move, nearest: float | Nearest, smallest_share: float = 0.0) -> Correction:
    """Shorten each structure's move so that no pair is nearer than allowed (a number: Å) along its path.

    Self-images count. A pair that starts nearer may not come nearer still, but may part. The path is
    x(t) = x·(1 + tε) + t·u, so every pair vector is linear in t, r(t) = r + t·w, and the first touch is a
    root of |r + t·w|² = d²: exact, no bisection, and also right for atoms that would pass through each other.
    `smallest_share` of the move is done in any case.
    """
    nearest = nearest if isinstance(nearest, Nearest) else Nearest(nearest)
    _check_finite(structures, move)
    bounded = move.bounded(structures, LONGEST_STEP_ANGSTROM, LARGEST_STRAIN)
    fractions = torch.ones(structures.n_structures, dtype=structures.dtype)
    cutoffs = _search_cutoffs(structures, bounded, nearest)
    # Neighbours are searched with one cutoff per group, or one structure that moves far would slow down all.
    groups = torch.ceil(torch.log2(cutoffs))
    moving = (bounded.largest_displacements(structures) > 0) | (bounded.strain_sizes() > 0)
    for group in groups[moving].unique():
        which = (moving & (groups == group)).nonzero().flatten()
        part = structures.select(which)
        part_move = bounded.select(structures.counts, which)
        fractions[which] = _free_fractions(part, part_move, nearest, float(cutoffs[which].max()))
    fractions = fractions.clamp_min(smallest_share)
    executed = bounded.scaled(fractions, structures)
    return Correction(executed, 1 - fractions * _shares(bounded, move, structures))


def _search_cutoffs(structures: Structures, move: Move, nearest: Nearest) -> Tensor:
    """How far apart two atoms can be and still meet: |r| ≤ d + |w| and |w| ≤ |ε||r| + |u_j - u_i|."""
    numbers = structures.atomic_numbers
    distance = nearest.between(numbers, numbers, structures.dtype)  # of the largest atoms, twice their own radius
    if isinstance(distance, Tensor):
        distance = per_structure_max(distance, structures.structure_index, structures.n_structures)
    index = structures.structure_index
    longest = move.largest_displacements(structures)
    # The sum of the two longest steps bounds |u_j - u_i|; a lone mover among resting atoms asks for its own.
    others = move.displacements.norm(dim=1)
    rows = torch.arange(structures.n_atoms)
    first = per_structure_max(torch.where(others == longest[index], rows, 0), index, structures.n_structures)
    others[first] = 0.0
    second = per_structure_max(others, index, structures.n_structures)
    return (distance + longest + second) / (1 - move.strain_sizes()) + 1e-6  # (n_structures,) Å


def _free_fractions(structures: Structures, move: Move, nearest: Nearest, cutoff: float) -> Tensor:
    pairs = Pairs.of(structures, cutoff)
    first, second = pairs.ends
    owners = structures.structure_index[first]
    start = pairs.vectors.to(structures.dtype)  # r, (n_pairs, 3) Å
    change = torch.einsum("ni,nij->nj", start, move.strains[owners])  # w, (n_pairs, 3) Å
    change = change + move.displacements[second] - move.displacements[first]
    numbers = structures.atomic_numbers
    fractions = first_touch(start, change, nearest.between(numbers[first], numbers[second], structures.dtype))
    return torch.ones(structures.n_structures, dtype=structures.dtype).scatter_reduce(0, owners, fractions, "amin")


def first_touch(start: Tensor, change: Tensor, distance: float | Tensor) -> Tensor:
    """The largest t ≤ 1 for which |start + s·change| ≥ min(distance, |start|) at every s between 0 and t.

    A slack of some rounding errors (1e-12 Å in float64) keeps a pair that rests exactly at the distance from
    blocking moves that leave it as it is.
    """
    lengths = start.norm(dim=1)
    slack = 4096 * torch.finfo(start.dtype).eps
    nearest = (lengths.clamp_max(distance) - slack).clamp_min(0)  # one distance, or one per pair
    a = (change * change).sum(dim=1)
    b = (start * change).sum(dim=1)
    c = (lengths - nearest) * (lengths + nearest)
    discriminant = b * b - a * c
    touches = (b < 0) & (discriminant > 0)
    # c / (-b + √…) instead of (-b - √…) / a: the same root, without the difference of nearly equal numbers
    roots = c / (discriminant.clamp_min(0).sqrt() - b).clamp_min(torch.finfo(start.dtype).tiny)
    return torch.where(touches, roots.clamp_max(1), 1.0)


def _shares(part: Move, whole: Move, structures: Structures) -> Tensor:
    """Which fraction `part`, a shortened `whole`, is of it; 1 where nothing moves."""
    taken = part.largest_displacements(structures) + part.strain_sizes()
    asked = whole.largest_displacements(structures) + whole.strain_sizes()
    return torch.where(asked > 0, taken / asked.clamp_min(torch.finfo(asked.dtype).tiny), 1.0)


def _check_finite(structures: Structures, move: Move) -> None:
    finite = torch.isfinite(move.displacements).all() and torch.isfinite(move.strains).all()
    if not finite or not torch.isfinite(structures.positions).all():
        raise StructureError("a move or a position is not finite; look at what the policy puts out")
