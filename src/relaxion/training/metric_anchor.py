"""What replay says of the metric: secants, the longest of them from a state to the end of its finished relaxation.

A state s and a later one s″ of the same relaxation say B·(x″ - x) ≈ F - F″, exactly so however loose the tolerance is
that the relaxation ended at. Where it converged s″ is its end, elsewhere the next state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from relaxion.experience.replay import draw_without_replacement
from relaxion.experience.structure_replay import StructureReplay
from relaxion.networks.metric.lessons import way_to
from relaxion.networks.metric.network import Frame, MetricNetwork, pulls_of
from relaxion.networks.metric.solve import solve
from relaxion.networks.metric.stiffness import Unknowns
from relaxion.networks.strains import strain_vectors
from relaxion.networks.surroundings import with_graph
from relaxion.structures import Move, Outcome, State

SMALLEST_SQUARE = 1e-10  # of a relative error, where its root would have no gradient
SMALLEST_SIZE = 1e-8  # eV: secants that cost the springs less are rounding in float32
SMALLEST_CURVATURE = 0.02  # of the springs' own: softer ones, and those that bend downwards, are no stiffness


@dataclass(frozen=True, eq=False)
class Secants:
    """States, the way from each to a later one, and by how much the pulls have dropped on it."""

    state: State
    way: Move
    drop: Unknowns  # float64


class ReplaySecants:
    """Draws from a replay; all that is random comes from the generator, which its owner saves."""

    def __init__(self, replay: StructureReplay, number: int, farthest_angstrom: float, generator: Generator) -> None:
        self.replay, self.number, self.farthest, self.generator = replay, number, farthest_angstrom, generator

    def sample(self) -> Secants | None:
        """As many as there are among `number` transitions; None where none is of use."""
        replay = self.replay
        number = min(self.number, len(replay))
        if number == 0:
            return None
        first = replay.oldest + draw_without_replacement(len(replay), number, self.generator)
        places = first % replay.capacity
        last = last_of(replay, places)
        ended = replay.outcomes[last] == Outcome.CONVERGED
        state = replay.store.read(replay.states[places])
        later = replay.store.read(replay.next_states[torch.where(ended, last, places)])
        return secants_between(state, later, self.farthest)


def last_of(replay: StructureReplay, places: Tensor) -> Tensor:
    """Where the newest transition of each one's relaxation lies."""
    last = places
    while True:
        followers = replay.followers[last]
        goes_on = followers >= replay.oldest
        if not bool(goes_on.any()):
            return last
        last = torch.where(goes_on, followers % replay.capacity, last)


def secants_between(state: State, later: State, farthest_angstrom: float) -> Secants | None:
    """Those that are no farther apart, in Å."""
    way = way_to(later.structures, state.structures)
    near = way.largest_displacements(state.structures) < farthest_angstrom
    if not bool(near.any()):
        return None
    drop = pulls_of(state) - pulls_of(later)
    counts = state.structures.counts
    drop = Unknowns(drop.atoms[near[state.structures.structure_index]], drop.cells[near])
    return Secants(state.select(near), way.select(counts, near), drop)


def secant_errors(network: MetricNetwork, secants: Secants) -> Tensor:
    """How far B⁻¹(F - F″) misses x″ - x, relative to its length, in the springs' energy, (n_of_use,)."""
    settings = network.settings
    state = replace(secants.state, graph=None)
    structures = state.structures
    frame = Frame.of(with_graph(state, settings.cutoff_angstrom), settings, network.dtype)
    goal = Unknowns(secants.way.displacements.double(), strain_vectors(secants.way.strains).double())
    with torch.no_grad():
        springs = frame.prior(settings).to(torch.float64)
        size = goal.dot(springs.apply(goal), structures)
        good = (size > SMALLEST_SIZE) & (goal.dot(secants.drop, structures) > SMALLEST_CURVATURE * size)
    missed = solve(network.stiffness(frame), secants.drop) - goal
    squares = missed.dot(springs.apply(missed), structures) / size.clamp_min(SMALLEST_SIZE)
    return torch.sqrt(squares[good] + SMALLEST_SQUARE)
