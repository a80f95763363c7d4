"""TorchSim both ways: our optimizer in its loop, and its models as our potentials. Runs where TorchSim is installed."""

from __future__ import annotations

import gc
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.constraints import FixAtoms

import relaxion
from relaxion.errors import MissingExtraError, PotentialError, SettingsError, StructureError
from relaxion.potentials import Emt
from relaxion.structures import Structures

FMAX = 0.05
SMALL = 1e-6  # so that nothing rests after a few steps


def imported() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch_sim", reason="needs TorchSim: pip install 'relaxion[torchsim]'")


def starts(number: int = 6) -> list[Atoms]:
    """Alloys of two sizes, cells too small, atoms away from their places."""
    images = []
    for seed in range(number):
        atoms = bulk("Cu", a=3.6, cubic=True).repeat((1, 1, 1 + seed % 2))
        atoms.symbols[seed % len(atoms)] = "Au"
        atoms.set_cell(atoms.cell * 1.01, scale_atoms=True)
        atoms.rattle(0.1, seed=seed)
        images.append(atoms)
    return images


def emt_model(dtype: torch.dtype = torch.float64) -> Any:
    """EMT as a model of TorchSim that counts the structures it is asked about."""
    imported()
    from torch_sim.models.interface import ModelInterface  # type: ignore[import-not-found]

    class EmtModel(ModelInterface):
        def __init__(self) -> None:
            super().__init__()
            self._device, self._dtype = torch.device("cpu"), dtype
            self._compute_stress = self._compute_forces = True
            self._memory_scales_with = "n_atoms"
            self.emt = Emt()

        def forward(self, state: Any, **_: Any) -> dict[str, torch.Tensor]:
            periodic = torch.as_tensor(state.pbc).expand(3)
            structures = Structures(
                positions=state.positions.double(),
                cells=state.cell.mT.double(),
                periodic=periodic.expand(len(state.cell), 3),
                atomic_numbers=state.atomic_numbers.long(),
                structure_index=state.system_idx,
                movable=torch.ones(len(state.positions), dtype=torch.bool),
                cell_free=torch.zeros(len(state.cell), dtype=torch.bool),
            )
            found = self.emt(structures, stresses=True)
            assert found.stresses is not None
            answer = {"energy": found.energies, "forces": found.forces, "stress": found.stresses}
            return {name: tensor.to(dtype) for name, tensor in answer.items()}

    return EmtModel()


