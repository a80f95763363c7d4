"""The world of the task `relax`: potential, structures to train on and held out, rewards, expert; one step of all.

The collector has neither replay nor updates, so that it can run beside the learner or on another machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from torch import Generator, Tensor

from relaxion.errors import AssessmentStopped, MissingElementError, RelaxionWarning, RunError, SettingsError
from relaxion.files import Stored
from relaxion.model.actions import ForceMoveActions
from relaxion.model.atom_policies import StiffnessActions
from relaxion.model.layers import with_graph
from relaxion.model.policy_file import network_of, policy_of
from relaxion.model.stiffness_network import StiffnessSettings
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import Base, Models, Secant, hessians_at
from relaxion.optimizer.point import Array, Geometry, Point, cell_factor_of
from relaxion.optimizer.step import Stepper
from relaxion.optimizer.trust_region import TrustRegionSettings
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import potential
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.train.agents import LearningAgent, atom_agent
from relaxion.train.agents.shared import Exploration, LinearSchedule, PolicyPenalty
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts, held_apart_sides, structure_source
from relaxion.train.experience.environment import MAX_STRAIN, Environment, Reward, Source, Transition, rollout
from relaxion.train.experience.structure_replay import capacity_advice, capacity_range
from relaxion.train.judge.assessment import (
    PART,
    AssessedRelaxation,
    AssessedStarts,
    Assessor,
    Filming,
    Relax,
    Stop,
    policy_weights,
)
from relaxion.train.tasks.progress import DIVERGED, DivergedError, named_generator
from relaxion.train.tasks.relax_settings import AtomTaskSettings, RelaxRunSettings, reward_weights
from relaxion.train.tasks.settings import Packed

COMPARED = ("BFGS", "FIRE")
SIDES = ("training", "validation", "held_apart")
STATES_PER_TRANSITION = 1.5  # a running relaxation has one of each; short ones have an end more
SIDE_SEEDS = (0, 20, 9000)  # of random structures and of assessed starts, whatever the run's seed


@dataclass(frozen=True)
class RelaxTask:
    """Everything a run needs of the world outside."""

    settings: RelaxRunSettings
    potential: Potential
    pools: dict[str, Structures]  # by side

    def environment(self, side: str = "training", engine: Potential | None = None) -> Environment:
        """Relaxations of the structures of one side; `engine`: another counter of force calls."""
        atoms = self.settings.atoms
        reward = Reward(reward_weights(atoms.reward))
        starts = PerturbedStarts(self.pools[side], [perturbation(atoms.perturbation)])
        return Environment(engine or self.potential, starts, self.settings.environment, reward)

    def assessor(self) -> Assessor:
        """Fixed starts held out, the same for every agent and seed."""
        return self._assessor(self.settings.atoms.assess_on, COMPARED)

    def validation_assessor(self) -> Assessor | None:
        """As many starts to choose a policy by; None where the assessor takes them already."""
        return None if self.settings.atoms.assess_on == "validation" else self._assessor("validation", ())

    def _assessor(self, side: str, compared: Sequence[str]) -> Assessor:
        settings = self.settings
        world = self.settings.environment

        def starts() -> list[AssessedStarts]:
            generator = named_generator(SIDE_SEEDS[SIDES.index(side)], "assessment")
            state = self.environment(side).reset(generator, settings.training.assessment_starts)
            return [AssessedStarts("", self.potential, state.structures)]

        return Assessor(starts, world.force_tolerance_ev_per_angstrom, world.max_force_calls, compared)

    def following(self, policy: Callable[[State], Move]) -> Relax:
        """Relaxations that follow the policy alone, all at once on the batched potential."""

        def relax(engine: Potential, structures: Structures, stop: Stop | None) -> list[AssessedRelaxation]:
            environment = self.environment(self.settings.atoms.assess_on, engine)

            def act(state: State) -> Move:
                if stop is not None and stop():
                    raise AssessmentStopped
                move = policy(state)
                if not (torch.isfinite(move.displacements).all() and torch.isfinite(move.strains).all()):
                    step = int(state.calls.max()) - 1
                    raise RunError(f"the policy's move in step {step} of an assessment is not finite; {DIVERGED}")
                return move

            found = rollout(environment, act, environment.begin(structures))
            filming = Filming(structures)
            for places, state in found.visited:
                filming.shoot(places, state)
            filming.shoot(torch.arange(len(structures)), found.ends)
            converged = found.outcomes == Outcome.CONVERGED
            calls = torch.where(converged, found.calls, environment.settings.max_force_calls)
            return filming.relaxed(found.outcomes, calls, found.returns, found.lengths)

        return relax

    @property
    def mean_atoms(self) -> float:
        return self.pools["training"].n_atoms / self.pools["training"].n_structures

    @property
    def replay_capacity(self) -> int:
        """Transitions in replay: as many as asked for, or the most that suit these structures (R8.1)."""
        advised = max(capacity_range(self.mean_atoms)[1], self.settings.environment.n_structures)
        return self.settings.training.capacity(advised)

    @property
    def atom_capacity(self) -> int:
        """Rows for the states of `replay_capacity` transitions, and for the largest step that may come on top."""
        largest = int(self.pools["training"].counts.max())
        # relaxations of a few steps have a state more each; a step writes two states of every structure at worst
        return (
            round(STATES_PER_TRANSITION * self.replay_capacity * self.mean_atoms)
            + 4 * self.settings.environment.n_structures * largest
        )


def relax_task(settings: RelaxRunSettings) -> RelaxTask:
    """The task of these settings, refused in one sentence when it cannot be learned here."""
    engine = potential(settings.atoms.potential)
    task = RelaxTask(settings, engine, _pools(settings.atoms, engine))
    if (advice := capacity_advice(task.replay_capacity, task.mean_atoms)) is not None:
        warnings.warn(advice, RelaxionWarning, stacklevel=2)
    return task


def _pools(atoms: AtomTaskSettings, engine: Potential) -> dict[str, Structures]:
    perturbation(atoms.perturbation)  # wrong words are refused before anything is built
    source = structure_source(atoms.structures)
    made = [source(atoms.n_pooled, named_generator(seed, "structures"), engine) for seed in SIDE_SEEDS]
    sizes = range(atoms.fewest_atoms, atoms.most_atoms + 1)
    pools = held_apart_sides(atoms.held_apart, [[i for i in images if len(i) in sizes] for images in made])
    found: dict[str, Structures] = {}
    for side, images in zip(SIDES, pools, strict=True):
        if not images:
            n_made = len(made[SIDES.index(side)])
            raise SettingsError(
                f"no structure is left for {side.replace('_', ' ')}: {atoms.structures} has {n_made}, none with "
                f"{atoms.fewest_atoms} to {atoms.most_atoms} atoms on that side of held_apart = '{atoms.held_apart}'; "
                "widen one of them"
            )
        found[side] = Structures.from_ase(images, cell_free=atoms.cell_free)
        try:
            engine.check_elements(found[side])
        except MissingElementError as error:
            advice = "choose other structures or potential"
            raise MissingElementError(f"structures = '{atoms.structures}': {error}; {advice}") from error
    return found


def packed(settings: RelaxRunSettings, stored: Stored) -> Packed:
    """With results on what was held out for them, also where the run itself looked at other structures."""
    atoms = settings.atoms.model_copy(update={"assess_on": "held_apart"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RelaxionWarning)  # advice for training comes too late
        task = relax_task(replace(settings, atoms=atoms))
    kept = stored.part(PART)
    weights = policy_weights(kept or stored.part("agent"))
    trained = task.pools["training"]
    return Packed(
        networks={"policy": network_of(settings.policy, weights, stochastic=settings.agent_name == "sac")},
        card={
            "elements": tuple(chemical_symbols[number] for number in trained.atomic_numbers.unique().tolist()),
            "smallest_n_atoms": int(trained.counts.min()),
            "largest_n_atoms": int(trained.counts.max()),
            "potential": atoms.potential,
            "starts": (atoms.structures, f"perturbed by {atoms.perturbation}", f"held out by {atoms.held_apart}"),
            "cells": "free" if atoms.cell_free else "fixed",
            "force_tolerance_ev_per_angstrom": settings.environment.force_tolerance_ev_per_angstrom,
            "agent": _trained_by(settings),
            "policy_step": int(kept["numbers"][0]) if kept else None,
        },
        assessor=task.assessor(),
        relax=lambda bundle: task.following(policy_of(bundle)),
        same_starts=settings.atoms.assess_on == "held_apart",
    )


def _trained_by(settings: RelaxRunSettings) -> str:
    """Who trained it, in words."""
    if settings.fit is None or settings.fit.fit_updates == 0:
        return settings.agent_name
    reinforced = settings.training.steps > settings.fit.fit_updates
    return f"imitation, then {settings.agent_name}" if reinforced else "imitation"


GENERATORS = ("exploration", "starts", "expert")  # those that collecting draws from


@dataclass(frozen=True, eq=False)
class Collected:
    """What one step brought."""

    transition: Transition
    state: State  # where the next step begins: new starts in place of what is finished
    force_calls: int  # of the step and of the new starts


class RelaxCollector:
    """`collect` is a function of state, generators, weights, `n_stored` and `step`, and of nothing else."""

    def __init__(
        self, settings: RelaxRunSettings, task: RelaxTask, agent: Any, generators: Mapping[str, Generator]
    ) -> None:
        training = settings.training
        atoms = settings.atoms
        self.settings = settings
        self.potential = task.potential
        self.generators = generators
        self.environment = task.environment()
        self.exploration = Exploration(
            agent,
            action_domain(settings),
            generators["exploration"],
            warmup_steps=training.warmup_steps,
            noise=training.noise_schedule(agent),
            random_warmup=settings.stiffness is None,  # a stiffness policy goes downhill, learned or not
        )
        self.expert = Expert()
        self.expert_share = LinearSchedule(atoms.expert_share, 0.0, atoms.expert_steps)

    def begin(self) -> tuple[State, int]:
        """New relaxations, and the force calls of their starts."""
        before = self.potential.calls
        return self.environment.reset(self.generators["starts"]), self.potential.calls - before

    def collect(self, state: State, n_stored: int, step: int) -> Collected:
        """`n_stored` transitions and `step` environment steps are what the learner has at the moment."""
        before = self.potential.calls
        transition = self.environment.step(state, *self.proposed(state, n_stored, step))
        renewed = self.environment.renew(transition, self.generators["starts"])
        return Collected(transition, renewed, self.potential.calls - before)

    def proposed(self, state: State, n_stored: int, step: int) -> tuple[Move, Tensor]:
        """The move of the policy, of chance or of the expert, and which of them it was."""
        seen = with_graph(state, self.settings.networks.cutoff_angstrom)
        own = self._lengthened(self.exploration(seen, n_stored, step).to(state.structures.dtype), state)
        if not (torch.isfinite(own.displacements).all() and torch.isfinite(own.strains).all()):
            raise DivergedError("the policy's move", {"step": step, "displacements": own.displacements.tolist()})
        who = Source.RANDOM if self.exploration.at_random(n_stored) else Source.POLICY
        return guided(state, own, who, self.expert, self.expert_share(step), self.generators["expert"])

    def _lengthened(self, move: Move, state: State) -> Move:
        """Whole moves longer or shorter by chance, inside the bounds."""
        if (size := self.settings.atoms.exploration_length_noise) == 0:
            return move
        noise = torch.randn(state.n_structures, generator=self.generators["exploration"], dtype=state.structures.dtype)
        world = self.settings.environment
        longer = move.scaled(torch.exp(size * noise), state.structures)
        return longer.bounded(state.structures, world.max_displacement_angstrom, MAX_STRAIN)


class StiffnessForceActions(StiffnessActions, ForceMoveActions):
    """Noise in units of the forces; the choice has the dimensions of a stiffness policy's gate."""


