"""Neighbours within a cutoff, through periodic images, self-images included, with no cap on their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import vesin
from torch import Tensor

from relaxion.errors import StructureError
from relaxion.structures.structures import Structures, per_structure_max

LARGEST_EXTENT = 300  # cutoffs along a direction without periodicity; far beyond it vesin kills the process


@dataclass(frozen=True, eq=False)
class Graph:
    """Every pair twice, as i→j and j→i. `pair_structure` says which structure a pair belongs to."""

    centers: Tensor  # (n_pairs,) int64, atom i
    neighbors: Tensor  # (n_pairs,) int64, atom j
    shifts: Tensor  # (n_pairs, 3) int64, cell shifts of j
    pair_structure: Tensor  # (n_pairs,) int64
    cutoff: float  # Å

    @classmethod
    def of(cls, structures: Structures, cutoff: float) -> Graph:
        """All pairs nearer than `cutoff` (Å)."""
        ends, shifts = [np.zeros((0, 2), np.int64)], [np.zeros((0, 3), np.int64)]
        for pair, shift in _search(structures, cutoff, full=True, quantity="S"):
            ends.append(pair)
            shifts.append(shift.astype(np.int64))
        joined = torch.from_numpy(np.concatenate(ends))
        return cls(
            centers=joined[:, 0].contiguous(),
            neighbors=joined[:, 1].contiguous(),
            shifts=torch.from_numpy(np.concatenate(shifts)),
            pair_structure=structures.structure_index[joined[:, 0]],
            cutoff=cutoff,
        )

    @property
    def n_pairs(self) -> int:
        return self.centers.shape[0]

    def vectors(self, structures: Structures) -> Tensor:
        """From atom i to the image of atom j."""
        cells = structures.cells.index_select(0, self.pair_structure)
        offsets = torch.bmm(self.shifts.to(structures.dtype)[:, None, :], cells)[:, 0]
        starts = structures.positions.index_select(0, self.centers)
        return structures.positions.index_select(0, self.neighbors) - starts + offsets  # (n_pairs, 3) Å


@dataclass(frozen=True, eq=False)
class Pairs:
    """Every pair once, with its vector, in float64: what a potential needs, at half the work of a `Graph`."""

    ends: Tensor  # (2, n_pairs) int64, atoms i and j; no order between them
    vectors: Tensor  # (n_pairs, 3) Å float64, from i to the image of j
    counts: list[int]  # (n_structures,) pairs of each structure, which lie together

    @classmethod
    def of(cls, structures: Structures, cutoff: float) -> Pairs:
        """All pairs nearer than `cutoff` (Å)."""
        ends, vectors = [np.zeros((0, 2), np.int64)], [np.zeros((0, 3))]
        for pair, vector in _search(structures, cutoff, full=False, quantity="D"):
            ends.append(pair)
            vectors.append(vector.copy())
        joined = np.ascontiguousarray(np.concatenate(ends).T)
        return cls(
            ends=torch.from_numpy(joined),
            vectors=torch.from_numpy(np.concatenate(vectors)),
            counts=[len(pair) for pair in ends[1:]],
        )


def _search(
    structures: Structures, cutoff: float, *, full: bool, quantity: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Atom pairs of each structure (numbered through the whole object) and vesin's `quantity` of them.

    The second array is only lent: it is overwritten by the search in the next structure.
    """
    if not cutoff > 0:
        raise StructureError(f"the cutoff of a graph must be above 0 Å, got {cutoff}")
    _refuse_scattered(structures, cutoff)
    search = vesin.NeighborList(cutoff=cutoff, full_list=full, n_threads=1)
    positions = structures.positions.detach().to(torch.float64).numpy()
    cells = structures.cells.detach().to(torch.float64).numpy()
    periodic = structures.periodic.numpy()
    start = 0
    for number, end in enumerate(structures.counts.cumsum(0).tolist()):
        pair, values = search.compute(
            positions[start:end], cells[number], periodic[number], quantities="P" + quantity, copy=False
        )
        yield pair.view(np.int64) + start, values
        start = end


def _refuse_scattered(structures: Structures, cutoff: float) -> None:
    """An error instead of the arithmetic signal by which vesin 0.6 answers atoms scattered over 1e6 Å."""
    positions = structures.positions.detach()
    largest = positions.abs().max() if len(positions) else positions.new_zeros(())
    if largest < LARGEST_EXTENT / 2 * cutoff:
        return
    if not torch.isfinite(largest):
        raise StructureError("positions are not finite, so atoms have no neighbours; look at the last move")
    for axis in positions.T:
        index, number = structures.structure_index, structures.n_structures
        extents = per_structure_max(axis, index, number) + per_structure_max(-axis, index, number)
        bad = (extents > LARGEST_EXTENT * cutoff) & ~structures.periodic.all(dim=1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise StructureError(
                f"structure {first} extends over {float(extents[first]):.3g} Å without periodicity; "
                f"neighbours are searched up to {LARGEST_EXTENT * cutoff:.0f} Å: some atom has flown away"
            )
