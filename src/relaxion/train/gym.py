"""Relaxations as Gymnasium environments: one, or many in a batch; seen as graphs or as padded vectors.

Importing this module registers `relaxion/Relax-v0` and `relaxion/RelaxPadded-v0`. Gymnasium 1.0 gave up entry points,
so a package cannot be found by its installation alone; imported first, it is found:
`gymnasium.make("relaxion.train.gym:relaxion/Relax-v0")`, and with `make_vec` all structures are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

import relaxion
from relaxion.errors import StructureError
from relaxion.model.stiffness import strain_matrices
from relaxion.potentials.base import Potential
from relaxion.structures import Graph, Move, Outcome, State, Structures
from relaxion.structures.structures import per_structure_sum
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.perturbations import rattle
from relaxion.train.data.starts import PerturbedStarts, Starts
from relaxion.train.experience.environment import MAX_STRAIN, Environment, EnvironmentSettings, Reward, largest_force

Floats = NDArray[np.float32]

WIDEST = 1e4  # Å or eV/Å; what a graph observation shows of larger numbers
HIGHEST = 10.0  # what a padded observation shows of larger numbers
GRAPH_CUTOFF_ANGSTROM = 5.0
SOFT_BOND = 2.5  # eV/Å²; with moves that follow the forces no action goes farther than F over this
POOL_SIZE = 64  # different alloys to start from
POOL_SEED = 0  # the alloys are the same for every seed; what the seed decides is which of them, and how rattled


class View(Protocol):
    """What an agent sees."""

    @property
    def space(self) -> spaces.Space[Any]: ...

    def __call__(self, state: State) -> Any:
        """One observation of each structure, in a list or as rows."""
        ...


class GraphView:
    """A graph in physical units.

    Nodes: atomic number, movable (1) or fixed (0), position from the centroid (Å), force (eV/Å), last
    displacement (Å). Edges: the vector from an atom to its neighbour's image (Å).
    """

    space = spaces.Graph(
        node_space=spaces.Box(-WIDEST, WIDEST, (11,), np.float32),
        edge_space=spaces.Box(-WIDEST, WIDEST, (3,), np.float32),
    )

    def __call__(self, state: State) -> list[spaces.GraphInstance]:
        structures = state.structures
        graph = Graph.of(state.structures, GRAPH_CUTOFF_ANGSTROM)
        columns = [structures.atomic_numbers[:, None], structures.movable[:, None], centred(structures)]
        nodes = torch.cat([*columns, state.evaluation.forces, state.last_move.displacements], dim=1)  # (n_atoms, 11)
        links = torch.stack([graph.centers, graph.neighbors], dim=1).numpy()  # (n_pairs, 2)
        atoms = _clipped(nodes, WIDEST)
        edges = _clipped(graph.vectors(structures), WIDEST)
        pairs = torch.bincount(graph.pair_structure, minlength=len(structures)).cumsum(0)[:-1].tolist()
        starts = [0, *structures.counts.cumsum(0).tolist()]
        cut = (np.split(atoms, starts[1:-1]), np.split(edges, pairs), np.split(links, pairs))
        return [spaces.GraphInstance(n, e, k - start) for n, e, k, start in zip(*cut, starts, strict=False)]


class PaddedView:
    """A vector of fixed length, scaled for networks; rows of absent atoms are zero.

    Per atom: present, movable, atomic number / 100, position from the centroid / 10 Å, force (its length as
    log10(1 + |F| / tolerance)), last displacement / largest displacement. With `n_neighbors` also force / largest force
    and, for so many of its nearest neighbours through periodic images, vector / 5 Å and atomic number / 100; and at the
    end the cell / 10 Å.
    """

    columns = 12
    rich_columns = 15

    def __init__(self, max_atoms: int, settings: EnvironmentSettings, n_neighbors: int) -> None:
        self.max_atoms = max_atoms
        self.settings = settings
        self.n_neighbors = n_neighbors
        rich = max_atoms * (self.rich_columns + 4 * n_neighbors) + 9
        size = rich if n_neighbors else max_atoms * self.columns
        self.space = spaces.Box(-HIGHEST, HIGHEST, (size,), np.float32)

    def __call__(self, state: State) -> Floats:
        structures = state.structures
        settings = self.settings
        columns = [
            torch.ones(structures.n_atoms, 1),
            structures.movable[:, None],
            structures.atomic_numbers[:, None] / 100,
            centred(structures) / 10,
            _logarithmic(state.evaluation.forces, settings.force_tolerance_ev_per_angstrom),
            state.last_move.displacements / settings.max_displacement_angstrom,
        ]
        if self.n_neighbors:
            units = largest_force(structures, state.evaluation).clamp_min(1e-9)[structures.structure_index, None]
            columns += [state.evaluation.forces / units, self._neighbors(structures)]
        features = torch.cat(columns, dim=1)  # (n_atoms, columns)
        padded = features.new_zeros((len(structures) * self.max_atoms, features.shape[1]))
        padded[rows(structures, self.max_atoms)] = features
        padded = padded.view(len(structures), -1)
        if self.n_neighbors:
            padded = torch.cat([padded, structures.cells.flatten(1) / 10], dim=1)
        return _clipped(padded, HIGHEST)

    def _neighbors(self, structures: Structures) -> Tensor:
        """(n_atoms, 4 · n_neighbors), the nearest first."""
        graph = Graph.of(structures, GRAPH_CUTOFF_ANGSTROM)
        vectors = graph.vectors(structures)
        order = torch.argsort(vectors.norm(dim=1), stable=True)
        order = order[torch.argsort(graph.centers[order], stable=True)]
        centers = graph.centers[order]
        counts = torch.bincount(centers, minlength=structures.n_atoms)
        rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[centers]
        near = rank < self.n_neighbors
        seen = torch.cat([vectors[order] / 5, structures.atomic_numbers[graph.neighbors[order], None] / 100], dim=1)
        found = vectors.new_zeros((structures.n_atoms, self.n_neighbors, 4))
        found[centers[near], rank[near]] = seen[near]
        return found.flatten(1)


class World:
    """Structures, potential and rewards of an environment, and what an action means there.

    An action is a displacement per atom; in a free cell six more numbers are a strain. Actions in [-1, 1] are scaled by
    the largest displacement and strain; rows without an atom do nothing.
    """

    def __init__(
        self,
        view: str,
        potential: str | Potential = "emt",
        elements: Sequence[str] = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au"),
        n_atoms: int | Sequence[int] = 4,
        rattle_angstrom: float = 0.2,
        starts: Starts | None = None,
        max_atoms: int | None = None,
        settings: EnvironmentSettings | None = None,
        reward: Reward | None = None,
        recipe: str | None = None,
        side: str = "training",
        n_neighbors: int = 0,
        cell_free: bool = False,
        moves_follow_forces: bool = False,
    ) -> None:
        """Rattled alloys, own starts, or the world of a recipe.

        `starts`, with `max_atoms`, replaces the rattled alloys of `elements` and `n_atoms`. `recipe` names everything
        at once: potential, structures, rewards; of its structures those of `side`, training, validation or held_apart.
        With `moves_follow_forces` an action of 1 is no more than F / 2.5 eV/Å², F the largest force: near the
        minimum the same action is a smaller step.
        """
        if recipe is not None:
            self.environment, self.max_atoms, cell_free = _of_recipe(recipe, side, reward)
        else:
            sizes = [n_atoms] if isinstance(n_atoms, int) else list(n_atoms)
            self.max_atoms = max_atoms or max(sizes)
            engine = potential if isinstance(potential, Potential) else relaxion.potential(potential)
            starts = starts or alloy_starts(elements, sizes, rattle_angstrom, cell_free=cell_free)
            self.environment = Environment(engine, starts, settings, reward)
        padded = PaddedView(self.max_atoms, self.environment.settings, n_neighbors)
        self.moves_follow_forces = moves_follow_forces
        self.view: View = GraphView() if view == "graph" else padded
        shape = (3 * self.max_atoms + 6 * cell_free,)
        self.actions = spaces.Box(-1.0, 1.0, (self.max_atoms, 3) if view == "graph" and not cell_free else shape)

    def begin(self, generator: torch.Generator, number: int) -> State:
        return self.checked(self.environment.reset(generator, number))

    def checked(self, state: State) -> State:
        if (largest := int(state.structures.counts.max())) > self.max_atoms:
            raise StructureError(f"a start has {largest} atoms, more than max_atoms={self.max_atoms}")
        return state

    def move(self, actions: NDArray[Any], state: State) -> Move:
        """Of one action for each structure."""
        settings = self.environment.settings
        structures = state.structures
        flat = torch.as_tensor(np.asarray(actions, dtype=np.float64)).reshape(len(structures), -1)
        atoms = flat[:, : 3 * self.max_atoms].reshape(-1, 3)[rows(structures, self.max_atoms)]
        strains = torch.zeros_like(structures.cells)
        if flat.shape[1] > 3 * self.max_atoms:
            strains = strain_matrices(MAX_STRAIN * flat[:, 3 * self.max_atoms :])
        longest = torch.full((len(structures),), settings.max_displacement_angstrom, dtype=torch.float64)
        if self.moves_follow_forces:
            longest = (largest_force(structures, state.evaluation) / SOFT_BOND).clamp_max(longest)
        return Move(longest[structures.structure_index, None] * atoms, strains)


class RelaxEnvironment(gymnasium.Env):
    """One relaxation. `terminated` means converged; every other end is a truncation, named in `info["outcome"]`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - so declared by gymnasium.Env

    def __init__(self, view: str = "graph", render_mode: None = None, **options: Any) -> None:
        """`options` are those of `World`."""
        self.world = World(view, **options)
        self.environment = self.world.environment
        self.observation_space = self.world.view.space
        self.action_space = self.world.actions
        self.render_mode = render_mode
        self.generator = torch.Generator().manual_seed(0)
        self.state: State | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None or self.state is None:
            self.generator.manual_seed(int(self.np_random.integers(2**63 - 1)))
        self.state = self.world.begin(self.generator, 1)
        return self.world.view(self.state)[0], _of_one(_infos(self.state))

    def step(self, action: Floats) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.state is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        transition = self.environment.step(self.state, self.world.move(action, self.state))
        self.state = transition.next_state
        terminated = bool(transition.outcome[0] == Outcome.CONVERGED)
        truncated = bool(transition.finished[0]) and not terminated
        info = _of_one(_infos(self.state, transition.outcome, transition.back_off))
        return self.world.view(self.state)[0], float(transition.reward[0]), terminated, truncated, info


