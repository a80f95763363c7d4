"""What a policy sees: structures, what the potential says of them, and a short history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Self

import numpy as np
import torch
import vesin
from torch import Tensor

from relaxion.errors import StructureError
from relaxion.structures.structures import (
    Move,
    Structures,
    atom_rows,
    concatenated,
    numbers_of,
    per_structure_max,
    rows_of,
)

FEWEST_AT_ONCE = 8  # structures; below it, and above the next number, vesin is the faster one (measured)
LARGEST_MEAN_SQUARE = 256  # of the number of atoms
MOST_CANDIDATES = 5_000_000  # pairs times images searched at once; a flat or tiny cell has very many images
LARGEST_REACH = 1000  # images to one side; cells with as many have far too many candidates anyway
KEPT = "_kept_pairs"  # with the structures they belong to
LARGEST_EXTENT = 300  # cutoffs along a direction without periodicity; far beyond it vesin kills the process


@dataclass(frozen=True, eq=False)
class Graph:
    """Every pair twice, as i→j and j→i. `pair_structure` says which structure a pair belongs to."""

    centers: Tensor  # (n_pairs,) int64, atom i
    neighbors: Tensor  # (n_pairs,) int64, atom j
    shifts: Tensor  # (n_pairs, 3) int64, cell shifts of j
    pair_structure: Tensor  # (n_pairs,) int64, never decreasing
    cutoff: float  # Å

    @classmethod
    def of(cls, structures: Structures, cutoff: float) -> Graph:
        """All pairs nearer than `cutoff` (Å)."""
        pairs = Pairs.of(structures, cutoff)
        # i→j and j→i follow each other, so that pairs of one structure stay together
        centers = pairs.ends.T.reshape(-1)
        return cls(
            centers=centers,
            neighbors=pairs.ends.flip(0).T.reshape(-1),
            shifts=torch.stack([pairs.shifts, -pairs.shifts], dim=1).view(-1, 3),
            pair_structure=structures.structure_index.index_select(0, centers),
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
    """Every pair once, in float64; pairs of one structure lie together, in the order of the structures."""

    ends: Tensor  # (2, n_pairs) int64, atoms i and j; no order between them
    vectors: Tensor  # (n_pairs, 3) Å float64, from i to the image of j
    shifts: Tensor  # (n_pairs, 3) int64, cell shifts of j
    counts: list[int]  # (n_structures,) pairs of each structure

    @classmethod
    def of(cls, structures: Structures, cutoff: float) -> Pairs:
        """All pairs nearer than `cutoff` (Å)."""
        if not cutoff > 0:
            raise StructureError(f"the cutoff of a graph must be above 0 Å, got {cutoff}")
        kept = vars(structures).get(KEPT)
        if kept is not None and kept[0] >= cutoff:
            return kept[1] if kept[0] == cutoff else kept[1].nearer_than(cutoff, structures)
        _refuse_scattered(structures, cutoff)
        positions = structures.positions.detach().to(torch.float64)
        cells = structures.cells.detach().to(torch.float64)
        counts = structures.counts
        if len(counts) >= FEWEST_AT_ONCE and int((counts * counts).sum()) <= LARGEST_MEAN_SQUARE * len(counts):
            candidates = _Candidates(structures, positions, cells, counts, cutoff)
            if candidates.number <= MOST_CANDIDATES:
                return candidates.nearer_than(cutoff)
        return _one_by_one(positions, cells, structures.periodic, counts, cutoff)

    def keep(self, structures: Structures, cutoff: float) -> None:
        """For whoever asks next about these very structures, up to the cutoff with which the pairs were searched.

        Only for structures that are used and dropped: the pairs live as long as they do.
        """
        vars(structures)[KEPT] = cutoff, self

    def nearer_than(self, cutoff: float, structures: Structures) -> Pairs:
        """Those of the pairs that are nearer."""
        squares = torch.linalg.vecdot(self.vectors, self.vectors)
        return self._rows((squares < cutoff * cutoff).nonzero().flatten(), structures.structure_index, len(structures))

    def of_structures(self, structures: Structures, which: Tensor) -> Pairs:
        """The pairs of the chosen structures (numbers, rising), as `structures.select(which)` numbers its atoms."""
        chosen = torch.zeros(len(structures), dtype=torch.bool)
        chosen[which] = True
        atoms = chosen.index_select(0, structures.structure_index)
        rows = atoms.index_select(0, self.ends[0]).nonzero().flatten()
        numbers = atoms.cumsum(0) - 1  # of the atoms that stay
        new_number = chosen.cumsum(0) - 1
        owners = new_number.index_select(0, structures.structure_index)
        part = self._rows(rows, owners, len(which))
        return replace(part, ends=numbers.index_select(0, part.ends.flatten()).view(2, -1))

    def _rows(self, rows: Tensor, owner_of_atom: Tensor, n_structures: int) -> Pairs:
        ends = torch.stack([self.ends[0].index_select(0, rows), self.ends[1].index_select(0, rows)])
        owners = owner_of_atom.index_select(0, ends[0])
        return Pairs(
            ends=ends,
            vectors=self.vectors.index_select(0, rows),
            shifts=self.shifts.index_select(0, rows),
            counts=torch.bincount(owners, minlength=n_structures).tolist(),
        )


class _Candidates:
    """Every pair i ≤ j of every structure with every image of j that can be near; an image of i itself once."""

    def __init__(self, structures: Structures, positions: Tensor, cells: Tensor, counts: Tensor, cutoff: float) -> None:
        self.positions = positions
        self.index = structures.structure_index
        self.n_structures = structures.n_structures
        self.lattice = cells * structures.periodic[:, :, None]  # axes without periodicity have no images
        self.dual = _dual(self.lattice, structures.periodic)
        # a pair is first brought to fractional distances within ±½, so an image s is at least s-½ planes away
        planes_within = cutoff * torch.linalg.vector_norm(self.dual, dim=1)
        self.reach = (planes_within + 0.5).floor().clamp_max(LARGEST_REACH).long()  # (n_structures, 3)
        self.n_images = (2 * self.reach + 1).prod(dim=1)
        self.first, self.second = _triangle(counts, self.index)
        self.owner = self.index.index_select(0, self.first)
        images = self.n_images.index_select(0, self.owner)
        # of the images ±s of an atom itself one is enough; they lie around the middle one, which is the atom
        self.per_pair = torch.where(self.first == self.second, images // 2, images)
        self.number = int(self.per_pair.sum())

    def nearer_than(self, cutoff: float) -> Pairs:
        shifts = torch.cat([_grid(a, b, c) for a, b, c in self.reach.tolist()])  # (n_all_images, 3), of the cells
        image_owner = torch.repeat_interleave(self.n_images)  # (n_all_images,)
        offsets = torch.bmm(shifts.to(torch.float64)[:, None], self.lattice.index_select(0, image_owner))[:, 0]
        wraps, apart = self._wrapped()
        # row of the pair and row of the image of each candidate
        pair = torch.repeat_interleave(self.per_pair, output_size=self.number)
        image_end = self.n_images.cumsum(0).index_select(0, self.owner)
        image = (image_end - self.per_pair.cumsum(0)).index_select(0, pair).add_(torch.arange(self.number))
        vectors = [
            apart_along.index_select(0, pair).add_(offset_along.index_select(0, image))
            for apart_along, offset_along in zip(apart.T.contiguous(), offsets.T.contiguous(), strict=True)
        ]
        squares = vectors[0] * vectors[0]
        for along in vectors[1:]:
            squares.addcmul_(along, along)
        near = torch.nonzero(squares < cutoff * cutoff).flatten()
        pair = pair.index_select(0, near)
        image = image.index_select(0, near)
        return Pairs(
            ends=torch.stack([self.first.index_select(0, pair), self.second.index_select(0, pair)]),
            vectors=torch.stack([along.index_select(0, near) for along in vectors], dim=1),
            shifts=shifts.index_select(0, image) - wraps.index_select(0, pair),
            counts=torch.bincount(self.owner.index_select(0, pair), minlength=self.n_structures).tolist(),
        )

    def _wrapped(self) -> tuple[Tensor, Tensor]:
        """Whole cells to take off each pair, and what is left of its vector, within ±½ of every axis."""
        apart = self.positions.index_select(0, self.second) - self.positions.index_select(0, self.first)
        wraps = torch.bmm(apart[:, None], self.dual.index_select(0, self.owner)).round()
        apart = apart - torch.bmm(wraps, self.lattice.index_select(0, self.owner))[:, 0]
        return wraps[:, 0].long(), apart  # (n, 3) and (n, 3) Å


def _dual(lattice: Tensor, periodic: Tensor) -> Tensor:
    """Vectors (columns) that give fractional coordinates along the periodic axes, and 0 along the others."""
    if not periodic.all():
        return torch.linalg.pinv(lattice)
    inverse, failures = torch.linalg.inv_ex(lattice)
    if failures.any():
        raise StructureError(f"the cell of structure {int(failures.nonzero()[0])} has no volume")
    return inverse  # (n_structures, 3, 3) 1/Å


@lru_cache(maxsize=256)
def _grid(a: int, b: int, c: int) -> Tensor:
    """Cell shifts from (-a, -b, -c) to (a, b, c); the second half is the first one with the sign changed."""
    return torch.cartesian_prod(torch.arange(-a, a + 1), torch.arange(-b, b + 1), torch.arange(-c, c + 1))


def _triangle(counts: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Atoms i ≤ j of the same structure."""
    atoms = torch.arange(len(index))
    partners = counts.cumsum(0).index_select(0, index) - atoms
    first = torch.repeat_interleave(partners)
    row_start = partners.cumsum(0) - partners
    second = torch.arange(len(first)) + (atoms - row_start).index_select(0, first)
    return first, second