def optimized(model: Any, images: list[Atoms], *, cell: bool, **more: Any) -> Any:
    from relaxion.torchsim import relaxer

    ts = imported()
    arguments: dict[str, Any] = {}
    if hasattr(ts, "CellFilter"):
        arguments["init_kwargs"] = {"cell_filter": ts.CellFilter.frechet} if cell else {}
    elif cell:  # 0.3
        arguments["cell_filter"] = "frechet"
    converged = ts.generate_force_convergence_fn(FMAX, include_cell_forces=cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ts.optimize(
            images, model, optimizer=relaxer(fmax=FMAX), convergence_fn=converged, max_steps=200, **arguments, **more
        )


def begun(images: list[Atoms], *, cell: bool = True, steps: int = 0) -> tuple[Any, Callable[[Any], Any], Any]:
    """A state after so many steps, the function that makes the next one, and the model."""
    from relaxion.torchsim import relaxer

    ts, model = imported(), emt_model()
    begin, step = relaxer(fmax=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = ts.initialize_state(images, model.device, model.dtype)
    state = begin(state, model, cell_filter="frechet" if cell else None)
    for _ in range(steps):
        state = step(state, model)
    return state, lambda one: step(one, model), model


def same(first: Any, second: Any) -> bool:
    """Whether two states are at the same places with the same energies, to the last digit."""
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("positions", "cell", "energy"))


@pytest.mark.parametrize("cell", [False, True])
def test_the_same_relaxations_as_relax_batch(cell: bool) -> None:
    model = emt_model()
    state = optimized(model, starts(), cell=cell)
    ours = relaxion.relax_batch(starts(), "emt", fmax=FMAX, cell=cell)
    assert model.emt.calls == sum(one.force_calls for one in ours), "structures below fmax are not evaluated again"
    assert state.energy.numpy() == pytest.approx([one.energy_ev for one in ours], abs=1e-6)
    for atoms, one in zip(state.to_atoms(), ours, strict=True):
        assert atoms.positions == pytest.approx(one.atoms.positions, abs=1e-5)
        assert atoms.cell.array == pytest.approx(one.atoms.cell.array, abs=1e-5)


def test_batches_that_come_and_go() -> None:
    ts = imported()
    model = emt_model()
    batcher = ts.InFlightAutoBatcher(model=model, memory_scales_with="n_atoms", max_memory_scaler=12)
    state = optimized(model, starts(), cell=True, autobatcher=batcher, steps_between_swaps=2)
    ours = relaxion.relax_batch(starts(), "emt", fmax=FMAX, cell=True)
    assert state.energy.numpy() == pytest.approx([one.energy_ev for one in ours], abs=1e-6)


def test_clones_go_their_own_ways() -> None:
    state, step, _ = begun(starts(2), steps=2)
    clone, before = state.clone(), state.clone()
    state = step(step(state))
    assert same(clone, before)
    assert not same(clone, state)
    assert same(step(step(clone)), state)


def test_joined_clones_relax_as_each_alone() -> None:
    ts = imported()
    state, step, _ = begun(starts(1), steps=2)
    both = ts.concatenate_states([state.clone(), state.clone()])
    alone, both = step(step(state)), step(step(both))
    assert both.energy.tolist() == pytest.approx(2 * alone.energy.tolist(), abs=1e-9)
    if hasattr(ts, "OptimState"):  # 0.3 joins states of the same age only
        older, step, _ = begun(starts(1), steps=5)
        younger, _, _ = begun(starts(2)[1:])
        assert ts.concatenate_states([older, younger]).n_systems == 2


@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_a_stored_state_goes_on_with_another_relaxer(way: str) -> None:
    state, step, _ = begun(starts(2), steps=2)
    if way == "pickle":
        stored = pickle.loads(pickle.dumps(state))
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        stored = torch.load(file, weights_only=False)
    _, other_step, _ = begun(starts(1))
    assert type(stored) is type(state)
    assert same(other_step(other_step(stored)), step(step(state)))


@pytest.mark.parametrize("steps", [0, 2])
def test_atoms_moved_by_somebody_else_relax_from_there(steps: int) -> None:
    state, step, model = begun(starts(2), cell=False, steps=steps)
    moved = starts(2)[1]
    moved.rattle(0.2, seed=5)
    first = len(starts(1)[0])
    other = state.energy[0].item(), state.positions[:first].clone()
    state.positions = torch.cat([state.positions[:first], torch.from_numpy(moved.positions)])
    calls = model.emt.calls
    state = step(state)
    assert model.emt.calls == calls + 2
    expected = Emt()(Structures.from_ase(moved)).energies.item()
    assert state.energy[1].item() == pytest.approx(expected, abs=1e-9), "first the model is asked where the atoms are"
    assert state.positions[first:].numpy() == pytest.approx(moved.positions)
    assert state.energy[0].item() != other[0], "the other structure takes its step"
    for _ in range(30):
        state = step(state)
    (ours,) = relaxion.relax_batch([moved], "emt", fmax=SMALL)
    assert state.energy[1].item() == pytest.approx(ours.energy_ev, abs=1e-6)


def test_a_relaxer_keeps_nothing_of_what_it_has_finished() -> None:
    from relaxion.torchsim import Way, relaxer

    model, optimizer = emt_model(), relaxer(fmax=FMAX)
    begin, step = optimizer
    for seed in range(4):
        state, _, _ = begun(starts(seed + 1))
        state = step(begin(state, model), model)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Way]
    assert len(step.__self__._decisions) == 1


def test_a_state_given_as_a_dict() -> None:
    from relaxion.torchsim import relaxer

    ts, model = imported(), emt_model()
    begin, step = relaxer(fmax=FMAX)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = ts.initialize_state(starts(2), model.device, model.dtype)
    given = begin({one.name: getattr(state, one.name) for one in fields(state)}, model)
    assert same(step(given, model), step(begin(state, model), model))


