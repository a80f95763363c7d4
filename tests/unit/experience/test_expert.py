"""R8.2, R8.3: single steps, each from the state it is asked about; a share that the schedule turns down."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.constraints import FixAtoms
from ase.optimize import BFGS

from relaxion.potentials.registry import potential
from relaxion.structures import Move, Outcome, Structures
from relaxion.train.agents.shared import LinearSchedule
from relaxion.train.data import perturbations as perturb
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings, Source
from relaxion.train.experience.structure_replay import StructureReplay
from relaxion.train.tasks.relax import imitation_distance
from relaxion.train.tasks.relax_task import Expert, guided


def world(perturbations="rattle:0.12", *, cell_free=False, n_structures=12) -> Environment:
    generator = torch.Generator().manual_seed(4)
    sizes = [fcc_alloys(["Cu", "Au", "Pd", "Ni"], 6, generator, n_atoms=n, cell_free=cell_free) for n in (3, 6, 8)]
    starts = PerturbedStarts(Structures.concatenate(sizes), [perturb.perturbation(perturbations)])
    return Environment(potential("emt"), starts, EnvironmentSettings(n_structures=n_structures, max_force_calls=60))


def relax_all(environment, expert, seed=0):
    """Force calls of each relaxation until all have ended, without renewal."""
    state = environment.reset(torch.Generator().manual_seed(seed))
    calls = torch.zeros(state.n_structures, dtype=torch.int64)
    alive = torch.arange(state.n_structures)
    outcomes = []
    while len(alive):
        transition = environment.step(state, expert(state), Source.EXPERT)
        calls[alive] = transition.next_state.calls
        outcomes += transition.outcome[transition.finished].tolist()
        alive = alive[~transition.finished]
        state = transition.next_state.select(~transition.finished)
    return calls, outcomes


@pytest.mark.parametrize(("perturbations", "cell_free"), [("rattle:0.12", False), ("strain:0.03+rattle:0.08", True)])
def test_its_single_steps_lead_to_the_minimum_sooner_than_bfgs(perturbations, cell_free):
    environment = world(perturbations, cell_free=cell_free)
    calls, outcomes = relax_all(environment, Expert())
    assert set(outcomes) == {int(Outcome.CONVERGED)}
    assert calls.double().mean() < 12


def test_fewer_calls_than_bfgs_from_the_same_starts():
    environment = world()
    calls, _ = relax_all(environment, Expert())
    theirs = []
    for atoms in environment.reset(torch.Generator().manual_seed(0)).structures.to_ase():
        atoms.calc = potential("emt").as_calculator()
        opt = BFGS(atoms, logfile=None)
        opt.run(fmax=0.05)
        theirs.append(opt.nsteps + 1)
    assert calls.double().mean() < 0.7 * np.mean(theirs)


def test_it_is_pure_and_each_structure_is_on_its_own():
    environment, expert = world(), Expert()
    generator = torch.Generator().manual_seed(1)
    state = environment.reset(generator)
    state = environment.step(state, expert(state)).next_state
    once, again = expert(state), expert(state)
    assert torch.equal(once.displacements, again.displacements)
    which = torch.tensor([7, 2])
    alone = expert(state.select(which))
    assert torch.equal(alone.displacements, once.select(state.structures.counts, which).displacements)


def test_an_expert_transition_joins_its_own_states():
    """What the replay holds is the step the expert proposes in the stored state, and where that step led."""
    environment, expert = world(), Expert()
    replay = StructureReplay(500, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    state = environment.reset(generator)
    for _ in range(8):
        own = Move(0.02 * state.evaluation.forces, torch.zeros_like(state.structures.cells))
        move, sources = guided(state, own, Source.POLICY, expert, 0.5, generator)
        transition = environment.step(state, move, sources)
        replay.add(transition)
        state = environment.renew(transition, generator)
    taught = (replay.sources[: len(replay)] == Source.EXPERT).nonzero().flatten()
    assert 20 < len(taught) < 76
    batch = replay.assemble(taught)
    again = expert(batch.observations)
    assert torch.allclose(batch.actions.displacements, again.displacements, atol=1e-12)
    led_to = environment.step(batch.observations, batch.actions).next_state.structures.positions
    assert torch.allclose(led_to, batch.next_observations.structures.positions, atol=1e-12)


def test_steps_are_single_and_bounded_and_spare_fixed_atoms():
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.rattle(0.4, seed=0)
    atoms.set_constraint(FixAtoms([0, 3]))
    starts = PerturbedStarts(Structures.from_ase(atoms), [])
    environment = Environment(potential("emt"), starts, EnvironmentSettings(n_structures=1))
    state = environment.reset(torch.Generator().manual_seed(0))
    move = Expert()(state)
    lengths = move.displacements.norm(dim=1)
    assert float(lengths.max()) == pytest.approx(0.3)
    assert torch.equal(lengths[[0, 3]], torch.zeros(2, dtype=torch.float64))


def test_the_share_falls_by_its_schedule():
    environment = world(n_structures=400)
    state = environment.reset(torch.Generator().manual_seed(0))
    zero = Move.zero(state.structures)
    schedule = LinearSchedule(0.8, 0.0, 100)
    for step, low, high in [(0, 0.72, 0.88), (50, 0.32, 0.48), (100, 0.0, 0.0), (500, 0.0, 0.0)]:
        _, sources = guided(
            state,
            zero,
            Source.POLICY,
            lambda some: Move.zero(some.structures),
            schedule(step),
            torch.Generator().manual_seed(step),
        )
        assert low <= float((sources == Source.EXPERT).double().mean()) <= high


def test_imitation_distance_by_hand():
    environment = world(n_structures=2)
    state = environment.reset(torch.Generator().manual_seed(0))
    zero = Move.zero(state.structures)
    shifted = Move(zero.displacements + torch.tensor([0.1, 0.0, 0.0]), zero.strains)
    assert imitation_distance(state, zero, shifted).tolist() == pytest.approx([0.01, 0.01])
    assert imitation_distance(state, shifted, shifted).tolist() == [0.0, 0.0]