def _one_by_one(positions: Tensor, cells: Tensor, periodic: Tensor, counts: Tensor, cutoff: float) -> Pairs:
    """The same by vesin, one structure after the other."""
    search = vesin.NeighborList(cutoff=cutoff, full_list=False, n_threads=1)
    ends = [np.zeros((0, 2), np.int64)]
    vectors = [np.zeros((0, 3))]
    shifts = [np.zeros((0, 3), np.int64)]
    start = 0
    for number, end in enumerate(counts.cumsum(0).tolist()):
        box = cells[number].numpy()
        axes = periodic[number].numpy()
        try:
            found = search.compute(positions[start:end].numpy(), box, axes, quantities="PDS")
        except RuntimeError as error:
            raise StructureError(f"no neighbours can be found in structure {number}: {error}") from error
        ends.append(found[0].view(np.int64) + start)
        vectors.append(found[1])
        shifts.append(found[2].astype(np.int64))
        start = end
    return Pairs(
        ends=torch.from_numpy(np.ascontiguousarray(np.concatenate(ends).T)),
        vectors=torch.from_numpy(np.concatenate(vectors)),
        shifts=torch.from_numpy(np.concatenate(shifts)),
        counts=[len(pair) for pair in ends[1:]],
    )


def _refuse_scattered(structures: Structures, cutoff: float) -> None:
    """An error instead of the arithmetic signal by which vesin 0.6 answers atoms scattered over 1e6 Å."""
    positions = structures.positions.detach()
    largest = positions.abs().max() if len(positions) else positions.new_zeros(())
    if largest < LARGEST_EXTENT / 2 * cutoff:
        return
    if not torch.isfinite(largest):
        raise StructureError("positions are not finite, so atoms have no neighbours; look at the last move")
    for axis in positions.T:
        index = structures.structure_index
        number = structures.n_structures
        extents = per_structure_max(axis, index, number) + per_structure_max(-axis, index, number)
        bad = (extents > LARGEST_EXTENT * cutoff) & ~structures.periodic.all(dim=1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise StructureError(
                f"structure {first} extends over {float(extents[first]):.3g} Å without periodicity; "
                f"neighbours are searched up to {LARGEST_EXTENT * cutoff:.0f} Å: an atom has left the structure"
            )


class Outcome(IntEnum):
    """How a relaxation stands. Outcomes are data, never exceptions."""

    RUNNING = 0
    CONVERGED = 1
    STEP_LIMIT = 2
    STALLED = 3  # moves have become too short to matter, forces are still above the tolerance
    BLOCKED = 4  # the corrector leaves (almost) nothing of the move
    NON_FINITE = 5  # the potential answered with NaN or infinity

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")

    def __str__(self) -> str:
        return self.label

    def __format__(self, style: str) -> str:
        return format(self.label, style)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The potential's answer. Stress follows ASE: positive under tension, (1/V) dE/dε."""

    energies: Tensor  # (n_structures,) eV
    forces: Tensor  # (n_atoms, 3) eV/Å
    stresses: Tensor | None  # (n_structures, 3, 3) eV/Å³; zero where there is no volume; None: not asked for

    def finite(self, structures: Structures) -> Tensor:
        """Which structures have only finite numbers."""
        bad = ~torch.isfinite(self.energies)
        bad_atoms = ~torch.isfinite(self.forces).all(dim=1)
        bad = bad | per_structure_max(bad_atoms.to(torch.int64), structures.structure_index, len(bad)).bool()
        if self.stresses is not None:
            bad = bad | ~torch.isfinite(self.stresses).all(dim=2).all(dim=1)
        return ~bad  # (n_structures,) bool

    def select(self, counts: Tensor, which: Tensor) -> Self:
        """The part that belongs to the chosen structures (`counts`: atoms of each structure)."""
        which = numbers_of(which)
        rows, _ = atom_rows(counts, which)
        stresses = None if self.stresses is None else self.stresses[which]
        return replace(self, energies=self.energies[which], forces=self.forces[rows], stresses=stresses)

    @classmethod
    def concatenate(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """One evaluation from several. Stresses nobody asked for become zero if another part has them."""
        given = []
        if any(part.stresses is not None for part in parts):
            blanks = [part.energies.new_zeros((len(part.energies), 3, 3)) for part in parts]
            given = [b if p.stresses is None else p.stresses for p, b in zip(parts, blanks, strict=True)]
        return cls(**concatenated(parts, ("energies", "forces")), stresses=torch.cat(given) if given else None)


@dataclass(frozen=True, eq=False)
class State:
    """The RL state of many structures at once."""

    structures: Structures
    evaluation: Evaluation
    graph: Graph | None  # neighbours for the policy; None where nobody asked for them
    last_move: Move  # executed; zero at the start
    last_forces: Tensor  # (n_atoms, 3) eV/Å, before the last move; equal to the forces at the start
    trust_radii: Tensor  # (n_structures,) Å
    calls: Tensor  # (n_structures,) int64, force calls so far, this evaluation included

    @classmethod
    def without_past(cls, structures: Structures, evaluation: Evaluation, trust_radius_angstrom: float) -> Self:
        """Structures at their start, or as if they were there; without a graph."""
        return cls(
            structures=structures,
            evaluation=evaluation,
            graph=None,
            last_move=Move.zero(structures),
            last_forces=evaluation.forces,
            trust_radii=torch.full((structures.n_structures,), trust_radius_angstrom, dtype=torch.float64),
            calls=torch.ones(structures.n_structures, dtype=torch.int64),
        )

    @property
    def n_structures(self) -> int:
        return self.structures.n_structures

    def select(self, which: Tensor) -> Self:
        """The structures numbered or masked by `which`, in that order, with all that belongs to them."""
        which = numbers_of(which)
        counts = self.structures.counts
        rows, _ = atom_rows(counts, which)
        return replace(
            self,
            structures=self.structures.select(which),
            evaluation=self.evaluation.select(counts, which),
            graph=None if self.graph is None else select_graph(self.graph, counts, which),
            last_move=self.last_move.select(counts, which),
            last_forces=self.last_forces[rows],
            **rows_of(self, ("trust_radii", "calls"), which),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[State]) -> State:
        """One state from several, in order; the graph is kept where every part has one."""
        graphs = [part.graph for part in parts if part.graph is not None]
        structures = [part.structures for part in parts]
        return cls(
            structures=Structures.concatenate(structures),
            evaluation=Evaluation.concatenate([part.evaluation for part in parts]),
            graph=concatenate_graphs(graphs, structures) if len(graphs) == len(parts) else None,
            last_move=Move.concatenate([part.last_move for part in parts]),
            **concatenated(parts, ("last_forces", "trust_radii", "calls")),
        )


def select_graph(graph: Graph, counts: Tensor, which: Tensor) -> Graph:
    """The pairs of the chosen structures, renumbered (`counts`: atoms of each structure)."""
    pair_counts = torch.bincount(graph.pair_structure, minlength=len(counts))
    rows, pair_structure = atom_rows(pair_counts, which)
    chosen = counts[which]
    offsets = (chosen.cumsum(0) - chosen) - (counts.cumsum(0) - counts)[which]  # of the atom numbers
    moved = offsets[pair_structure]
    return replace(
        graph,
        centers=graph.centers[rows] + moved,
        neighbors=graph.neighbors[rows] + moved,
        shifts=graph.shifts[rows],
        pair_structure=pair_structure,
    )


def concatenate_graphs(graphs: Sequence[Graph], structures: Sequence[Structures]) -> Graph:
    """One graph from several with the same cutoff, in order."""
    atoms = torch.tensor([0, *[part.n_atoms for part in structures[:-1]]]).cumsum(0)
    starts = torch.tensor([0, *[part.n_structures for part in structures[:-1]]]).cumsum(0)
    return Graph(
        centers=torch.cat([g.centers + first for g, first in zip(graphs, atoms, strict=True)]),
        neighbors=torch.cat([g.neighbors + first for g, first in zip(graphs, atoms, strict=True)]),
        shifts=torch.cat([g.shifts for g in graphs]),
        pair_structure=torch.cat([g.pair_structure + first for g, first in zip(graphs, starts, strict=True)]),
        cutoff=graphs[0].cutoff,
    )
