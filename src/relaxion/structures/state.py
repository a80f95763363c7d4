"""What a policy sees: structures, what the potential says of them, and a short history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from relaxion.structures.state import Graph
from relaxion.structures.structures import (
    Move,
    Structures,
    atom_rows,
    concatenated,
    numbers_of,
    per_structure_max,
    rows_of,
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
