"""One relaxation as a Gymnasium environment, with a graph or with a padded vector to look at.

The cell is fixed here; relaxations with a free cell are the business of `relaxion.train.experience.Environment`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

import relaxion
from relaxion.errors import StructureError
from relaxion.potentials.base import Potential
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.structures.structures import per_structure_sum
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.perturbations import rattle
from relaxion.train.data.starts import PerturbedStarts, Starts
from relaxion.train.experience.environment import Environment, EnvironmentSettings
from relaxion.train.experience.reward import Reward, largest_force

Floats = NDArray[np.float32]

WIDEST = 1e4  # Å or eV/Å; what a graph observation shows of larger numbers
HIGHEST = 10.0  # what a padded observation shows of larger numbers
POOL_SIZE = 64  # different alloys to start from
POOL_SEED = 0  # the alloys are the same for every seed; what the seed decides is which of them, and how rattled


class RelaxEnvironment(gymnasium.Env):
    """What both environments share: actions, episodes, seeds. An action is a displacement per atom.

    Actions in [-1, 1] are scaled by the largest displacement; rows without an atom do nothing.
    `terminated` means converged; every other end is a truncation, named in `info["outcome"]`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - so declared by gymnasium.Env
    graph_cutoff_angstrom: float | None = None

    def __init__(
        self,
        potential: str | Potential = "emt",
        elements: Sequence[str] = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au"),
        n_atoms: int | Sequence[int] = 4,
        rattle_angstrom: float = 0.2,
        starts: Starts | None = None,
        max_atoms: int | None = None,
        settings: EnvironmentSettings | None = None,
        reward: Reward | None = None,
        render_mode: None = None,
    ) -> None:
        """`starts`, with `max_atoms`, replaces the rattled alloys of `elements` and `n_atoms`."""
        sizes = [n_atoms] if isinstance(n_atoms, int) else list(n_atoms)
        self.max_atoms = max_atoms or max(sizes)
        settings = settings or EnvironmentSettings()
        cutoff = settings.graph_cutoff_angstrom or self.graph_cutoff_angstrom
        self.environment = Environment(
            potential if isinstance(potential, Potential) else relaxion.potential(potential),
            starts or alloy_starts(elements, sizes, rattle_angstrom),
            settings.model_copy(update={"graph_cutoff_angstrom": cutoff}),
            reward,
        )
        self.render_mode = render_mode
        self.generator = torch.Generator().manual_seed(0)
        self.state: State | None = None

    @abstractmethod
    def observe(self, state: State) -> Any:
        """What the agent sees."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None or self.state is None:
            self.generator.manual_seed(int(self.np_random.integers(2**63 - 1)))
        self.state = self.environment.reset(self.generator, 1)
        if self.state.structures.n_atoms > self.max_atoms:
            raise StructureError(
                f"a start has {self.state.structures.n_atoms} atoms, more than max_atoms={self.max_atoms}"
            )
        return self.observe(self.state), _info(self.state, Outcome.RUNNING, 0.0)

    def step(self, action: Floats) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.state is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        transition = self.environment.step(self.state, self._move(action, self.state.structures))
        self.state = transition.next_state
        outcome = Outcome(int(transition.outcome[0]))
        terminated = outcome is Outcome.CONVERGED
        truncated = not terminated and outcome is not Outcome.RUNNING
        info = _info(self.state, outcome, float(transition.back_off[0]))
        return self.observe(self.state), float(transition.reward[0]), terminated, truncated, info

    def _move(self, action: Floats, structures: Structures) -> Move:
        rows = torch.as_tensor(np.asarray(action, dtype=np.float64)).reshape(self.max_atoms, 3)
        longest = self.environment.settings.max_displacement_angstrom
        return Move(longest * rows[: structures.n_atoms], torch.zeros_like(structures.cells))


class RelaxGraph(RelaxEnvironment):
    """The observation is a graph in physical units.

    Nodes: atomic number, movable (1) or fixed (0), position from the centroid (Å), force (eV/Å), last
    displacement (Å). Edges: the vector from an atom to its neighbour's image (Å).
    """

    graph_cutoff_angstrom = 5.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Graph(
            node_space=spaces.Box(-WIDEST, WIDEST, (11,), np.float32),
            edge_space=spaces.Box(-WIDEST, WIDEST, (3,), np.float32),
        )
        self.action_space = spaces.Box(-1.0, 1.0, (self.max_atoms, 3), np.float32)

    def observe(self, state: State) -> spaces.GraphInstance:
        structures, graph = state.structures, state.graph
        assert graph is not None  # the cutoff is always set above
        nodes = torch.cat(
            [
                structures.atomic_numbers[:, None],
                structures.movable[:, None],
                centred(structures),
                state.evaluation.forces,
                state.last_move.displacements,
            ],
            dim=1,
        )  # (n_atoms, 11)
        links = torch.stack([graph.centers, graph.neighbors], dim=1)  # (n_pairs, 2)
        edges = graph.vectors(structures)
        return spaces.GraphInstance(_clipped(nodes, WIDEST), _clipped(edges, WIDEST), links.numpy())


class RelaxPadded(RelaxEnvironment):
    """The observation is a vector of fixed length, scaled for networks; rows of absent atoms are zero.

    Per atom: present, movable, atomic number / 100, position from the centroid / 10 Å, force (its length as
    log10(1 + |F| / tolerance)), last displacement / largest displacement.
    """

    columns = 12

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Box(-HIGHEST, HIGHEST, (self.max_atoms * self.columns,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (self.max_atoms * 3,), np.float32)

    def observe(self, state: State) -> Floats:
        structures, settings = state.structures, self.environment.settings
        features = torch.cat(
            [
                torch.ones(structures.n_atoms, 1),
                structures.movable[:, None],
                structures.atomic_numbers[:, None] / 100,
                centred(structures) / 10,
                _logarithmic(state.evaluation.forces, settings.force_tolerance_ev_per_angstrom),
                state.last_move.displacements / settings.max_displacement_angstrom,
            ],
            dim=1,
        )  # (n_atoms, 12)
        padded = torch.zeros(self.max_atoms, self.columns, dtype=features.dtype)
        padded[: structures.n_atoms] = features
        return _clipped(padded.flatten(), HIGHEST)


def alloy_starts(elements: Sequence[str], sizes: Sequence[int], rattle_angstrom: float) -> Starts:
    """Rattled close-packed alloys of the given numbers of atoms."""
    generator = torch.Generator().manual_seed(POOL_SEED)
    pools = [fcc_alloys(elements, POOL_SIZE, generator, n_atoms=size) for size in sizes]
    return PerturbedStarts(Structures.concatenate(pools), [lambda s, g: rattle(s, g, size_angstrom=rattle_angstrom)])


def centred(structures: Structures) -> Tensor:
    """Positions from the centroid of each structure: the same wherever it lies."""
    sums = per_structure_sum(structures.positions, structures.structure_index, structures.n_structures)
    return structures.positions - (sums / structures.counts[:, None])[structures.structure_index]  # (n_atoms, 3) Å


def _logarithmic(vectors: Tensor, scale: float) -> Tensor:
    lengths = vectors.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return vectors / lengths * torch.log10(1 + lengths / scale)


def _clipped(values: Tensor, limit: float) -> Floats:
    return values.clamp(-limit, limit).numpy().astype(np.float32)


def _info(state: State, outcome: Outcome, back_off: float) -> dict[str, Any]:
    return {
        "outcome": outcome.label,
        "force_calls": int(state.calls[0]),
        "largest_force_ev_per_angstrom": float(largest_force(state.structures, state.evaluation)[0]),
        "energy_ev": float(state.evaluation.energies[0]),
        "back_off": back_off,
    }
