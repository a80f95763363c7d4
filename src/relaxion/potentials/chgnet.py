"""CHGNet: many structures in one call of the network, weights from the wheel of the package `chgnet`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from relaxion.errors import PotentialError, SettingsError
from relaxion.potentials.base import Potential
from relaxion.potentials.engines import package_folder
from relaxion.potentials.pairwise import evaluated_in_portions, on_device
from relaxion.structures import Evaluation, Structures
from relaxion.structures.state import Pairs
from relaxion.structures.structures import DeviceLike, device_of, per_structure_sum

WIDTH = 64  # of every feature
N_LAYERS = 4  # of which the last updates atoms only
CUTOFF = 6.0  # Å, bonds that carry messages between atoms
ANGLE_CUTOFF = 3.0  # Å, bonds that take part in angles
CUTOFF_POWER = 8  # of the polynomial that ends both


@dataclass(frozen=True, eq=False)
class ChgnetGraph:
    """Bonds of a batch, every pair once, short ones first; angles between short bonds.

    A short bond has two directions: b goes from its first end to its second, b + n_short back.
    """

    atomic_numbers: Tensor  # (n_atoms,) int64
    ends: Tensor  # (2, n_bonds) int64
    vectors: Tensor  # (n_bonds, 3) Å
    order: Tensor  # (n_bonds,) int64, row of the pair each bond came from
    n_short: int
    angles: Tensor  # (2, n_angles) int64, two directed short bonds from the same atom, sorted by the first
    second_bonds: Tensor  # (n_angles,) int64, the second one without its direction

    @classmethod
    def of(cls, atomic_numbers: Tensor, ends: Tensor, vectors: Tensor) -> ChgnetGraph:
        """From pairs in any order."""
        is_long = torch.linalg.vector_norm(vectors, dim=1) >= ANGLE_CUTOFF
        order = torch.argsort(is_long.to(torch.uint8), stable=True)
        ends = ends.index_select(1, order)
        n_short = int(len(is_long) - is_long.sum())
        angles = angles_between(ends[:, :n_short].flatten())
        return cls(
            atomic_numbers=atomic_numbers,
            ends=ends,
            vectors=vectors.index_select(0, order),
            order=order,
            n_short=n_short,
            angles=angles,
            second_bonds=torch.where(angles[1] < n_short, angles[1], angles[1] - n_short),
        )


def angles_between(centers: Tensor) -> Tensor:
    """Every ordered pair of different rows with the same center, (2, n_angles)."""
    order = torch.argsort(centers, stable=True)
    in_order = centers.index_select(0, order)
    degrees = torch.bincount(centers)
    partners = degrees.index_select(0, in_order)
    first = torch.repeat_interleave(partners)
    # the partners of a row begin where the rows of its center do
    begin = (degrees.cumsum(0) - degrees).index_select(0, in_order) - (partners.cumsum(0) - partners)
    second = torch.arange(len(first), device=first.device) + begin.index_select(0, first)
    different = torch.nonzero(first != second).flatten()
    pairs = torch.cat([first.index_select(0, different), second.index_select(0, different)])
    return order.index_select(0, pairs).view(2, len(different))


class ChgnetNetwork:
    """Energies of atoms from a graph; weights by their names in CHGNet's checkpoint."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        w = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.element_energies = weights["composition_model.fc.weight"][0].to(torch.float64)  # (94,) eV
        self._atoms = w["atom_embedding.embedding.weight"]
        self._long_waves = w["bond_basis_expansion.rbf_expansion_ag.frequencies"]
        self._short_waves = w["bond_basis_expansion.rbf_expansion_bg.frequencies"]
        self._angle_waves = w["angle_basis_expansion.fourier_expansion.frequencies"]
        self._bonds = torch.cat([w["bond_embedding.weight"], w["bond_weights_ag.weight"]]).T.contiguous()
        self._bond_weights = w["bond_weights_bg.weight"].T
        self._angles = w["angle_embedding.weight"].T / math.sqrt(math.pi)
        kinds = ("center", "bond", "neighbor")
        self._atom_layers = [_Layer(w, f"atom_conv_layers.{n}", "twoBody_atom", kinds) for n in range(N_LAYERS)]
        kinds = ("first", "second", "angle", "center")
        self._bond_layers = [_Layer(w, f"bond_conv_layers.{n}", "twoBody_bond", kinds) for n in range(N_LAYERS - 1)]
        # what the last layer of angles says reaches nobody
        self._angle_layers = [_Layer(w, f"angle_layers.{n}", "twoBody_bond", kinds) for n in range(N_LAYERS - 2)]
        self._norm = w["readout_norm.weight"], w["readout_norm.bias"]
        self._readout = [(w[f"mlp.layers.{n}.weight"], w[f"mlp.layers.{n}.bias"]) for n in (0, 2, 4, 7)]

    def energies_and_slopes(self, graph: ChgnetGraph) -> tuple[Tensor, Tensor]:
        """Energies of the atoms (n_atoms,) eV, and dE/dr of the pairs in the order they came in, (n_bonds, 3) eV/Å."""
        vectors = graph.vectors.to(self.dtype).detach().requires_grad_()
        with torch.enable_grad():
            energies = self.energies(replace(graph, vectors=vectors))
            (slopes,) = torch.autograd.grad(energies.sum(), vectors, allow_unused=True, materialize_grads=True)
        return energies.detach(), torch.empty_like(slopes).index_copy_(0, graph.order, slopes)

    def energies(self, graph: ChgnetGraph) -> Tensor:
        """Of every atom without the energy of its element, (n_atoms,) eV; differentiable once by `graph.vectors`."""
        distances = torch.linalg.vector_norm(graph.vectors, dim=1)
        atoms = self._atoms.index_select(0, graph.atomic_numbers - 1)
        bonds, weights = (radial_basis(distances, self._long_waves, CUTOFF) @ self._bonds).split(WIDTH, dim=1)
        short, long = bonds.split([graph.n_short, len(bonds) - graph.n_short])
        short_distances = distances[: graph.n_short]
        short_weights = radial_basis(short_distances, self._short_waves, ANGLE_CUTOFF) @ self._bond_weights
        angles = self._angle_features(graph.vectors[: graph.n_short] / short_distances[:, None], graph.angles)
        for number in range(N_LAYERS):
            bonds = torch.cat([short, long])
            atoms = atoms + _atom_messages(self._atom_layers[number], graph, atoms, bonds, weights)
            if number < N_LAYERS - 1:
                short = short + _bond_messages(self._bond_layers[number], graph, atoms, short, angles, short_weights)
            if number < N_LAYERS - 2:
                layer = self._angle_layers[number]
                angles = angles + layer.gated(_at_angles(layer, graph, atoms, short, angles))
        return self._readout_of(atoms)

    def _angle_features(self, units: Tensor, angles: Tensor) -> Tensor:
        units = torch.cat([units, -units])
        first = units.index_select(0, angles[0])
        second = units.index_select(0, angles[1])
        angle = torch.acos((first * second).sum(dim=1) * (1 - 1e-6))  # as CHGNet: no infinite slope at 0 and π
        waves = angle[:, None] * self._angle_waves
        constant = waves.new_full((len(waves), 1), 1 / math.sqrt(2))
        return torch.cat([constant, waves.sin(), waves.cos()], dim=1) @ self._angles

    def _readout_of(self, atoms: Tensor) -> Tensor:
        hidden = functional.layer_norm(atoms, (WIDTH,), *self._norm)
        for weight, bias in self._readout[:-1]:
            hidden = functional.silu(functional.linear(hidden, weight, bias))
        return functional.linear(hidden, *self._readout[-1])[:, 0]


