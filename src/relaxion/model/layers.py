"""Layers of several networks of equal shape, run as one product, and messages between atoms.

The input says how many of the networks answer. Twin critics have separate parameters but the same atoms: pairs, gathers
and sums are made once for both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import ase.data
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from relaxion.errors import SettingsError, StructureError
from relaxion.structures import Graph, Move, State, Structures
from relaxion.structures.structures import per_structure_sum

HEAVIEST = 103

# Å: Cordero et al. 2008 (1 to 96, ASE's), single-bond radii of Pyykkö and Atsumi 2009 (97 to 103)
COVALENT_RADII = (*ase.data.covalent_radii[1:97].tolist(), 1.68, 1.68, 1.65, 1.67, 1.73, 1.76, 1.61)

# Pauling's scale; He, Ne and Ar, which have none there, on Allen's
# fmt: off
ELECTRONEGATIVITIES = (
    2.20, 4.16, 0.98, 1.57, 2.04, 2.55, 3.04, 3.44, 3.98, 4.79, 0.93, 1.31, 1.61, 1.90, 2.19, 2.58, 3.16, 3.24,
    0.82, 1.00, 1.36, 1.54, 1.63, 1.66, 1.55, 1.83, 1.88, 1.91, 1.90, 1.65, 1.81, 2.01, 2.18, 2.55, 2.96, 3.00,
    0.82, 0.95, 1.22, 1.33, 1.60, 2.16, 1.90, 2.20, 2.28, 2.20, 1.93, 1.69, 1.78, 1.96, 2.05, 2.10, 2.66, 2.60,
    0.79, 0.89, 1.10, 1.12, 1.13, 1.14, 1.13, 1.17, 1.20, 1.20, 1.10, 1.22, 1.23, 1.24, 1.25, 1.10, 1.27,
    1.30, 1.50, 2.36, 1.90, 2.20, 2.20, 2.28, 2.54, 2.00, 1.62, 2.33, 2.02, 2.00, 2.20, 2.20,
    0.70, 0.90, 1.10, 1.30, 1.50, 1.38, 1.36, 1.28, 1.30, 1.30, 1.30, 1.30, 1.30, 1.30, 1.30, 1.30, 1.30,
)
# fmt: on

NOBLE_GASES = (0, 2, 10, 18, 36, 54, 86, 118)
N_DESCRIPTORS = 5  # radius, electronegativity, group, period, valence


def group_and_period(number: int) -> tuple[int, int]:
    """Column and row of the periodic table; the f elements all stand in column 3."""
    period = next(row for row, noble in enumerate(NOBLE_GASES) if number <= noble)
    place = number - NOBLE_GASES[period - 1]
    length = NOBLE_GASES[period] - NOBLE_GASES[period - 1]
    if place <= 2 and period > 1:
        return place, period
    if length == 32 and place <= 17:  # lanthanides and actinides, their last one included
        return 3, period
    return (1 if number == 1 else place + 18 - length), period


def valence(number: int) -> int:
    """Electrons outside the noble gas and any full d or f shell; this tells the f elements apart."""
    group, period = group_and_period(number)
    if number == 2:
        return 2
    if group == 3 and period >= 6:
        place = number - NOBLE_GASES[period - 1]
        return 3 if place == 17 else place
    return group - 10 if group > 12 else group


@lru_cache(maxsize=4)
def _table(dtype: torch.dtype) -> Tensor:
    rows = [[0.0] * N_DESCRIPTORS]
    for number in range(1, HEAVIEST + 1):
        group, period = group_and_period(number)
        radius = COVALENT_RADII[number - 1]
        negativity = ELECTRONEGATIVITIES[number - 1]
        # from -1 to 1 over the table, about
        rows.append([radius - 1.4, negativity - 1.8, (group - 9) / 9, (period - 4) / 3, (valence(number) - 6) / 6])
    return torch.tensor(rows, dtype=dtype)  # (104, 5)


@lru_cache(maxsize=4)
def _radii(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.0, *COVALENT_RADII], dtype=dtype)  # (104,) Å


def descriptors(atomic_numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """What a network sees of each element, order one."""
    _refuse_unknown(atomic_numbers)
    return _table(dtype).index_select(0, atomic_numbers)  # (n_atoms, 5)


def covalent_radii(atomic_numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Radii by which distances are reduced."""
    _refuse_unknown(atomic_numbers)
    return _radii(dtype).index_select(0, atomic_numbers)  # (n_atoms,) Å


