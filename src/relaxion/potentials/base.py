"""What every physics engine looks like: many structures in, one evaluation out, each structure counted.

Any ASE calculator as a potential (`AsePotential`), and any potential as an ASE calculator (`PotentialCalculator`)."""

from __future__ import annotations

import logging
import subprocess
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Timer
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, Calculator, all_changes
from ase.data import chemical_symbols
from torch import Tensor

from relaxion.errors import MissingElementError, MissingStressError, PotentialError
from relaxion.structures import Evaluation, Graph, Structures
from relaxion.structures.structures import per_structure_sum

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
        """Covered atomic numbers; None: any, or not known beforehand."""
        return None

    def check_elements(self, structures: Structures) -> None:
        """Refuse elements without parameters, by name."""
        if self.elements is None:
            return
        missing = set(structures.atomic_numbers.unique().tolist()) - self.elements
        if missing:
            names = ", ".join(chemical_symbols[number] for number in sorted(missing))
            raise MissingElementError(
                f"{self.name} has no parameters for {names}; it covers {elements_in_words(self.elements)}"
            )

    def assumption(self, atoms: Atoms) -> str | None:
        """Its assumptions about these atoms that matter to the user, in words; most: none."""
        del atoms
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what is held between calls: another program, a socket, a library. Most hold nothing."""

    def as_calculator(self) -> PotentialCalculator:
        """For ASE: `atoms.calc = relaxion.potential("emt").as_calculator()`."""
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


# ---- Any ASE calculator as a potential, and any potential as an ASE calculator.

logger = logging.getLogger(__name__)

SECONDS_TO_END = 10.0  # that a program has after its socket was closed; then it is asked to end, and then made to


def close_calculator(calculator: Any) -> None:
    """As the calculator's own `close` or `with` would; what goes wrong here is said, and never hides a result."""
    close = getattr(calculator, "close", None)
    leave = getattr(calculator, "__exit__", None)
    process = getattr(getattr(calculator, "server", None), "proc", None)  # of ASE's socket calculators
    if not callable(close) and not callable(leave):
        return
    try:
        with _ended_in_time(process), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # codes end with one of their own when their socket is closed
            close() if callable(close) else leave(None, None, None)  # pyright: ignore[reportOptionalCall]
    except Exception as error:  # noqa: BLE001 - calculators of other packages may raise anything
        logger.warning("%s could not be closed: %s: %s", type(calculator).__name__, type(error).__name__, error)


@contextmanager
def _ended_in_time(process: Any) -> Iterator[None]:
    """A program in the middle of a calculation does not look at its socket, and ASE would wait for it."""
    if not isinstance(process, subprocess.Popen):
        yield
        return
    steps = [Timer(SECONDS_TO_END, process.terminate), Timer(1.5 * SECONDS_TO_END, process.kill)]
    for step in steps:
        step.daemon = True
        step.start()
    try:
        yield
    finally:
        for step in steps:
            step.cancel()


class AsePotential(Potential):
    """Asks an ASE calculator about one structure after the other."""

    stress_costs_nothing = False

    def __init__(self, calculator: BaseCalculator) -> None:
        super().__init__()
        self.calculator = calculator
        self.name = type(calculator).__name__
        known = getattr(calculator, "implemented_properties", ["forces", "stress"])
        self.has_stress = "stress" in known
        if "forces" not in known:
            raise PotentialError(f"the calculator {self.name} gives energies without forces; use one that gives both")

    def close(self) -> None:
        """End what is alive behind the calculator, such as the program of one of ASE's socket calculators."""
        close_calculator(self.calculator)

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        energies = []
        forces = []
        tensors = []
        for atoms in structures.to_ase():
            atoms.set_constraint()  # raw forces; constraints are the business of whoever moves
            atoms.calc = self.calculator
            forces.append(atoms.get_forces())
            energies.append(atoms.get_potential_energy())
            if stresses:
                tensors.append(atoms.get_stress(voigt=False) if atoms.cell.rank == 3 else np.zeros((3, 3)))
        self._check_shapes(structures, forces)
        return Evaluation(
            energies=torch.tensor(energies, dtype=structures.dtype),
            forces=torch.from_numpy(np.concatenate(forces)).to(structures.dtype),
            stresses=torch.from_numpy(np.stack(tensors)).to(structures.dtype) if stresses else None,
        )

    def _check_shapes(self, structures: Structures, forces: list[np.ndarray]) -> None:
        for number, (given, count) in enumerate(zip(forces, structures.counts.tolist(), strict=True)):
            if np.shape(given) != (count, 3):
                raise PotentialError(
                    f"{self.name} returned forces of shape {np.shape(given)} for structure {number}, "
                    f"which has {count} atoms"
                )


class PotentialCalculator(Calculator):
    """A Relaxion potential as an ASE calculator."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential
        stress = ["stress"] if potential.has_stress else []
        self.implemented_properties = ["energy", "free_energy", "forces", *stress]

    def calculate(self, atoms: Atoms | None = None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        if self.atoms is None:
            raise PotentialError(f"{self.potential.name} was asked to calculate without atoms")
        bare = self.atoms.copy()
        bare.set_constraint()  # raw forces: ASE applies constraints itself
        wants_stress = "stress" in properties or None
        evaluation = self.potential(Structures.from_ase(bare), stresses=wants_stress)
        energy = float(evaluation.energies[0])
        self.results = {"energy": energy, "free_energy": energy, "forces": evaluation.forces.numpy()}
        if evaluation.stresses is not None:
            self.results["stress"] = evaluation.stresses[0].numpy().flat[[0, 4, 8, 5, 2, 1]]