def _atom_messages(layer: _Layer, graph: ChgnetGraph, atoms: Tensor, bonds: Tensor, weights: Tensor) -> Tensor:
    as_center = atoms @ layer.heads["center"] + layer.bias
    as_neighbor = atoms @ layer.heads["neighbor"]
    of_bonds = bonds @ layer.heads["bond"]
    there = of_bonds + as_center.index_select(0, graph.ends[0]) + as_neighbor.index_select(0, graph.ends[1])
    back = of_bonds + as_center.index_select(0, graph.ends[1]) + as_neighbor.index_select(0, graph.ends[0])
    messages = layer.gated(torch.cat([there, back])).view(2, len(bonds), WIDTH) * weights
    onto = torch.zeros_like(atoms).index_add(0, graph.ends.flatten(), messages.view(-1, WIDTH))
    return onto @ layer.out


def _bond_messages(
    layer: _Layer, graph: ChgnetGraph, atoms: Tensor, short: Tensor, angles: Tensor, weights: Tensor
) -> Tensor:
    messages = layer.gated(_at_angles(layer, graph, atoms, short, angles))
    messages = messages * weights.index_select(0, graph.second_bonds)
    onto = short.new_zeros((2 * graph.n_short, WIDTH)).index_add(0, graph.angles[0], messages)
    return ((onto[: graph.n_short] + onto[graph.n_short :]) * weights) @ layer.out


