"""The environment: thousands of relaxations side by side, as pure functions of state, move and generator.

First what a step is worth, and the one measure of how far from relaxed a structure is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Self, cast

import torch
from pydantic import Field
from torch import Generator, Tensor

from relaxion.errors import SettingsError, StructureError
from relaxion.model.solve import solve
from relaxion.model.stiffness_network import SolveInputs, StiffnessSettings
from relaxion.potentials.base import Potential
from relaxion.settings import Settings, by_name, nearest
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.structures.minimum_distance import Nearest, correct
from relaxion.structures.structures import per_structure_max
from relaxion.train.data.starts import Starts

LOWEST_FORCE = 1e-3  # eV/Å: forces below count as this much, so that no reward runs to infinity on the last step
HIGHEST_FORCE = 1e3  # eV/Å: forces above count as this much, so that a bad start does not drown all others
LARGEST_ENERGY_CHANGE = 10.0  # eV per atom: larger changes count as this much, for the same reason
SMALLEST_GAP = 1e-6  # eV per atom above the minimum: smaller gaps count as this much, so for the last step again
LARGEST_GAP_RATIO = 30.0  # of the gaps before and after a step


def largest_force(structures: Structures, evaluation: Evaluation) -> Tensor:
    """Largest force on a movable atom; where the cell is free, also on the cell.

    The force on a cell is a row of -V·stress / n_atoms, as ASE's FrechetCellFilter shows it at zero strain,
    so that convergence means here what it means there.
    """
    lengths = evaluation.forces.norm(dim=1) * structures.movable
    largest = per_structure_max(lengths, structures.structure_index, structures.n_structures)
    if not structures.cell_free.any():
        return largest  # (n_structures,) eV/Å
    if evaluation.stresses is None:
        raise SettingsError("a cell is free but the evaluation holds no stress; evaluate with stresses=True")
    per_atom = structures.volumes / structures.counts
    cell_forces = evaluation.stresses.norm(dim=2).amax(dim=1) * per_atom
    return torch.where(structures.cell_free, torch.maximum(largest, cell_forces), largest)


@dataclass(frozen=True, eq=False)
class StepProgress:
    """One step of many structures, as rewards see it: all (n_structures,), already cut to their ranges."""

    force_before: Tensor  # eV/Å
    force_after: Tensor  # eV/Å
    energy_decrease: Tensor  # eV per atom
    end: Structures
    after: Evaluation

    @cached_property
    def log_gap_decrease(self) -> Tensor:
        """Decades that the energy came nearer to the minimum.

        How far above it the end still is, springs B guess: ½ F·B⁻¹F. The start was higher by what the step brought.
        """
        inputs = SolveInputs.of(State.without_past(self.end, self.after, 0.0), StiffnessSettings(), torch.float64)
        gap = inputs.pulls.dot(solve(inputs.prior(), inputs.pulls), self.end) / (2 * self.end.counts)
        gap = gap.clamp_min(SMALLEST_GAP)  # (n_structures,) eV per atom
        return torch.log10((1 + self.energy_decrease / gap).clamp(1 / LARGEST_GAP_RATIO, LARGEST_GAP_RATIO))


REWARDS: dict[str, Callable[[StepProgress], Tensor]] = {
    "force": lambda progress: -progress.force_after,
    "log_force": lambda progress: -torch.log10(progress.force_after),
    "step": lambda progress: -torch.ones_like(progress.force_after),
    "energy": lambda progress: progress.energy_decrease,
    "log_force_decrease": lambda progress: torch.log10(progress.force_before / progress.force_after),
    "log_gap_decrease": lambda progress: progress.log_gap_decrease,
}


BACK_OFF = "back_off"  # among the rewards: what a move that was wholly undone costs
BACK_OFF_COST = 0.5  # unless a sum names it; half a decade of force


def reward_named(name: str) -> Callable[[StepProgress], Tensor]:
    """One of ours, or `module:function` of the user."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise SettingsError(f"unknown reward '{name}': {nearest(name, REWARDS)}, or module:function for your own")
    found = by_name(name, "reward")
    if not callable(found):
        raise SettingsError(f"the reward '{name}' is a {type(found).__name__}; give a function of a StepProgress")
    return cast(Callable[[StepProgress], Tensor], found)