def _refuse_unknown(atomic_numbers: Tensor) -> None:
    if len(atomic_numbers) and int(atomic_numbers.max()) > HEAVIEST:
        raise StructureError(
            f"element number {int(atomic_numbers.max())} is not described; the networks cover 1 (H) to {HEAVIEST} (Lr)"
        )


Generator: TypeAlias = torch.Generator | None
"""What parameters are drawn with; None: torch's own."""


class Scratch:
    """Buffers for the pieces of a long list of pairs, used again for piece after piece; lives as long as one call.

    Touching fresh memory takes longer than the arithmetic done in it.
    """

    def __init__(self, like: Tensor, n_pairs: int, numbers_at_once: int) -> None:
        self.like = like
        self.n_pairs = n_pairs
        self.size = 1 + numbers_at_once // like.shape[-1]  # pairs in a piece; a row of `like` is a channel vector
        self.held: dict[str, Tensor] = {}

    def pieces(self) -> Iterator[slice]:
        """Where each piece lies."""
        for first in range(0, self.n_pairs, self.size):
            yield slice(first, min(first + self.size, self.n_pairs))

    def __call__(self, name: str, count: int, *shape: int) -> Tensor:
        """(count, …), whatever was in it last; two names never share memory."""
        if name not in self.held:
            self.held[name] = self.like.new_empty((self.size, *shape))
        return self.held[name][:count]

    def gathered(self, name: str, values: Tensor, rows: Tensor) -> Tensor:
        """values[rows]."""
        return torch.index_select(values, 0, rows, out=self(name, len(rows), *values.shape[1:]))

    def filters(self, pair_inputs: Tensor, weight: Tensor) -> Tensor:
        """(pairs of the piece, n_parts, width)."""
        out = self("filters", len(pair_inputs), weight.shape[1])
        return torch.mm(pair_inputs, weight, out=out).view(len(out), -1, self.like.shape[-1])


class Messages(ABC):
    """What neighbours say along each link, for one piece of the links at a time; and the gradient of that.

    What autograd would do holds some thirty tensors of pairs × channels, each too large for the processor's cache: 2 to
    3 times slower.
    """

    n_heard: int  # rows of a message
    numbers_at_once: int  # pairs · width in a piece

    @abstractmethod
    def said(self, scratch: Scratch, near: Tensor, filters: Tensor, geometry: Sequence[Tensor]) -> Tensor:
        """Messages of the piece, (n_links, n_heard, width), from what the neighbours speak."""

    @abstractmethod
    def gradients(
        self, scratch: Scratch, near: Tensor, back: Tensor, filters: Tensor, geometry: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of what the neighbours speak, and of the filters, from the gradient of the messages."""


class SummedMessages(torch.autograd.Function):
    """Σ_j over the neighbours of each atom, (n_atoms, n_heard, width). Both links of a pair have the same filters."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Messages,
        spoken: Tensor,  # (n_atoms, rows, width)
        pair_inputs: Tensor,  # (n_pairs, n_inputs)
        weight: Tensor,  # (n_inputs, n_parts · width), of the filters
        centers: Tensor,  # (n_links,) int64, i→j and j→i of a pair follow each other
        neighbors: Tensor,  # (n_links,) int64
        *geometry: Tensor,  # (n_links, …), not differentiated
    ) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(spoken, pair_inputs, weight, centers, neighbors, *geometry)
        scratch = Scratch(spoken, len(pair_inputs), kind.numbers_at_once)
        heard = spoken.new_zeros((len(spoken), kind.n_heard, spoken.shape[2]))
        for part in scratch.pieces():
            filters = scratch.filters(pair_inputs[part], weight)
            for links in links_of(part):
                near = scratch.gathered("near", spoken, neighbors[links])
                heard.index_add_(0, centers[links], kind.said(scratch, near, filters, [g[links] for g in geometry]))
        return heard

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        spoken, pair_inputs, weight, centers, neighbors, *geometry = ctx.saved_tensors
        scratch = Scratch(spoken, len(pair_inputs), ctx.kind.numbers_at_once)
        to_spoken = torch.zeros_like(spoken)
        to_weight = torch.zeros_like(weight)
        to_pairs = torch.empty_like(pair_inputs) if ctx.needs_input_grad[2] else None
        for part in scratch.pieces():
            filters = scratch.filters(pair_inputs[part], weight)
            flat = torch.zeros_like(filters).view(len(filters), -1)
            for links in links_of(part):
                near = scratch.gathered("near", spoken, neighbors[links])
                back = scratch.gathered("back", gradients[0], centers[links])
                to_near, to_filters = ctx.kind.gradients(scratch, near, back, filters, [g[links] for g in geometry])
                to_spoken.index_add_(0, neighbors[links], to_near)
                flat += to_filters.view(len(near), -1)
            to_weight.addmm_(pair_inputs[part].T, flat)
            if to_pairs is not None:
                torch.mm(flat, weight.T, out=to_pairs[part])
        return None, to_spoken, to_pairs, to_weight, *[None] * (2 + len(geometry))


