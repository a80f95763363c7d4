"""Relaxion as an optimizer of TorchSim, for structures in batches on any of its models.

    import torch_sim as ts
    from relaxion.torchsim import relaxer

    final = ts.optimize(atoms, model, optimizer=relaxer(fmax=0.05), autobatcher=True,
                        convergence_fn=ts.generate_force_convergence_fn(0.05, include_cell_forces=False))

With `init_kwargs={"cell_filter": ts.CellFilter.frechet}` the cells relax too. The other way round, `relaxion.potential`
takes a TorchSim model. Needs `pip install 'relaxion[torchsim]'`.
"""

from __future__ import annotations

import json
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
from relaxion.optimizer.batch_relaxation import Answer, Told
from relaxion.optimizer.choice import Chooser, Decision, stepper_of
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.point import Point, Proposal, cell_ratio, longest, place, read_geometry, read_point
from relaxion.optimizer.step import propose
from relaxion.structures.structures import DeviceLike

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
    """The two functions of an optimizer. All that a relaxation has learned is in the state (`RelaxionState`)."""

    def __init__(
        self, policy: str | Path | None, fmax: float | None, *, allow_unseen: bool, device: DeviceLike
    ) -> None:
        if fmax is not None and not fmax > 0:
            raise SettingsError(f"fmax is a force in eV/Å above 0, got {fmax}; try 0.05")
        self.fmax = fmax
        self._allow_unseen = allow_unseen
        self._chooser = Chooser(policy, allow_unseen=allow_unseen, device=device)
        self._decisions: dict[str, Decision] = {}  # by their keys
        self._width = 64  # of the tensor of memories: TorchSim 0.3 joins tensors of the same shape only

    def begin(self, state: Any, model: Any, *, cell_filter: Any = None, **settings: Any) -> Any:
        """First evaluation, and a new relaxation for every structure. `state`: of TorchSim, or a dict of its fields."""
        unknown = [name for name in settings if name not in FILTER_SETTINGS]
        if unknown:
            raise SettingsError(f"{unknown[0]} is not a setting of the cell here; known: {', '.join(FILTER_SETTINGS)}")
        if isinstance(state, dict):
            state = torchsim().SimState(**state)
        free = [float(cell_filter is not None), *(float(settings.get(name, 0.0)) for name in FILTER_SETTINGS)]
        about_cell = torch.tensor([free] * len(state.cell), dtype=torch.float64, device=state.device)
        ways = [self._way(*each) for each in zip(atoms_of(state), state.cell, about_cell, strict=True)]
        answers = evaluated(model, state)
        tell(ways, answers, _counts(state))
        more = {
            "cell_forces": _cell_forces(ways, state),
            "reference_cell": state.cell.clone(),
            "about_cell": about_cell,
            "evaluated_positions": state.positions.clone(),
            "evaluated_cell": state.cell.clone(),
            "memory": self._memories([way.packed() for way in ways]).to(state.device),
        }
        return _new_state(state, {**answers, **more})

    def step(self, state: Any, model: Any, **_: Any) -> Any:
        """One evaluation for every structure that does not rest, after a step; without one where somebody moved it."""
        ways = self._ways(state)
        active = [place for place, way in enumerate(ways) if way.point is None or not way.rests(self.fmax)]
        if not active:
            return state
        points = [(way, way.point) for way in (ways[place] for place in active) if way.point is not None]
        proposals = propose([pair[0].stepper for pair in points], [pair[1] for pair in points]) if points else []
        for (way, _point), proposal in zip(points, proposals, strict=True):
            way.move(proposal)
        _write_places(state, ways)
        part = state if len(active) == len(ways) else state[active]
        answers = evaluated(model, part)
        tell([ways[place] for place in active], answers, _counts(part))
        _write_answers(state, active, answers, _cell_forces(ways, state))
        state.evaluated_positions, state.evaluated_cell = state.positions.clone(), state.cell.clone()
        state.memory = self._memories([way.packed() for way in ways]).to(state.device)
        return state

    def _ways(self, state: Any) -> list[Way]:
        """All structures as the last step left them, with what the model said there."""
        counts = _counts(state)
        same = (state.positions == state.evaluated_positions).all(dim=1).split(counts)
        same_cell = (state.cell == state.evaluated_cell).flatten(1).all(dim=1).tolist()
        memories = state.memory.cpu().flatten(1).numpy()
        each = zip(atoms_of(state), state.reference_cell, state.about_cell, memories, same, same_cell, strict=True)
        return [
            self._way(atoms, reference, about, memory.tobytes() if places.all() and cell else b"")
            for atoms, reference, about, memory, places, cell in each
        ]

    def _way(self, atoms: Atoms, reference: Tensor, about: Tensor, memory: bytes = b"") -> Way:
        """`memory`: none where the relaxation begins, be it because somebody has moved the atoms."""
        free, *settings = about.tolist()
        known = unpacked(memory) if memory else {}
        decision = self._decisions.get(known.get("policy", "")) or self._chooser.decide_for(atoms)
        self._decisions[decision.key] = decision
        stepper = stepper_of(decision, ClassicalSettings(), allow_unseen=self._allow_unseen).stepper
        target: Atoms | FrechetCellFilter = atoms
        if free:
            target = FrechetCellFilter(atoms, **dict(zip(FILTER_SETTINGS, settings, strict=True)))
            target.orig_cell = reference.double().cpu().numpy().T
        way = Way(atoms, stepper, target, decision.key)
        if known:
            way.resume(known)
        return way

    def _memories(self, contents: Sequence[bytes]) -> Tensor:
        """(n_systems, 1, width, 3): TorchSim fills up tensors of four dimensions where structures are joined."""
        self._width = max(self._width, 1 << (max(map(len, contents)) // 3).bit_length())
        rows = [np.frombuffer(content.ljust(3 * self._width, b"\0"), np.uint8) for content in contents]
        return torch.from_numpy(np.stack(rows).reshape(len(rows), 1, self._width, 3))


class Way:
    """One structure on its way, with the memory of its optimizer."""

    def __init__(self, atoms: Atoms, stepper: Any, target: Atoms | FrechetCellFilter, policy: str) -> None:
        self.atoms = atoms
        self.stepper = stepper
        self.target = target
        self.policy = policy
        self.told = atoms.calc = Told()
        self.point: Point | None = None  # of the last evaluation; None where the model has not been asked
        self.longest_force = np.inf  # as TorchSim sees it: on an atom, or a row of the cell

    def look(self, energy: float, forces: np.ndarray, stress: np.ndarray | None) -> None:
        self.told.answer = Answer(energy, forces, stress)
        self.point = read_point(self.target)
        rows = [self.atoms.get_forces(), self.cell_rows()]
        self.longest_force = max(longest(part) for part in rows)

    def cell_rows(self) -> np.ndarray:
        """Forces on the three rows of the cell as the filter has them, zero where it is fixed."""
        assert self.point is not None
        return np.zeros((3, 3)) if self.target is self.atoms else cell_ratio(self.target) * self.point.forces[-3:]

    def rests(self, fmax: float | None) -> bool:
        """Below `fmax`, or without a finite point to begin at."""
        assert self.point is not None
        return (fmax is not None and self.longest_force < fmax) or (self.stepper.last is None and not self.point.finite)

    def move(self, proposal: Proposal) -> None:
        place(self.target, proposal.base.coordinates + proposal.step)

    def packed(self) -> bytes:
        """What the state must carry, so that the next step can be made from it alone."""
        assert self.point is not None
        return packed(
            {
                "policy": self.policy,
                "stepper": None if self.stepper.last is None else self.stepper.snapshot(),
                "coordinates": self.point.coordinates,
                "forces": self.point.forces,
                "energy": self.point.energy,
                "longest_force": self.longest_force,
            }
        )

    def resume(self, known: dict[str, Any]) -> None:
        """The opposite; what another policy has learned is left out."""
        if known["stepper"] is not None and known["policy"] == self.policy:
            self.stepper.restore(known["stepper"])
        self.point = Point(known["coordinates"], known["forces"], known["energy"], read_geometry(self.target))
        self.longest_force = known["longest_force"]


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
    energy = state.energy.clone()
    forces = state.forces.clone()
    stress = state.stress.clone()
    energy[moving] = answers["energy"].to(energy)
    stress[moving] = answers["stress"].to(stress)
    forces[rows] = answers["forces"].to(forces)
    state.energy = energy
    state.stress = stress
    state.cell_forces = cell_forces
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


def torchsim() -> Any:
    """The package, or a sentence about how to install it."""
    try:
        import torch_sim  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            "relaxion.torchsim needs the package torch_sim, which cannot be imported; "
            "try: pip install 'relaxion[torchsim]'"
        ) from error
    return torch_sim


@cache
def state_kind() -> type[Any]:
    """TorchSim's state with all that a relaxation knows beside each structure."""
    ts = torchsim()
    base = getattr(ts, "OptimState", ts.SimState)  # 0.3 has none

    @dataclass(kw_only=True)
    class RelaxionState(base):
        energy: Tensor
        forces: Tensor
        stress: Tensor
        cell_forces: Tensor
        reference_cell: Tensor  # from which strains are measured
        about_cell: Tensor  # (n_systems, 4): whether it is free, and `FILTER_SETTINGS`
        evaluated_positions: Tensor  # where the model was asked; elsewhere somebody else has moved the atoms
        evaluated_cell: Tensor
        memory: Tensor  # (n_systems, 1, width, 3) bytes: the policy and the snapshot of its optimizer

        _atom_attributes = base._atom_attributes | {"forces", "evaluated_positions"}
        _system_attributes = base._system_attributes | {
            "energy",
            "stress",
            "cell_forces",
            "reference_cell",
            "about_cell",
            "evaluated_cell",
            "memory",
        }

    # memories differ in length; set here, because TorchSim 0.3 refuses a class with attributes it does not know
    RelaxionState._padded_system_attributes = frozenset({"memory"})  # pyright: ignore[reportAttributeAccessIssue]
    RelaxionState.__module__, RelaxionState.__qualname__ = __name__, "RelaxionState"  # where pickle looks for it
    return RelaxionState


def __getattr__(name: str) -> Any:
    """`RelaxionState`, made when it is first asked for: TorchSim need not be installed."""
    if name == "RelaxionState":
        return state_kind()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


ARRAY = "array"  # the only key of what stands for an array: its place, kind and shape
PREFIX = 8  # bytes, for the length of the JSON text


def packed(plain: dict[str, Any]) -> bytes:
    """Of dictionaries, lists, numbers, text and arrays; as quick as copying the arrays."""
    numbers = list[bytes]()

    def stand_in(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        place = sum(map(len, numbers))
        numbers.append(value.tobytes())
        return {ARRAY: [place, value.dtype.str, value.shape]}

    text = json.dumps(plain, default=stand_in).encode()
    return b"".join([len(text).to_bytes(PREFIX, "little"), text, *numbers])


def unpacked(content: bytes) -> dict[str, Any]:
    """The opposite; bytes behind the end do not matter."""
    start = PREFIX + int.from_bytes(content[:PREFIX], "little")

    def restored(found: dict[str, Any]) -> Any:
        if found.keys() != {ARRAY}:
            return found
        place, kind, shape = found[ARRAY]
        return np.frombuffer(content, kind, int(np.prod(shape)), start + place).reshape(shape).copy()

    return json.loads(content[PREFIX:start], object_hook=restored)