class RelaxEnvironments(VectorEnv):
    """Many relaxations as one batch. Who ends begins anew in the same step: `infos["final_obs"]` has the ends."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - so declared by VectorEnv
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, num_envs: int = 1, view: str = "graph", render_mode: None = None, **options: Any) -> None:
        """`options` are those of `World`."""
        self.world = World(view, **options)
        self.environment = self.world.environment
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space = self.world.view.space
        self.single_action_space = self.world.actions
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator().manual_seed(0)
        self.state: State | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None or self.state is None:
            self.generator.manual_seed(int(self.np_random.integers(2**63 - 1)))
        self.state = self.world.begin(self.generator, self.num_envs)
        return self._seen(self.state), _masked(_infos(self.state))

    def step(self, actions: Floats) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        if self.state is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        transition = self.environment.step(self.state, self.world.move(actions, self.state))
        after = transition.next_state
        ended = transition.finished.numpy()
        infos = _masked(_infos(after, transition.outcome, transition.back_off))
        if ended.any():
            final = np.full(self.num_envs, None, dtype=object)
            places = np.flatnonzero(ended)
            for place, seen in zip(places, self.world.view(after.select(torch.from_numpy(places))), strict=True):
                final[place] = seen
            infos |= {"final_obs": final, "_final_obs": ended, "final_info": infos, "_final_info": ended}
        self.state = self.world.checked(self.environment.renew(transition, self.generator))
        terminated = (transition.outcome == Outcome.CONVERGED).numpy()
        return self._seen(self.state), transition.reward.numpy(), terminated, ended & ~terminated, infos

    def _seen(self, state: State) -> Any:
        seen = self.world.view(state)
        return seen if isinstance(seen, np.ndarray) else tuple(seen)


def _of_recipe(recipe: str, side: str, reward: Reward | None) -> tuple[Environment, int, bool]:
    """The world of a recipe, the most atoms of its structures, and whether a cell is free."""
    from relaxion.train.tasks.relax_settings import RelaxRunSettings
    from relaxion.train.tasks.relax_task import relax_task
    from relaxion.train.tasks.settings import find, settings_from_recipe

    settings = settings_from_recipe(find(recipe), None, {})
    if not isinstance(settings, RelaxRunSettings):
        raise StructureError(f"{recipe} relaxes no structures")
    task = relax_task(settings)
    environment = task.environment(side)
    environment.reward = reward or environment.reward
    most = max(int(pool.counts.max()) for pool in task.pools.values())
    return environment, most, settings.atoms.cell_free


def alloy_starts(
    elements: Sequence[str], sizes: Sequence[int], rattle_angstrom: float, *, cell_free: bool = False
) -> Starts:
    """Rattled close-packed alloys of the given numbers of atoms."""
    generator = torch.Generator().manual_seed(POOL_SEED)
    pool = Structures.concatenate([fcc_alloys(elements, POOL_SIZE, generator, n_atoms=size) for size in sizes])
    pool = replace(pool, cell_free=torch.full_like(pool.cell_free, cell_free))
    return PerturbedStarts(pool, [lambda s, g: rattle(s, g, size_angstrom=rattle_angstrom)])


def rows(structures: Structures, max_atoms: int) -> Tensor:
    """Where each atom stands when every structure has `max_atoms` rows, (n_atoms,)."""
    starts = structures.counts.cumsum(0) - structures.counts
    place = torch.arange(structures.n_atoms) - starts[structures.structure_index]
    return structures.structure_index * max_atoms + place


def centred(structures: Structures) -> Tensor:
    """Positions from the centroid of each structure: the same wherever it lies."""
    sums = per_structure_sum(structures.positions, structures.structure_index, structures.n_structures)
    return structures.positions - (sums / structures.counts[:, None])[structures.structure_index]  # (n_atoms, 3) Å


def _logarithmic(vectors: Tensor, scale: float) -> Tensor:
    lengths = vectors.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return vectors / lengths * torch.log10(1 + lengths / scale)


def _clipped(values: Tensor, limit: float) -> Floats:
    return values.clamp(-limit, limit).numpy().astype(np.float32)


def _infos(state: State, outcome: Tensor | None = None, back_off: Tensor | None = None) -> dict[str, NDArray[Any]]:
    """Of each structure; no outcome: it begins."""
    number = len(state.structures)
    outcomes = [Outcome.RUNNING] * number if outcome is None else [Outcome(value) for value in outcome.tolist()]
    return {
        "outcome": np.array([one.label for one in outcomes], dtype=object),
        "force_calls": state.calls.numpy(),
        "largest_force_ev_per_angstrom": largest_force(state.structures, state.evaluation).numpy(),
        "energy_ev": state.evaluation.energies.numpy(),
        "back_off": np.zeros(number) if back_off is None else back_off.numpy(),
    }


def _of_one(infos: dict[str, NDArray[Any]]) -> dict[str, Any]:
    return {name: values.tolist()[0] for name, values in infos.items()}


def _masked(infos: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """As Gymnasium's vector environments have them: beside each number, whose it is."""
    return infos | {f"_{name}": np.ones(len(values), dtype=bool) for name, values in infos.items()}


ENVIRONMENTS = {"relaxion/Relax-v0": "graph", "relaxion/RelaxPadded-v0": "padded"}


def register_environments() -> None:
    """Make the environments known to Gymnasium; calling it again does no harm."""
    for name, view in ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name, entry_point=RelaxEnvironment, vector_entry_point=RelaxEnvironments, kwargs={"view": view}
            )


register_environments()