def action_domain(settings: RelaxRunSettings) -> ForceMoveActions:
    """Noise in units of F/k, the step the forces around an atom ask for: it shrinks on the way to the minimum."""
    world = settings.environment
    kind = ForceMoveActions if settings.stiffness is None else StiffnessForceActions
    return kind(world.max_displacement_angstrom, MAX_STRAIN)


def make_agent(settings: RelaxRunSettings, generator: Generator, penalty: PolicyPenalty | None = None) -> LearningAgent:
    """The agent of a run, with fresh networks, whatever kind its policy is."""
    policy = settings.policy
    return atom_agent(
        action_domain(settings),
        generator,
        settings.agent,
        settings.networks,
        penalty,
        policy if isinstance(policy, StiffnessSettings) else None,
        settings.atoms.critic_updates_before,
    )


# ---- The expert: a classical optimizer that proposes single steps, each from nothing but the state it is asked about.
#
# It is pure, as the environment is: the one secant it needs (last move, change of forces) is part of the state. So an
# expert transition joins the very states it came from, also where the step before was the policy's own (R8.2).

LONGEST_STEP = 0.3  # Å; no atom goes farther in one step: the relaxer's first trust radius


class Expert:
    """`expert(state)` answers with one step for every structure."""

    def __init__(self) -> None:
        trust = TrustRegionSettings(first=LONGEST_STEP, largest=LONGEST_STEP)
        self._method = ClassicalSettings(trust)

    def __call__(self, state: State) -> Move:
        """Single steps (never a jump to the minimum), zero for atoms that may not move."""
        displacements = []
        strains = []
        ends = state.structures.counts.cumsum(0).tolist()
        for number, end in enumerate(ends):
            rows = slice(end - int(state.structures.counts[number]), end)
            step = self._step(state, number, rows)
            n_atoms = rows.stop - rows.start
            displacements.append(step[:n_atoms])
            strain = step[n_atoms:] / cell_factor_of(state.structures.atomic_numbers[rows].numpy())
            strains.append((strain + strain.T) / 2 if len(strain) else np.zeros((3, 3)))
        move = Move(torch.from_numpy(np.concatenate(displacements)), torch.from_numpy(np.stack(strains)))
        return move.to(state.structures.dtype).allowed(state.structures)

    def _step(self, state: State, number: int, rows: slice) -> Array:
        """One step in the coordinates of the optimizer: atoms, then a factor × strain where the cell is free."""
        stepper = Stepper(self._method)
        geometry = _geometry(state, number, rows)
        forces = _numpy(state.evaluation.forces[rows]) * geometry.free[: geometry.n_atoms]
        if not geometry.cell_factor:
            stepper.secants.recent = _secants(state, rows, forces)
        else:
            # the stress before the last move is not part of a state, so a free cell has no whole secant
            assert state.evaluation.stresses is not None
            pull = -geometry.volume * _numpy(state.evaluation.stresses[number]) / geometry.cell_factor
            forces = np.concatenate([forces, pull])
        start = np.zeros_like(forces)
        point = Point(start, forces, float(state.evaluation.energies[number]), geometry)
        (hessians,) = hessians_at([Base(point)], [Models()])
        return stepper.step_from(point, hessians).step