class Reward:
    """A weighted sum of rewards, minus the penalty for back-off."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Rewards and what back-off costs.

        weights: of each reward in the sum; None: the decrease of the log force, which is stable from any start. That of
        `back_off` is taken off for a move wholly undone, in proportion for a part.
        """
        self.weights = dict(weights or {"log_force_decrease": 1.0})
        self.back_off_cost = self.weights.get(BACK_OFF, BACK_OFF_COST)
        self.terms = [(weight, reward_named(name)) for name, weight in self.weights.items() if name != BACK_OFF]

    def __call__(
        self, start: Structures, before: Evaluation, end: Structures, after: Evaluation, back_off: Tensor
    ) -> Tensor:
        """The reward of the step from `start` to `end`."""
        decrease = (before.energies - after.energies) / start.counts
        progress = StepProgress(
            force_before=largest_force(start, before).clamp(LOWEST_FORCE, HIGHEST_FORCE),
            force_after=largest_force(end, after).clamp(LOWEST_FORCE, HIGHEST_FORCE),
            energy_decrease=decrease.clamp(-LARGEST_ENERGY_CHANGE, LARGEST_ENERGY_CHANGE),
            end=end,
            after=after,
        )
        terms = [weight * term(progress) for weight, term in self.terms]
        return torch.stack(terms).sum(dim=0) - self.back_off_cost * back_off  # (n_structures,)


# ---- the environment

BLOCKED_BACK_OFF = 0.99  # blocked when at least this fraction of a move is undone
STALL_LENGTH = 1e-5  # Å: stalled when no atom or cell edge moves farther; 1e-3 eV/Å against a stiff bond of 100 eV/Å²
MAX_STRAIN = 0.1  # Frobenius norm, of one step of a free cell
TRUST_RADIUS = 0.3  # Å, at the start; the environment only carries it, a policy may change it
# Taken off the reward when the potential answers NaN or infinity. Our agents never learn from it, since replay leaves
# such steps out (they join no two states); agents of others, who come through Gymnasium, may.
NON_FINITE_PENALTY = 1.0
LARGEST_START_FORCE = 1e4  # eV/Å: starts with a larger force are drawn again, atoms on top of each other teach nothing
START_TRIES = 20  # how often an unusable start is drawn again before an error


class Source(IntEnum):
    """Who proposed a move."""

    POLICY = 0
    RANDOM = 1
    EXPERT = 2


@dataclass(frozen=True, eq=False)
class Transition:
    """State, move and what came of it. `discount` is γ, and 0 only where the relaxation converged."""

    state: State
    proposed: Move  # what was asked for
    executed: Move  # what was done, measured without wrapping
    reward: Tensor  # (n_structures,)
    discount: Tensor  # (n_structures,)
    next_state: State
    source: Tensor  # (n_structures,) int64, `Source`
    outcome: Tensor  # (n_structures,) int64, `Outcome`
    back_off: Tensor  # (n_structures,) 0 free … 1 blocked

    @property
    def n_structures(self) -> int:
        return self.state.n_structures

    @property
    def finished(self) -> Tensor:
        """Which relaxations are over, for whatever reason."""
        return self.outcome != Outcome.RUNNING  # (n_structures,) bool

    def select(self, which: Tensor) -> Self:
        """The transitions numbered or masked by `which`, in that order."""
        which = which.nonzero().flatten() if which.dtype == torch.bool else which
        counts = self.state.structures.counts
        return replace(
            self,
            state=self.state.select(which),
            proposed=self.proposed.select(counts, which),
            executed=self.executed.select(counts, which),
            reward=self.reward[which],
            discount=self.discount[which],
            next_state=self.next_state.select(which),
            source=self.source[which],
            outcome=self.outcome[which],
            back_off=self.back_off[which],
        )


class EnvironmentSettings(Settings):
    """What a relaxation is: when it ends, how far a step may go, where it may begin."""

    n_structures: int = Field(default=64, ge=1)
    """Relaxations side by side. 64 small ones cost a batched potential little more than one."""

    force_tolerance_ev_per_angstrom: float = Field(default=0.05, gt=0)
    """Converged at or below. ASE's customary fmax."""

    max_force_calls: int = Field(default=100, ge=2)
    """Force calls per relaxation, the first included. Several times what BFGS needs on small alloys."""

    discount_factor: float = Field(default=0.95, ge=0, le=1)
    """γ. Looks some 20 steps ahead: a whole relaxation of a small cell."""

    max_displacement_angstrom: float = Field(default=0.5, gt=0)
    """Farthest an atom moves in one step; the whole move is scaled. Wide: small boxes lose to BFGS."""

    minimum_distance_angstrom: float = Field(default=0.7, gt=0)
    """No step brings two atoms nearer. Just below the shortest bond there is (H2, 0.74 Å)."""


