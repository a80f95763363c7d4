"""Neighbours within a cutoff, through periodic images, self-images included, with no cap on their number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import vesin
from torch import Tensor

from relaxion.errors import StructureError
from relaxion.structures.structures import Structures


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
        if not cutoff > 0:
            raise StructureError(f"the cutoff of a graph must be above 0 Å, got {cutoff}")
        search = vesin.NeighborList(cutoff=cutoff, full_list=True, n_threads=1)
        positions = structures.positions.detach().to(torch.float64).numpy()
        cells = structures.cells.detach().to(torch.float64).numpy()
        periodic = structures.periodic.numpy()
        ends = structures.counts.cumsum(0).tolist()
        pairs, shifts, counts, start = [], [], [], 0
        for number, end in enumerate(ends):
            pair, shift = search.compute(
                positions[start:end], cells[number], periodic[number], quantities="PS", copy=False
            )
            pairs.append(pair.astype(np.int64) + start)
            shifts.append(shift.astype(np.int64))
            counts.append(len(pair))
            start = end
        joined = torch.from_numpy(np.concatenate(pairs)) if pairs else torch.zeros((0, 2), dtype=torch.int64)
        return cls(
            centers=joined[:, 0],
            neighbors=joined[:, 1],
            shifts=torch.from_numpy(np.concatenate(shifts)) if shifts else torch.zeros((0, 3), dtype=torch.int64),
            pair_structure=torch.repeat_interleave(torch.arange(len(ends)), torch.tensor(counts, dtype=torch.int64)),
            cutoff=cutoff,
        )

    @property
    def n_pairs(self) -> int:
        return self.centers.shape[0]

    def vectors(self, structures: Structures) -> Tensor:
        """From atom i to the image of atom j."""
        offsets = torch.einsum(
            "ni,nij->nj", self.shifts.to(structures.dtype), structures.cells[self.pair_structure]
        )
        return structures.positions[self.neighbors] - structures.positions[self.centers] + offsets  # (n_pairs, 3) Å