@pytest.mark.parametrize("cell", [False, True])
def test_steps_in_single_precision(cell: bool) -> None:
    model = emt_model(torch.float32)
    state = optimized(model, starts(2), cell=cell)
    ours = relaxion.relax_batch(starts(2), "emt", fmax=FMAX, cell=cell)
    assert state.energy.numpy() == pytest.approx([one.energy_ev for one in ours], abs=1e-3)
    assert model.emt.calls <= sum(one.force_calls for one in ours) + 2


def test_packed_snapshots_are_what_they_were() -> None:
    from relaxion.torchsim import packed, unpacked

    plain = {
        "none": None,
        "numbers": [1, 2.5, np.float32(0.5), float("inf")],
        "deep": {"rows": np.arange(6.0).reshape(2, 3), "mask": np.array([True, False]), "empty": np.zeros((0, 3))},
    }
    found = unpacked(packed(plain) + b"more")
    assert found["none"] is None
    assert found["numbers"] == plain["numbers"]
    for name, array in plain["deep"].items():
        assert np.array_equal(found["deep"][name], array)
        assert found["deep"][name].dtype == array.dtype


def test_a_model_as_a_potential() -> None:
    model = emt_model(torch.float32)
    images = [*starts(2), molecule("CO"), fcc111("Al", (1, 1, 3), vacuum=5.0)]
    images[2].set_cell([9.0, 9.0, 9.0])
    physics = relaxion.potential(model)
    known = images if hasattr(imported(), "OptimState") else images[:3]  # 0.3 knows no slabs
    found, expected = (engine(Structures.from_ase(known), stresses=True) for engine in (physics, Emt()))
    assert found.energies.numpy() == pytest.approx(expected.energies.numpy(), abs=1e-4)
    assert found.forces.numpy() == pytest.approx(expected.forces.numpy(), abs=1e-4)
    assert found.stresses is not None
    assert expected.stresses is not None
    assert found.stresses[:2].numpy() == pytest.approx(expected.stresses[:2].numpy(), abs=1e-5)
    assert physics.calls == len(known)
    relaxed = relaxion.relax_batch(starts(3), model, fmax=FMAX, cell=True)
    assert all(one.converged for one in relaxed)


def test_a_model_without_forces() -> None:
    model = emt_model()
    model._compute_forces = False
    with pytest.raises(PotentialError, match="EmtModel gives energies without forces"):
        relaxion.potential(model)


def test_fixed_atoms_stay() -> None:
    ts = imported()
    if not hasattr(ts, "OptimState"):
        pytest.skip("TorchSim 0.3 has no constraints")
    from torch_sim.constraints import FixAtoms as TorchSimFixAtoms  # type: ignore[import-not-found]
    from torch_sim.constraints import FixCom

    image = starts(1)[0]
    model = emt_model()
    state = ts.initialize_state([image], model.device, model.dtype)
    state.constraints = [TorchSimFixAtoms(atom_idx=[1])]
    final = optimized(model, state, cell=False).to_atoms()[0]
    image.set_constraint(FixAtoms([1]))
    (ours,) = relaxion.relax_batch([image], "emt", fmax=FMAX)
    assert final.positions == pytest.approx(ours.atoms.positions, abs=1e-5)
    assert final.positions[1] == pytest.approx(image.positions[1])
    state.constraints = [FixCom([0])]
    with pytest.raises(StructureError, match="the state carries FixCom; only FixAtoms can be kept here"):
        optimized(model, state, cell=False)


def test_wrong_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from relaxion import torchsim

    with pytest.raises(SettingsError, match="fmax is a force in eV/Å above 0, got 0"):
        torchsim.relaxer(fmax=0)
    begin, step = torchsim.relaxer(policy=None)
    assert callable(begin)
    assert callable(step)
    with pytest.raises(SettingsError, match="cell_lr is not a setting of the cell here; known: hydrostatic_strain"):
        begin(None, None, cell_lr=1.0)
    monkeypatch.setitem(__import__("sys").modules, "torch_sim", None)
    torchsim.state_kind.cache_clear()
    with pytest.raises(MissingExtraError, match=r"try: pip install 'relaxion\[torchsim\]'"):
        torchsim.state_kind()