def _at_angles(layer: _Layer, graph: ChgnetGraph, atoms: Tensor, short: Tensor, angles: Tensor) -> Tensor:
    """First products of a layer at every angle, (n_angles, 2 WIDTH)."""
    as_center = atoms @ layer.heads["center"] + layer.bias
    as_first = short @ layer.heads["first"]
    ends = graph.ends[:, : graph.n_short]
    directed = torch.cat([as_first + as_center.index_select(0, end) for end in ends])
    as_second = (short @ layer.heads["second"]).index_select(0, graph.second_bonds)
    return angles @ layer.heads["angle"] + directed.index_select(0, graph.angles[0]) + as_second


class _Layer:
    """silu(norm(core)) · sigmoid(norm(gate)); core and gate stand side by side, with a hidden layer each or without."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, gate_name: str, kinds: tuple[str, ...]) -> None:
        inside = f"{name}.{gate_name}"
        parts = f"{inside}.mlp_core.layers", f"{inside}.mlp_gate.layers"
        deep = f"{parts[0]}.3.weight" in weights
        first = 0 if deep else 1
        both = torch.cat([weights[f"{part}.{first}.weight"] for part in parts])
        self.heads = {kind: head.T.contiguous() for kind, head in zip(kinds, both.split(WIDTH, dim=1), strict=True)}
        self.bias = torch.cat([weights[f"{part}.{first}.bias"] for part in parts])
        self.hidden = [(weights[f"{part}.3.weight"], weights[f"{part}.3.bias"]) for part in parts] if deep else None
        self.norms = [(weights[f"{inside}.bn{n}.weight"], weights[f"{inside}.bn{n}.bias"]) for n in (1, 2)]
        out = f"{name}.mlp_out.layers.1.weight"
        self.out = weights[out].T if out in weights else torch.empty(0)

    def gated(self, first: Tensor) -> Tensor:
        """(n, 2 WIDTH) → (n, WIDTH)."""
        result = _Gated.apply(first, self)
        assert isinstance(result, Tensor)
        return result


class _Gated(torch.autograd.Function):
    """The gate and its derivative by hand: twice as fast as taping it."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, layer: _Layer) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer = layer
        saved = []
        one = first.new_ones(())
        # with s = sigmoid(x) and h = x s, dh/dx = s + h (1 - s), which is one pass over the memory by the name of lerp
        if layer.hidden is None:
            inner = first.split(WIDTH, dim=1)
        else:
            rise = torch.sigmoid(first)
            hidden = first * rise
            inner = [functional.linear(h, *w) for h, w in zip(hidden.split(WIDTH, dim=1), layer.hidden, strict=True)]
            saved.append(rise.lerp_(one, hidden))
        normed = []
        for part, norm in zip(inner, layer.norms, strict=True):
            result, mean, scale = torch.native_layer_norm(part, (WIDTH,), *norm, 1e-5)
            normed.append(result)
            saved += [part, mean, scale]
        core, gate = normed
        rise = torch.sigmoid(core)
        gate = gate.sigmoid_()
        answer = core.mul_(rise) * gate
        saved += [rise.lerp_(one, core).mul_(gate), torch.addcmul(answer, answer, gate, value=-1)]
        ctx.save_for_backward(*saved)
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: _Layer = ctx.layer
        *head, a, a_mean, a_scale, b, b_mean, b_scale, by_core, by_gate = ctx.saved_tensors
        mask = [True, False, False]
        slopes = [
            torch.ops.aten.native_layer_norm_backward(slope * by, part, [WIDTH], mean, scale, *norm, mask)[0]
            for by, part, mean, scale, norm in (
                (by_core, a, a_mean, a_scale, layer.norms[0]), (by_gate, b, b_mean, b_scale, layer.norms[1]),
            )
        ]  # fmt: skip
        if layer.hidden is None:
            return torch.cat(slopes, dim=1), None
        result = torch.empty_like(head[0])
        for part, target, (weight, _) in zip(slopes, result.split(WIDTH, dim=1), layer.hidden, strict=True):
            torch.mm(part, weight, out=target)
        return result.mul_(head[0]), None


def radial_basis(distances: Tensor, waves: Tensor, cutoff: float) -> Tensor:
    """√(2/c) sin(k r/c)/r times a polynomial that ends at the cutoff, (n, n_waves)."""
    scaled = distances / cutoff
    p = CUTOFF_POWER
    tail = -(p + 1) * (p + 2) / 2 + scaled * (p * (p + 2) - scaled * (p * (p + 1) / 2))
    envelope = torch.where(scaled < 1, 1 + scaled**p * tail, 0.0)
    return torch.sin(scaled[:, None] * waves) * (math.sqrt(2 / cutoff) * envelope / distances)[:, None]


