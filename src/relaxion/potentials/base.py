"""What every physics engine looks like: many structures in, one evaluation out, each structure counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from ase import Atoms
from ase.data import chemical_symbols
from torch import Tensor

from relaxion.errors import MissingElementError, MissingStressError
from relaxion.structures import Evaluation, Graph, Structures
from relaxion.structures.structures import per_structure_sum

if TYPE_CHECKING:
    from relaxion.potentials.ase import PotentialCalculator

SHORTEST_RANGE = 5  # elements in a row that are written as "H to B"


class Potential(ABC):
    """`potential(structures)` answers with energies, forces and stresses, and counts one call per structure.

    The count is the honest cost: every structure evaluated counts once, also when its move is later rejected.
    """

    name: str
    has_stress: bool = True
    options: Mapping[str, Any] = MappingProxyType({})  # keyword arguments that came with its name
    stress_costs_nothing: bool = True  # False: computed only when a cell is free or the caller asks

    def __init__(self) -> None:
        self.calls = 0  # structures evaluated so far

    @final
    def __call__(self, structures: Structures, *, stresses: bool | None = None) -> Evaluation:
        """Evaluate. `stresses`: True, False, or None for "where it costs nothing or a free cell needs it"."""
        needed = bool(structures.cell_free.any()) if stresses is None else stresses
        if needed and not self.has_stress:
            raise MissingStressError(
                f"{self.name} gives no stress, so the cell cannot relax; fix the cell or use another calculator"
            )
        self.check_elements(structures)
        self.calls += structures.n_structures
        wanted = needed or (stresses is None and self.stress_costs_nothing and self.has_stress)
        return self.evaluate(structures, wanted)

    @property
    def elements(self) -> frozenset[int] | None:
        """Atomic numbers it knows; None: any, or not known beforehand."""
        return None

    def check_elements(self, structures: Structures) -> None:
        """Refuse elements without parameters, by name."""
        if self.elements is None:
            return
        missing = set(structures.atomic_numbers.unique().tolist()) - self.elements
        if missing:
            names = ", ".join(chemical_symbols[number] for number in sorted(missing))
            raise MissingElementError(
                f"{self.name} has no parameters for {names}; it knows {elements_in_words(self.elements)}"
            )

    def assumption(self, atoms: Atoms) -> str | None:
        """What it takes for granted about these atoms, in words, where the user should know; most: nothing."""
        del atoms
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what is held between calls: another program, a socket, a library. Most hold nothing."""

    def as_calculator(self) -> PotentialCalculator:
        """For ASE: `atoms.calc = relaxion.potential("emt").as_calculator()`."""
        from relaxion.potentials.ase import PotentialCalculator  # which is written in terms of this class

        return PotentialCalculator(self)

    @abstractmethod
    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        """The physics; called by `__call__` only, so that nothing goes uncounted."""


def elements_in_words(numbers: Iterable[int]) -> str:
    """Symbols with commas; long runs of neighbours as "H to Bi"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        symbols = [chemical_symbols[number] for number in run]
        words += symbols if len(run) < SHORTEST_RANGE else [f"{symbols[0]} to {symbols[-1]}"]
    return ", ".join(words)


class PairGraphPotential(Potential):
    """A potential whose energy is a function of neighbour vectors.

    A subclass gives the energies; forces and stresses follow from one automatic derivative, g_ij = ∂E/∂r_ij:
    F_i = Σ_j (g_ij - g_ji) and stress = (1/V) Σ r_ij ⊗ g_ij. Quick to write; `pairwise` is quick to run.
    """

    @abstractmethod
    def cutoff_for(self, structures: Structures) -> float:
        """How far neighbours matter, Å."""

    @abstractmethod
    def energies_of(self, distances: Tensor, graph: Graph, structures: Structures) -> Tensor:
        """Energies (n_structures,) eV from the pair distances (n_pairs,) Å."""

    @final
    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        graph = Graph.of(structures, self.cutoff_for(structures))
        vectors = graph.vectors(structures).detach()  # (n_pairs, 3) Å
        distances = vectors.norm(dim=1).requires_grad_()
        with torch.enable_grad():
            energies = self.energies_of(distances, graph, structures)
            (slopes,) = torch.autograd.grad(energies.sum(), distances, allow_unused=True, materialize_grads=True)
        pulls = vectors * (slopes / distances.detach())[:, None]  # g_ij, eV/Å
        # two sums and one difference: index_add_ with alpha=-1 takes four times as long
        onto_centers = torch.zeros_like(structures.positions).index_add_(0, graph.centers, pulls)
        onto_neighbors = torch.zeros_like(structures.positions).index_add_(0, graph.neighbors, pulls)
        forces = onto_centers - onto_neighbors
        stress = _stresses(structures, graph, vectors, pulls) if stresses else None
        return Evaluation(energies.detach(), forces, stress)


def _stresses(structures: Structures, graph: Graph, vectors: Tensor, pulls: Tensor) -> Tensor:
    outer = vectors[:, :, None] * pulls[:, None, :]
    virials = per_structure_sum(outer, graph.pair_structure, structures.n_structures)
    volumes = structures.volumes[:, None, None]
    symmetric = (virials + virials.transpose(1, 2)) / 2
    return torch.where(volumes > 0, symmetric / volumes.clamp_min(1e-300), torch.zeros_like(symmetric))
