"""Relaxion as an optimizer of TorchSim, for structures in batches on any of its models.

    import torch_sim as ts
    from relaxion.torchsim import relaxer

    final = ts.optimize(atoms, model, optimizer=relaxer(fmax=0.05), autobatcher=True,
                        convergence_fn=ts.generate_force_convergence_fn(0.05, include_cell_forces=False))

With `init_kwargs={"cell_filter": ts.CellFilter.frechet}` the cells relax too. The other way round, `relaxion.potential`
takes a TorchSim model. Needs `pip install 'relaxion[torchsim]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from torch import Tensor

from relaxion.errors import MissingExtraError, SettingsError, StructureError
from relaxion.optimize.ase_interface import read_point
from relaxion.optimize.batch_relaxation import Answer, Told
from relaxion.optimize.choice import Chooser, stepper_of
from relaxion.optimize.point import Point, Proposal, longest
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import propose
from relaxion.structures.devices import DeviceLike

FILTER_SETTINGS = ("hydrostatic_strain", "constant_volume", "scalar_pressure")
VOIGT = [0, 4, 8, 5, 2, 1]  # xx yy zz yz xz xy in a flat 3 × 3 matrix


def relaxer(
    policy: str | Path | None = "auto",
    fmax: float | None = None,
    *,
    allow_unseen: bool = False,
    device: DeviceLike = None,
) -> TorchSimOptimizer:
    """What `torch_sim.optimize(..., optimizer=...)` takes.

    `policy`, `allow_unseen`, `device`: as in `relaxion.Relaxer`. `fmax`: eV/Å; structures whose forces (and rows of the
    cell) are all shorter rest: they are neither moved nor evaluated until TorchSim takes them out of the batch. Give
    the number that its convergence function has.
    """
    return TorchSimOptimizer(Relaxing(policy, fmax, allow_unseen=allow_unseen, device=device))


class TorchSimOptimizer(tuple[Callable[..., Any], Callable[..., Any]]):
    """A pair of functions, as TorchSim has it since 0.4; called with a model it gives the pair that 0.3 expects."""

    __slots__ = ()

    def __new__(cls, relaxing: Relaxing) -> TorchSimOptimizer:
        return super().__new__(cls, (relaxing.begin, relaxing.step))

    def __call__(self, model: Any, **arguments: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        begin, step = self
        return partial(begin, model=model, **arguments), partial(step, model=model)


class Relaxing:
    """The relaxations that TorchSim runs. Its batches come and go; each structure carries the number of its own."""

    def __init__(
        self, policy: str | Path | None, fmax: float | None, *, allow_unseen: bool, device: DeviceLike
    ) -> None:
        if fmax is not None and not fmax > 0:
            raise SettingsError(f"fmax is a force in eV/Å above 0, got {fmax}; try 0.05")
        self.fmax, self._allow_unseen = fmax, allow_unseen
        self._chooser = Chooser(policy, allow_unseen=allow_unseen, device=device)
        self._ways: list[Way] = []

    def begin(self, state: Any, model: Any, *, cell_filter: Any = None, **settings: Any) -> Any:
        """First evaluation, and a new relaxation for every structure."""
        unknown = [name for name in settings if name not in FILTER_SETTINGS]
        if unknown:
            raise SettingsError(f"{unknown[0]} is not a setting of the cell here; known: {', '.join(FILTER_SETTINGS)}")
        first = len(self._ways)
        self._ways += [self._way(atoms, cell_filter is not None, settings) for atoms in atoms_of(state)]
        here = self._ways[first:]
        answers = evaluated(model, state)
        tell(here, answers, _counts(state))
        numbers = torch.arange(first, len(self._ways), device=state.device)
        return _new_state(state, {**answers, "cell_forces": _cell_forces(here, state), "relaxation": numbers})

    def _way(self, atoms: Atoms, free_cell: bool, settings: dict[str, Any]) -> Way:
        decision = self._chooser.decide_for(atoms)
        stepper = stepper_of(decision, QuasiNewtonSettings(), allow_unseen=self._allow_unseen).stepper
        return Way(atoms, stepper, FrechetCellFilter(atoms, **settings) if free_cell else atoms)

    def step(self, state: Any, model: Any, **_: Any) -> Any:
        """One step and one evaluation for every structure that does not rest."""
        ways = [self._ways[number] for number in state.relaxation.tolist()]
        moving = [place for place, way in enumerate(ways) if not way.rests(self.fmax)]
        if not moving:
            return state
        here = [ways[place] for place in moving]
        for way, proposal in zip(here, propose([w.stepper for w in here], [w.point for w in here]), strict=True):
            way.move(proposal)
        _write_places(state, ways)
        part = state if len(moving) == len(ways) else state[moving]
        answers = evaluated(model, part)
        tell(here, answers, _counts(part))
        _write_answers(state, moving, answers, _cell_forces(ways, state))
        return state


class Way:
    """One structure on its way, with the memory of its optimizer."""

    point: Point  # of the last evaluation

    def __init__(self, atoms: Atoms, stepper: Any, target: Atoms | FrechetCellFilter) -> None:
        self.atoms, self.stepper, self.target = atoms, stepper, target
        self.told = atoms.calc = Told()
        self.longest_force = np.inf  # as TorchSim sees it: on an atom, or a row of the cell

    def look(self, energy: float, forces: np.ndarray, stress: np.ndarray | None) -> None:
        self.told.answer = Answer(energy, forces, stress)
        self.point = read_point(self.target)
        rows = [self.atoms.get_forces(), self.cell_rows()]
        self.longest_force = max(longest(part) for part in rows)

    def cell_rows(self) -> np.ndarray:
        """Forces on the three rows of the cell, zero where it is fixed."""
        return np.zeros((3, 3)) if self.target is self.atoms else self.point.forces[-3:]

    def rests(self, fmax: float | None) -> bool:
        """Below `fmax`, or without a finite point to begin at."""
        return (fmax is not None and self.longest_force < fmax) or (self.stepper.last is None and not self.point.finite)

    def move(self, proposal: Proposal) -> None:
        self.target.set_positions(proposal.base.coordinates + proposal.step)


def atoms_of(state: Any) -> list[Atoms]:
    """With its fixed atoms; other constraints of TorchSim have no counterpart here."""
    images = state.to_atoms()
    fixed = torch.zeros(state.n_atoms, dtype=torch.bool)
    for constraint in getattr(state, "constraints", []):
        if type(constraint).__name__ != "FixAtoms":
            raise StructureError(f"the state carries {type(constraint).__name__}; only FixAtoms can be kept here")
        fixed[constraint.atom_idx.cpu()] = True
    for atoms, mask in zip(images, fixed.split(_counts(state)), strict=True):
        if mask.any():
            atoms.set_constraint(FixAtoms(mask=mask.numpy()))
    return images


def evaluated(model: Any, state: Any) -> dict[str, Tensor]:
    """Energies, forces and stresses; zeros for stresses where the model has none."""
    found = model(state)
    stress = found.get("stress")
    return {
        "energy": found["energy"].detach(),
        "forces": found["forces"].detach(),
        "stress": torch.zeros_like(state.cell) if stress is None else stress.detach(),
    }


def tell(ways: Sequence[Way], answers: dict[str, Tensor], counts: list[int]) -> None:
    """Each what the model said of it."""
    energies = answers["energy"].double().cpu().tolist()
    forces = answers["forces"].double().cpu().split(counts)
    stresses = answers["stress"].double().cpu().numpy().reshape(-1, 9)[:, VOIGT]
    for way, energy, rows, stress in zip(ways, energies, forces, stresses, strict=True):
        way.look(energy, rows.numpy(), stress)


def _counts(state: Any) -> list[int]:
    return torch.bincount(state.system_idx).tolist()


def _cell_forces(ways: Sequence[Way], state: Any) -> Tensor:
    return torch.from_numpy(np.stack([way.cell_rows() for way in ways])).to(state.cell)


def _write_places(state: Any, ways: Sequence[Way]) -> None:
    state.positions = torch.from_numpy(np.concatenate([way.atoms.positions for way in ways])).to(state.positions)
    cells = np.stack([way.atoms.cell.array.T for way in ways])
    state.cell = torch.from_numpy(np.ascontiguousarray(cells)).to(state.cell)


def _write_answers(state: Any, moving: list[int], answers: dict[str, Tensor], cell_forces: Tensor) -> None:
    rows = torch.isin(state.system_idx, torch.tensor(moving, device=state.device))
    energy, forces, stress = state.energy.clone(), state.forces.clone(), state.stress.clone()
    energy[moving], stress[moving] = answers["energy"].to(energy), answers["stress"].to(stress)
    forces[rows] = answers["forces"].to(forces)
    state.energy, state.stress, state.cell_forces = energy, stress, cell_forces
    if hasattr(state, "set_constrained_forces"):
        state.set_constrained_forces(forces)
    else:
        state.forces = forces


def _new_state(state: Any, more: dict[str, Tensor]) -> Any:
    kind = state_kind()
    if hasattr(kind, "from_state"):
        return kind.from_state(state, **more)
    own = ("positions", "masses", "cell", "pbc", "atomic_numbers", "system_idx")
    return kind(**{name: getattr(state, name) for name in own}, **more)


@cache
def state_kind() -> type[Any]:
    """TorchSim's state with the number of the relaxation beside each structure."""
    try:
        import torch_sim as ts  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            "relaxion.torchsim needs the package torch_sim, which cannot be imported; "
            "try: pip install 'relaxion[torchsim]'"
        ) from error
    base = getattr(ts, "OptimState", ts.SimState)  # 0.3 has none

    @dataclass(kw_only=True)
    class RelaxionState(base):
        energy: Tensor
        forces: Tensor
        stress: Tensor
        cell_forces: Tensor
        relaxation: Tensor

        _atom_attributes = base._atom_attributes | {"forces"}
        _system_attributes = base._system_attributes | {"energy", "stress", "cell_forces", "relaxation"}

    return RelaxionState