class Environment:
    """`reset`, `step` and `renew` alone touch the potential, whose call counter is all that ever changes."""

    def __init__(
        self,
        potential: Potential,
        starts: Starts,
        settings: EnvironmentSettings | None = None,
        reward: Reward | None = None,
    ) -> None:
        """Relaxations with one potential.

        starts: draws the structures that relaxations begin with.
        settings: when a relaxation ends and how far a step may go.
        reward: of a step.
        """
        self.potential = potential
        self.starts = starts
        self.settings = settings or EnvironmentSettings()
        self.reward = reward or Reward()
        self.nearest = Nearest(self.settings.minimum_distance_angstrom)

    def reset(self, generator: Generator, n_structures: int | None = None) -> State:
        """New relaxations. Starts that are not finite, too wild or already relaxed are drawn again."""
        wanted = n_structures or self.settings.n_structures
        state = self.begin(self.starts.sample(generator, wanted))
        unusable = self._unusable(state)
        for _ in range(START_TRIES):
            if len(unusable) == 0:
                break
            state = replaced(state, unusable, self.begin(self.starts.sample(generator, len(unusable))))
            unusable = self._unusable(state)
        if len(unusable):
            raise StructureError(self._why_unusable(state, unusable))
        return state

    def step(self, state: State, move: Move, source: Source | Tensor = Source.POLICY) -> Transition:
        """Do the move as far as it is allowed; what came of it."""
        settings = self.settings
        move = move.to(state.structures.dtype)  # networks think in float32
        # without the rotation that a raw (3, 3) output may hold: turning a crystal changes no energy
        symmetric = replace(move, strains=(move.strains + move.strains.transpose(1, 2)) / 2)
        proposed = symmetric.allowed(state.structures)
        bounded = proposed.bounded(state.structures, settings.max_displacement_angstrom, MAX_STRAIN)
        correction = correct(state.structures, bounded, self.nearest)
        tried = state.structures.moved(correction.executed)
        answer = self.potential(tried)
        finite = answer.finite(tried)
        next_state = self._next_state(state, correction.executed, tried, answer, finite)
        before = (state.structures, state.evaluation)
        after = (next_state.structures, next_state.evaluation)
        reward = self.reward(*before, *after, correction.back_off)
        outcome = self._outcomes(next_state, correction.executed, correction.back_off, finite)
        sources = source if isinstance(source, Tensor) else torch.full_like(outcome, int(source))
        return Transition(
            state=state,
            proposed=proposed,
            executed=correction.executed,
            reward=reward - NON_FINITE_PENALTY * ~finite,
            discount=self._discounts(outcome, reward.dtype),
            next_state=next_state,
            source=sources,
            outcome=outcome,
            back_off=correction.back_off,
        )

    def renew(self, transition: Transition, generator: Generator) -> State:
        """The next state, with a new start in place of every finished relaxation; the others are kept."""
        finished = transition.finished.nonzero().flatten()
        if len(finished) == 0:
            return transition.next_state
        return replaced(transition.next_state, finished, self.reset(generator, len(finished)))

    def begin(self, structures: Structures) -> State:
        """These structures evaluated, without a past and a graph."""
        return State.without_past(structures, self.potential(structures), TRUST_RADIUS)

    def _unusable(self, state: State) -> Tensor:
        force = largest_force(state.structures, state.evaluation)
        settings = self.settings
        wild = force > LARGEST_START_FORCE
        relaxed = force <= settings.force_tolerance_ev_per_angstrom
        return (~state.evaluation.finite(state.structures) | wild | relaxed).nonzero().flatten()  # numbers

    def _why_unusable(self, state: State, unusable: Tensor) -> str:
        forces = largest_force(state.structures, state.evaluation)[unusable]
        relaxed = int((forces <= self.settings.force_tolerance_ev_per_angstrom).sum())
        settings = self.settings
        return (
            f"{len(unusable)} of {state.n_structures} starts are unusable after {START_TRIES} more "
            f"draws: {relaxed} are relaxed already (tolerance {settings.force_tolerance_ev_per_angstrom} "
            f"eV/Å), {len(unusable) - relaxed} are not finite or above "
            f"{LARGEST_START_FORCE:g} eV/Å; perturb the former more, the latter less"
        )

    def _next_state(self, state: State, executed: Move, tried: Structures, answer: Evaluation, finite: Tensor) -> State:
        after = replace(
            state,
            structures=tried,
            evaluation=answer,
            graph=None,
            last_move=executed,
            last_forces=state.evaluation.forces,
            calls=state.calls + 1,
        )
        if not finite.all():
            # Where the potential failed the last finite state stands, so that no NaN ever enters a replay.
            # The call has been made and counts.
            lost = (~finite).nonzero().flatten()
            still = Move.zero(state.structures)
            stay = replace(after, structures=state.structures, evaluation=state.evaluation, last_move=still)
            after = replaced(after, lost, stay.select(lost))
        return after

    def _outcomes(self, state: State, executed: Move, back_off: Tensor, finite: Tensor) -> Tensor:
        """Later lines overrule earlier ones."""
        settings = self.settings
        structures = state.structures
        edges = structures.cells.norm(dim=2).amax(dim=1)  # (n_structures,) Å
        length = torch.maximum(executed.largest_displacements(structures), executed.strain_sizes() * edges)
        outcome = torch.full_like(state.calls, int(Outcome.RUNNING))
        outcome[state.calls >= settings.max_force_calls] = int(Outcome.STEP_LIMIT)
        outcome[length <= STALL_LENGTH] = int(Outcome.STALLED)
        outcome[back_off >= BLOCKED_BACK_OFF] = int(Outcome.BLOCKED)
        converged = largest_force(structures, state.evaluation) <= settings.force_tolerance_ev_per_angstrom
        outcome[converged] = int(Outcome.CONVERGED)
        outcome[~finite] = int(Outcome.NON_FINITE)
        return outcome  # (n_structures,) int64

    def _discounts(self, outcome: Tensor, dtype: torch.dtype) -> Tensor:
        # Only convergence is an end. Every other outcome cuts the episode short, and the value of going on is
        # still bootstrapped: were it 0, giving up would be the cheapest way out wherever rewards ahead are
        # negative (a terminal penalty of -50 has taught agents just that).
        discounts = torch.full(outcome.shape, self.settings.discount_factor, dtype=dtype)
        return discounts.masked_fill(outcome == Outcome.CONVERGED, 0.0)