REPAIR = "pip install 'chgnet>=0.4,<0.5'"
VERSION = "0.3.0"  # what `chgnet.model.CHGNet.load()` loads
NEVER_SEEN = frozenset(range(84, 89))  # Po, At, Rn, Fr, Ra: 94 embeddings, but only 89 elements in the training set
PRECISIONS: dict[torch.dtype | str, torch.dtype] = {
    torch.float32: torch.float32, torch.float64: torch.float64, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
MOST_SHORT_BONDS = 64  # of an atom, on average: five times as dense as anything real, and angles are their square
PAIRS_AT_ONCE = 2000  # bounds the memory of one call; in time 500 to 8000 are alike (measured)


class Chgnet(Potential):
    """Equal to `chgnet.model.CHGNetCalculator`, without magnetic moments.

    Structures without cell, which CHGNet's own calculator refuses, are answered too; CHGNet was not made for them.
    Atoms far too dense are answered with NaN: their angles would fill the memory, and the network was not trained on
    them; optimizers here take such an answer as a step too far.
    """

    name = "CHGNet"

    def __init__(self, dtype: torch.dtype | str = torch.float32, device: DeviceLike = None) -> None:
        """`dtype`: precision inside. float64 is half as fast, and its forces are derivatives to the last digit."""
        super().__init__()
        if dtype not in PRECISIONS:
            raise SettingsError(f"dtype of CHGNet is float32 or float64, got {dtype}")
        self.device = device_of(device)
        self._network = load_network(PRECISIONS[dtype], self.device)

    @property
    def elements(self) -> frozenset[int]:
        return frozenset(range(1, len(self._network.element_energies) + 1)) - NEVER_SEEN

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        pairs = Pairs.of(structures, CUTOFF)
        crowded = are_crowded(structures, pairs)
        if bool(crowded.any()):
            return self._without(crowded, structures, stresses)
        network = on_device(self._energies_and_slopes, self.device)
        return evaluated_in_portions(structures, pairs, network, PAIRS_AT_ONCE, stresses)

    def _energies_and_slopes(self, atomic_numbers: Tensor, ends: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        energies, slopes = self._network.energies_and_slopes(ChgnetGraph.of(atomic_numbers, ends, vectors))
        return self._network.element_energies.index_select(0, atomic_numbers - 1) + energies, slopes

    def _without(self, crowded: Tensor, structures: Structures, stresses: bool) -> Evaluation:
        """NaN for the crowded ones, the others as ever."""
        number = structures.n_structures
        answer = Evaluation(
            energies=structures.positions.new_full((number,), torch.nan),
            forces=torch.full_like(structures.positions, torch.nan),
            stresses=structures.positions.new_full((number, 3, 3), torch.nan) if stresses else None,
        )
        if bool(crowded.all()):
            return answer
        others = self.evaluate(structures.select(~crowded), stresses)
        answer.energies[~crowded] = others.energies
        answer.forces[~crowded[structures.structure_index]] = others.forces
        if answer.stresses is not None and others.stresses is not None:
            answer.stresses[~crowded] = others.stresses
        return answer


def are_crowded(structures: Structures, pairs: Pairs) -> Tensor:
    """Structures with more angles than any real one, (n_structures,) bool."""
    short = torch.linalg.vector_norm(pairs.vectors, dim=1) < ANGLE_CUTOFF
    bonds = torch.bincount(pairs.ends[:, short].flatten(), minlength=structures.n_atoms)  # (n_atoms,)
    angles = per_structure_sum(bonds.square(), structures.structure_index, structures.n_structures)
    return angles > MOST_SHORT_BONDS**2 * torch.as_tensor(structures.counts)


@cache
def load_network(dtype: torch.dtype, device: torch.device) -> ChgnetNetwork:
    """Once per process and device. Of the package only the file of weights is read, as plain tensors."""
    folder = package_folder("chgnet") / "pretrained" / VERSION
    files = sorted(folder.glob("*.pth.tar"))
    if len(files) != 1:
        raise PotentialError(f"{folder} has {len(files)} files of weights, expected one; try: {REPAIR}")
    try:
        weights = torch.load(files[0], map_location=device, weights_only=True)["model"]["state_dict"]
        return ChgnetNetwork(weights, dtype)
    except (KeyError, RuntimeError, ValueError) as error:
        raise PotentialError(
            f"{files[0]} does not hold the weights of CHGNet {VERSION} ({error}); try: {REPAIR}"
        ) from error
