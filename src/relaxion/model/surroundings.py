"""Pairs of atoms as a network sees them: directions, and distances reduced by the covalent radii."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.model.layers import covalent_radii
from relaxion.structures import Graph, Move, State, Structures
from relaxion.structures.structures import per_structure_sum

REDUCED_RANGE = (0.5, 2.5)  # of the radial functions, in sums of covalent radii: from a crushed to a fourth neighbour
STRESS_UNIT = 0.01  # eV/Å³ (1.6 GPa), where stress goes over to its logarithm


@dataclass(frozen=True, eq=False)
class Surroundings:
    """All pairs within the cutoff, each twice, in the network's precision."""

    centers: Tensor  # (n_pairs,) int64, atom i, who listens
    neighbors: Tensor  # (n_pairs,) int64, atom j, who speaks
    pair_structure: Tensor  # (n_pairs,) int64
    vectors: Tensor  # (n_pairs, 3) Å, from i to the image of j
    directions: Tensor  # (n_pairs, 3)
    envelope: Tensor  # (n_pairs,) 1 at no distance … 0 at the cutoff, smooth
    radial: Tensor  # (n_pairs, n_radial) functions of the reduced distance, times the envelope
    normalisers: Tensor  # (n_atoms,) 1/√(1 + Σ envelope): keeps sums of messages of order one

    @classmethod
    def of(cls, state: State, cutoff: float, n_radial: int, dtype: torch.dtype) -> Surroundings:
        """From the state's graph where it has one, else from a new one."""
        structures, graph = state.structures, graph_within(state, cutoff)
        vectors = graph.vectors(structures)  # in the state's precision: differences of large positions
        distances = torch.linalg.vector_norm(vectors, dim=1).clamp_min(1e-6)
        radii = covalent_radii(structures.atomic_numbers, structures.dtype)
        reduced = distances / (radii.index_select(0, graph.centers) + radii.index_select(0, graph.neighbors))
        envelope = smooth_step(distances / cutoff).to(dtype)
        total = per_structure_sum(envelope, graph.centers, structures.n_atoms)
        return cls(
            centers=graph.centers,
            neighbors=graph.neighbors,
            pair_structure=graph.pair_structure,
            vectors=vectors.to(dtype),
            directions=(vectors / distances[:, None]).to(dtype),
            envelope=envelope,
            radial=radial_functions(reduced.to(dtype), n_radial) * envelope[:, None],
            normalisers=torch.rsqrt(1 + total),
        )


def with_graph(state: State, cutoff: float) -> State:
    """The state with its graph. For a batch that several networks look at: the search is done once."""
    return state if state.graph is not None else replace(state, graph=Graph.of(state.structures, cutoff))


def graph_within(state: State, cutoff: float) -> Graph:
    """Pairs nearer than the cutoff (Å); none is left out, however many an atom has."""
    graph = state.graph
    if graph is None:
        return Graph.of(state.structures, cutoff)
    if graph.cutoff < cutoff:
        raise SettingsError(
            f"the state's graph reaches {graph.cutoff:g} Å, the network looks {cutoff:g} Å far; set "
            f"graph_cutoff_angstrom = {cutoff:g} for the environment, or give the state no graph"
        )
    if graph.cutoff == cutoff:
        return graph
    near = (torch.linalg.vector_norm(graph.vectors(state.structures), dim=1) < cutoff).nonzero().flatten()
    return Graph(graph.centers[near], graph.neighbors[near], graph.shifts[near], graph.pair_structure[near], cutoff)


def smooth_step(fraction: Tensor) -> Tensor:
    """1 - 10x³ + 15x⁴ - 6x⁵: falls from 1 to 0 with vanishing slope and curvature at both ends."""
    x = fraction.clamp(0, 1)
    return 1 - x**3 * (10 - 15 * x + 6 * x * x)


def radial_functions(reduced: Tensor, number: int) -> Tensor:
    """Gaussians side by side, (n_pairs, number)."""
    first, last = REDUCED_RANGE
    centres = torch.linspace(first, last, number, dtype=reduced.dtype)
    width = (last - first) / max(1, number - 1)
    return torch.exp(-0.5 * ((reduced[:, None] - centres) / width).square())


def stress_along(state: State, surroundings: Surroundings) -> Tensor:
    """How strongly each pair is pulled by the stress of a free cell, r̂·σ·r̂ on a logarithmic scale, (n_pairs, 1).

    Zero for fixed cells, whose stress nobody relaxes.
    """
    directions = surroundings.directions
    if state.evaluation.stresses is None or not bool(state.structures.cell_free.any()):
        return directions.new_zeros((len(directions), 1))
    stress = soft_stress(state).to(directions.dtype)  # (n_structures, 3, 3)
    of_pairs = stress.index_select(0, surroundings.pair_structure)
    return torch.einsum("pi,pij,pj->p", directions, of_pairs, directions)[:, None]


def soft_stress(state: State) -> Tensor:
    """Stress of free cells in units of 0.01 eV/Å³, long ones as their logarithm; zero elsewhere."""
    assert state.evaluation.stresses is not None
    free = state.evaluation.stresses * state.structures.cell_free[:, None, None] / STRESS_UNIT
    return softened(free.flatten(1)).view(-1, 3, 3)  # (n_structures, 3, 3)


def changes_along(move: Move, surroundings: Surroundings, stiffness: float, force_scales: Tensor) -> Tensor:
    """What a move does to each pair, δr = r·ε + u_j - u_i: along the pair and in all, (n_pairs, 2).

    Measured in the step F/k that the forces around ask for, so that small moves near the minimum are seen as clearly
    as large ones far away.
    """
    centers, neighbors = surroundings.centers, surroundings.neighbors
    strains = move.strains.index_select(0, surroundings.pair_structure)
    stretched = torch.bmm(surroundings.vectors[:, None], strains)[:, 0]
    displacements = move.displacements
    changes = stretched + displacements.index_select(0, neighbors) - displacements.index_select(0, centers)
    scales = 0.5 * (force_scales.index_select(0, centers) + force_scales.index_select(0, neighbors))
    changes = changes * (stiffness / scales)[:, None]  # (n_pairs, 3)
    along = (changes * surroundings.directions).sum(dim=1, keepdim=True)
    return torch.cat([softened(along), torch.log1p(lengths(changes, 1e-3))[:, None]], dim=1)


def pair_inputs(surroundings: Surroundings, extras: Tensor) -> Tensor:
    """Radial functions, and their products with what else is known of the pairs, (n_pairs, n_radial · (1 + extras)).

    Products, because the filters are linear: what a stretch means depends on the distance.
    """
    products = surroundings.radial[:, None, :] * extras[:, :, None]
    return torch.cat([surroundings.radial, products.flatten(1)], dim=1)


def structure_mean(values: Tensor, structures: Structures) -> Tensor:
    """Mean over the atoms of each structure of (n_atoms, …), (n_structures, …)."""
    counts = structures.counts.clamp_min(1).to(values.dtype)
    total = per_structure_sum(values, structures.structure_index, structures.n_structures)
    return total / counts.view(-1, *[1] * (values.ndim - 1))


def lengths(vectors: Tensor, floor: float) -> Tensor:
    """√(|v|² + floor²) over the last axis: smooth at zero, never zero."""
    return torch.sqrt(vectors.square().sum(dim=-1) + floor * floor)


def softened(vectors: Tensor) -> Tensor:
    """v · log(1 + |v|) / |v| over the last axis: v where it is short, its logarithm's length where it is long."""
    size = lengths(vectors, 1e-6)[..., None]
    return vectors * (torch.log1p(size) / size)