def links_of(pairs: slice) -> tuple[slice, slice]:
    """Of these pairs the links i→j, and the links j→i."""
    return slice(2 * pairs.start, 2 * pairs.stop, 2), slice(2 * pairs.start + 1, 2 * pairs.stop, 2)


def uniform_parameter(shape: tuple[int, ...], n_in: int, generator: Generator) -> nn.Parameter:
    """Uniform within ±√(3 / n_in): keeps the variance of order one through a layer."""
    bound = math.sqrt(3 / n_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


class StackedLinear(nn.Module):
    """y_k = x_k W_k + b_k for each network k."""

    def __init__(self, n_in: int, n_out: int, n_networks: int, generator: Generator, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = uniform_parameter((n_networks, n_in, n_out), n_in, generator)
        self.bias = nn.Parameter(torch.zeros(n_networks, 1, n_out)) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """(n_networks or fewer, n_rows, n_in) -> (same, n_rows, n_out): fewer inputs ask the first networks only."""
        weight = _first(self.weight, len(inputs))
        if self.bias is None:
            return torch.bmm(inputs, weight)
        return torch.baddbmm(_first(self.bias, len(inputs)), inputs, weight)


def _first(parameter: Tensor, number: int) -> Tensor:
    return parameter if number == len(parameter) else parameter[:number]


def tamed(scalars: Tensor) -> Tensor:
    """x / √(1 + mean x²) over the channels: itself where it is small, of order one where it is not.

    Without it scalars scale vectors and vectors scalars in turns, and an unusual state grows with a high power.
    """
    return scalars * torch.rsqrt(1 + scalars.square().mean(dim=-1, keepdim=True))


class StackedMLP(nn.Module):
    """Two layers with SiLU between them, on tamed inputs."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.hidden = StackedLinear(n_in, n_hidden, n_networks, generator)
        self.answer = StackedLinear(n_hidden, n_out, n_networks, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answer(silu(self.hidden(tamed(inputs))))


class PairFilter(nn.Module):
    """Weights of the messages along each pair, from what is known of the pair: linear, all networks in one product."""

    def __init__(self, n_in: int, n_parts: int, channels: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        # few of the radial functions are awake at any distance: a larger start than for a usual layer
        self.weight = uniform_parameter((n_networks, n_in, n_parts, channels), max(1, n_in // 4), generator)

    def forward(self, n_networks: int) -> Tensor:
        """The matrix that takes what is known of a pair to its weights, (n_in, n_parts · n_networks · channels)."""
        return _first(self.weight, n_networks).permute(1, 2, 0, 3).flatten(1)


def packed(values: Tensor) -> Tensor:
    """(n_networks, n_atoms, rows, channels) -> (n_atoms, rows, n_networks · channels), as pairs want it."""
    n_networks, n_atoms, rows, channels = values.shape
    return values.permute(1, 2, 0, 3).reshape(n_atoms, rows, n_networks * channels)


def unpacked(values: Tensor, n_networks: int) -> Tensor:
    """The opposite of `packed`."""
    n_atoms, rows, width = values.shape
    return values.view(n_atoms, rows, n_networks, width // n_networks).permute(2, 0, 1, 3)


def mixed(layer: nn.Module, values: Tensor) -> Tensor:
    """The layer on the channels of (n_networks, n_atoms, rows, channels): the same for every row."""
    n_networks, n_atoms, rows, _ = values.shape
    return layer(values.reshape(n_networks, n_atoms * rows, -1)).view(n_networks, n_atoms, rows, -1)


class InvariantUpdate(nn.Module):
    """Scalars learn the lengths of the tensors and the products between them; the tensors are scaled by scalars.

    Only the first `n_changed` tensors are: one that nobody reads afterwards would have dead parameters.
    """

    def __init__(self, channels: int, n_tensors: int, n_changed: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.channels = channels
        self.n_changed = n_changed
        self.pairs = nn.ModuleList(
            [StackedLinear(channels, 2 * channels, n_networks, generator, bias=False) for _ in range(n_tensors)]
        )
        self.think = StackedMLP(
            (1 + 2 * n_tensors) * channels, channels, (1 + n_tensors + n_changed) * channels, n_networks, generator
        )

    def forward(self, scalars: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Scalars (n_networks, n_atoms, channels), tensors (n_networks, n_atoms, components, channels)."""
        halves = [mixed(layer, t).chunk(2, dim=-1) for layer, t in zip(self.pairs, tensors, strict=True)]
        sizes = [torch.sqrt(one.square().sum(dim=2) + 1e-6) for one, _ in halves]
        # by the length of one: a product of two lengths would grow with the square of the forces
        products = [(one * other).sum(dim=2) / size for (one, other), size in zip(halves, sizes, strict=True)]
        thoughts = self.think(torch.cat([scalars, *sizes, *products], dim=2)).split(self.channels, dim=2)
        weights = thoughts[1 : 1 + len(halves)]
        gates = thoughts[1 + len(halves) :]
        scalars = scalars + thoughts[0]
        for product, weight in zip(products, weights, strict=True):
            scalars = scalars + weight * product
        changed = [
            t + g[:, :, None] * u for t, g, (_, u) in zip(tensors[: self.n_changed], gates, halves, strict=False)
        ]
        return scalars, changed


REDUCED_RANGE = (0.5, 2.5)  # of the radial functions, in sums of covalent radii: from a crushed to a fourth neighbour
STRESS_UNIT = 0.01  # eV/Å³ (1.6 GPa), where stress goes over to its logarithm


@dataclass(frozen=True, eq=False)
class Surroundings:
    """All pairs within the cutoff, in the network's precision. The links i→j and j→i of a pair follow each other."""

    centers: Tensor  # (n_links,) int64, atom i, who listens
    neighbors: Tensor  # (n_links,) int64, atom j, who speaks
    pair_structure: Tensor  # (n_links,) int64
    vectors: Tensor  # (n_links, 3) Å, from i to the image of j
    directions: Tensor  # (n_links, 3)
    envelope: Tensor  # (n_pairs,) 1 at no distance … 0 at the cutoff, smooth
    reduced: Tensor  # (n_pairs,) distance in sums of covalent radii
    radial: Tensor  # (n_pairs, n_radial) functions of the reduced distance, times the envelope
    normalisers: Tensor  # (n_atoms,) 1/√(1 + Σ envelope): keeps sums of messages of order one

    @classmethod
    def of(cls, state: State, cutoff: float, n_radial: int, dtype: torch.dtype) -> Surroundings:
        """From the state's graph where it has one, else from a new one."""
        structures = state.structures
        graph = graph_within(state, cutoff)
        first = graph.centers[::2]
        second = graph.neighbors[::2]
        vectors = graph.vectors(structures)  # in the state's precision: differences of large positions
        distances = torch.linalg.vector_norm(vectors[::2], dim=1).clamp_min(1e-6)
        radii = covalent_radii(structures.atomic_numbers, structures.dtype)
        reduced = (distances / (radii.index_select(0, first) + radii.index_select(0, second))).to(dtype)
        envelope = smooth_step(distances / cutoff).to(dtype)
        total = envelope.new_zeros(structures.n_atoms).index_add_(0, first, envelope).index_add_(0, second, envelope)
        return cls(
            centers=graph.centers,
            neighbors=graph.neighbors,
            pair_structure=graph.pair_structure,
            vectors=vectors.to(dtype),
            directions=(vectors / distances.repeat_interleave(2)[:, None]).to(dtype),
            envelope=envelope,
            reduced=reduced,
            radial=radial_functions(reduced, n_radial) * envelope[:, None],
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
            f"the state's graph reaches {graph.cutoff:g} Å, the network looks {cutoff:g} Å far; give the state no graph"
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
    directions = surroundings.directions[::2]
    if state.evaluation.stresses is None or not bool(state.structures.cell_free.any()):
        return directions.new_zeros((len(directions), 1))
    stress = soft_stress(state).to(directions.dtype)  # (n_structures, 3, 3)
    of_pairs = stress.index_select(0, surroundings.pair_structure[::2])
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
    centers = surroundings.centers[::2]
    neighbors = surroundings.neighbors[::2]
    strains = move.strains.index_select(0, surroundings.pair_structure[::2])
    stretched = torch.bmm(surroundings.vectors[::2, None], strains)[:, 0]
    displacements = move.displacements
    changes = stretched + displacements.index_select(0, neighbors) - displacements.index_select(0, centers)
    scales = 0.5 * (force_scales.index_select(0, centers) + force_scales.index_select(0, neighbors))
    changes = changes * (stiffness / scales)[:, None]  # (n_pairs, 3)
    along = (changes * surroundings.directions[::2]).sum(dim=1, keepdim=True)
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