def replaced(state: State, places: Tensor, fresh: State) -> State:
    """`state` with the structures of `fresh` in the given places."""
    which = torch.arange(state.n_structures)
    which[places] = state.n_structures + torch.arange(fresh.n_structures)
    return State.concatenate([state, fresh]).select(which)


@dataclass(frozen=True, eq=False)
class Relaxations:
    """What a policy did from given starts, in their order."""

    visited: list[tuple[Tensor, State]]  # numbers of the relaxations still running, and their states
    ends: State
    outcomes: Tensor  # (n_starts,) int64, `Outcome`
    calls: Tensor  # (n_starts,) int64
    returns: Tensor  # (n_starts,) float64, undiscounted
    lengths: Tensor  # (n_starts,) int64, steps


def rollout(environment: Environment, policy: Callable[[State], Move], state: State) -> Relaxations:
    """Follow the policy alone, without the safeguard, from the given states to the end of each relaxation."""
    running = torch.arange(state.n_structures)
    visited = list[tuple[Tensor, State]]()
    outcomes, calls, lengths = (torch.zeros_like(running) for _ in range(3))
    returns = torch.zeros(state.n_structures, dtype=torch.float64)
    finished: list[tuple[Tensor, State]] = []
    while len(running):
        visited.append((running, state))
        with torch.no_grad():
            transition = environment.step(state, policy(state))
        done = transition.finished
        after = transition.next_state
        outcomes[running] = transition.outcome
        calls[running] = after.calls
        returns[running] += transition.reward.double()
        lengths[running] += 1
        if bool(done.any()):
            finished.append((running[done], after.select(done)))
        running = running[~done]
        state = after.select(~done)
    order = torch.argsort(torch.cat([numbers for numbers, _ in finished]))
    ends = State.concatenate([ended for _, ended in finished]).select(order)
    return Relaxations(visited, ends, outcomes, calls, returns, lengths)
