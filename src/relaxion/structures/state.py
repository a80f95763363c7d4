"""What a policy sees: structures, what the potential says of them, and a short history."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from relaxion.structures.graph import Graph
from relaxion.structures.move import Move
from relaxion.structures.structures import Structures, per_structure_max


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

    @property
    def n_structures(self) -> int:
        return self.structures.n_structures