def _geometry(state: State, number: int, rows: slice) -> Geometry:
    structures = state.structures
    movable = np.repeat(_numpy(structures.movable[rows])[:, None], 3, axis=1).astype(bool)
    is_free = bool(structures.cell_free[number])
    numbers = structures.atomic_numbers[rows].numpy()
    free = np.concatenate([movable, np.ones((3, 3), dtype=bool)]) if is_free else movable
    return Geometry(
        positions=_numpy(structures.positions[rows]),
        cell=_numpy(structures.cells[number]),
        periodic=structures.periodic[number].numpy(),
        numbers=numbers,
        free=free,
        cell_factor=cell_factor_of(numbers) if is_free else 0.0,
        ase_cell_factor=float(len(movable)) if is_free else 0.0,
    )


def _secants(state: State, rows: slice, forces: Array) -> list[Secant]:
    """The secant of the last move, if there was one and it met positive curvature."""
    step = _numpy(state.last_move.displacements[rows])
    drop = (_numpy(state.last_forces[rows]) - forces) * _numpy(state.structures.movable[rows])[:, None]
    secant = Secant(step, drop)
    return [secant] if secant.curvature > 1e-5 * float(np.vdot(step, step)) else []


def _numpy(values: Tensor) -> Array:
    return values.detach().to(torch.float64).numpy()


def guided(
    state: State, own: Move, who: Source, expert: Callable[[State], Move], share: float, generator: Generator
) -> tuple[Move, Tensor]:
    """Each structure moves as the expert says with probability `share`, else as `own` says; and who it was (R8.3).

    The expert is asked only about the structures it is to move: it looks at one after the other.
    """
    by_expert = torch.rand(state.n_structures, generator=generator) < share
    sources = torch.where(by_expert, int(Source.EXPERT), int(who))
    if not bool(by_expert.any()):
        return own, sources
    demonstrated = expert(state.select(by_expert))
    displacements = own.displacements.clone()
    strains = own.strains.clone()
    displacements[by_expert[state.structures.structure_index]] = demonstrated.displacements.to(displacements.dtype)
    strains[by_expert] = demonstrated.strains.to(strains.dtype)
    return Move(displacements, strains), sources
