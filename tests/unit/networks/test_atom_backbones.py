"""Elements, pairs, and the messages of both backbones against slow versions that autograd differentiates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.data import chemical_symbols
from ase.data import covalent_radii as radii_of_ase
from torch import Tensor

from relaxion.errors import MissingExtraError, SettingsError, StructureError
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import AtomPolicy
from relaxion.model.backbone import AtomInputs, AtomNetworkSettings, BackboneSettings, LightMessages, backbone_class
from relaxion.model.layers import (
    COVALENT_RADII,
    ELECTRONEGATIVITIES,
    HEAVIEST,
    Scratch,
    SummedMessages,
    Surroundings,
    covalent_radii,
    descriptors,
    group_and_period,
    smooth_step,
    valence,
    with_graph,
)
from relaxion.model.tensor_field import PATHS, TensorMessages, coupling, pair_couplings
from relaxion.structures import Evaluation, Graph, State, Structures
from relaxion.train.agents.atom_critics import AtomCritics


def state_of(structures: Structures) -> State:
    forces = torch.ones_like(structures.positions)
    evaluation = Evaluation(torch.zeros(structures.n_structures), forces, torch.zeros_like(structures.cells))
    return State.without_past(structures, evaluation, 1.0)


def test_descriptors_are_published_facts() -> None:
    element = pytest.importorskip("pymatgen.core").Element
    for number in range(1, HEAVIEST + 1):
        known = element(chemical_symbols[number])
        assert group_and_period(number) == (known.group, known.row)
        if number not in (2, 10, 18):  # nothing on Pauling's scale
            assert abs(known.X - ELECTRONEGATIVITIES[number - 1]) < 1e-6
        if number <= 96:
            assert radii_of_ase[number] == pytest.approx(COVALENT_RADII[number - 1])


def test_valence_by_hand() -> None:
    known = {"H": 1, "He": 2, "C": 4, "Na": 1, "Al": 3, "Fe": 8, "Zn": 12, "Br": 7, "La": 3, "Gd": 10, "Lu": 3, "Pb": 4}
    assert {symbol: valence(chemical_symbols.index(symbol)) for symbol in known} == known


def test_every_element_is_of_order_one_and_unlike_all_others() -> None:
    table = descriptors(torch.arange(1, HEAVIEST + 1), torch.float64)
    assert float(table.abs().max()) < 3.1
    distances = torch.cdist(table, table) + torch.eye(HEAVIEST)
    assert float(distances.min()) > 0.005
    assert descriptors(torch.tensor([1]), torch.float32).dtype == torch.float32


def test_unknown_elements_are_refused() -> None:
    for ask in (descriptors, covalent_radii):
        with pytest.raises(StructureError, match="104"):
            ask(torch.tensor([1, 104]), torch.float32)


def test_envelope_ends_smoothly() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    values = smooth_step(x)
    assert values.tolist() == [1.0, 0.0, 0.0]
    (slope,) = torch.autograd.grad(values.sum(), x)
    assert slope.tolist() == [0.0, 0.0, 0.0]


def test_every_neighbour_counts_and_none_is_needed() -> None:
    crowd = bulk("C", "sc", a=1.0)  # far more neighbours than any usual cap
    state = state_of(Structures.from_ase([crowd, Atoms("H")]))
    surroundings = Surroundings.of(state, 4.5, 8, torch.float32)
    expected = Graph.of(state.structures, 4.5)
    assert len(surroundings.centers) == expected.n_pairs > 350
    assert not bool((surroundings.centers == 1).any())
    assert float(surroundings.normalisers[1]) == 1.0


def test_the_states_graph_is_used_where_it_reaches_far_enough() -> None:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=0)
    state = state_of(Structures.from_ase(atoms))
    policy = AtomPolicy(MoveActions(), AtomNetworkSettings(cutoff_angstrom=4.0)).double()
    without = policy(state).displacements
    for cutoff in (4.0, 6.0):
        again = policy(replace(state, graph=Graph.of(state.structures, cutoff))).displacements
        torch.testing.assert_close(again, without, rtol=0, atol=1e-12)
    with pytest.raises(SettingsError, match="the network looks 4 Å far"):
        policy(replace(state, graph=Graph.of(state.structures, 3.0)))
    prepared = with_graph(state, 4.0)
    assert prepared.graph is not None
    assert with_graph(prepared, 4.0) is prepared


def test_answers_do_not_jump_at_the_cutoff() -> None:
    policy = AtomPolicy(MoveActions(), AtomNetworkSettings(cutoff_angstrom=4.0)).double()
    moves = [
        policy(state_of(Structures.from_ase(Atoms("Cu2", [[0, 0, 0], [4.0 + side, 0, 0]])))).displacements
        for side in (-1e-6, 1e-6)
    ]
    torch.testing.assert_close(*moves, rtol=0, atol=1e-9)


def problem(n_inputs: int, rows: int, parts: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Random words, pair inputs and filter weights; 3 atoms, 4 pairs, width 2."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    directions = torch.nn.functional.normalize(random(8, 3).detach(), dim=1)
    centers, neighbors = torch.randint(3, (2, 8), generator=generator)
    return random(3, rows, 2), random(4, n_inputs), random(n_inputs, parts * 2), directions, centers, neighbors


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pairs at a time, so that the last piece is shorter."""
    original = Scratch.__init__
    monkeypatch.setattr(Scratch, "__init__", lambda self, like, n_pairs, _numbers: original(self, like, n_pairs, 4))


def test_light_messages(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    spoken, inputs, weight, directions, centers, neighbors = problem(4, 5, 3, generator)
    filters, near = (inputs @ weight).view(4, 3, 2).repeat_interleave(2, 0), spoken[neighbors]
    scalars = filters[:, :1] * near[:, :1]
    vectors = filters[:, 1:2] * near[:, 2:] + filters[:, 2:] * near[:, 1:2] * directions[:, :, None]
    slow = torch.zeros(3, 4, 2, dtype=torch.float64).index_add(0, centers, torch.cat([scalars, vectors], dim=1))
    quick = SummedMessages.apply(LightMessages(), spoken, inputs, weight, centers, neighbors, directions)
    torch.testing.assert_close(quick, slow, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *differentiable: SummedMessages.apply(LightMessages(), *differentiable, centers, neighbors, directions),
        (spoken, inputs, weight),
    )


def test_tensor_messages(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Σ over the paths of filter · coupling · harmonic · word, written with e3nn's own pieces."""
    from e3nn import o3

    small_pieces(monkeypatch)
    spoken, inputs, weight, directions, centers, neighbors = problem(4, 9, len(PATHS), generator)
    filters, near = (inputs @ weight).view(4, len(PATHS), 2).repeat_interleave(2, 0), spoken[neighbors]
    rows = {0: slice(0, 1), 1: slice(1, 4), 2: slice(4, 9)}
    messages = [torch.zeros(8, 2 * degree + 1, 2, dtype=torch.float64) for degree in range(3)]
    for number, (said, harmonic, heard) in enumerate(PATHS):
        values = o3.spherical_harmonics(harmonic, directions, normalize=True, normalization="component")
        coupled = torch.einsum(
            "imk,pm,pic->pkc", coupling((said, harmonic, heard), torch.float64), values, near[:, rows[said]]
        )
        messages[heard] = messages[heard] + filters[:, number, None] * coupled
    slow = torch.zeros(3, 9, 2, dtype=torch.float64).index_add(0, centers, torch.cat(messages, dim=1))
    couplings = pair_couplings(directions)
    quick = SummedMessages.apply(TensorMessages(), spoken, inputs, weight, centers, neighbors, *couplings)
    torch.testing.assert_close(quick, slow, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *differentiable: SummedMessages.apply(TensorMessages(), *differentiable, centers, neighbors, *couplings),
        (spoken, inputs, weight),
    )


def test_paths_are_all_that_parity_allows() -> None:
    from e3nn import o3

    irreps = [o3.Irrep("0e"), o3.Irrep("1o"), o3.Irrep("2e")]
    allowed = {(a.l, b.l, c.l) for a in irreps for b in irreps for c in irreps if c in a * b}
    assert set(PATHS) == allowed
    assert len(PATHS) == len(allowed)


@pytest.mark.parametrize("backbone", ["light", "tensor_field"])
def test_one_door(backbone: str, generator: torch.Generator) -> None:
    settings = BackboneSettings.read({"backbone": backbone, "channels": 5, "n_layers": 2})
    made = backbone_class(settings)(
        settings, n_scalars=4, n_vectors=2, n_pair_extras=0, n_networks=2, generator=generator
    )
    state = state_of(Structures.from_ase([bulk("Cu", cubic=True), Atoms("H")]))
    surroundings = Surroundings.of(state, 4.5, 8, torch.float32)
    inputs = AtomInputs(
        torch.randn(5, 4, generator=generator), torch.randn(5, 2, 3, generator=generator), torch.ones(5)
    )
    both = made(inputs, surroundings, surroundings.radial, 2)
    first = made(inputs, surroundings, surroundings.radial, 1)
    assert both.scalars.shape == (2, 5, 5)
    assert both.vectors.shape == (2, 5, 5, 3)
    torch.testing.assert_close(first.scalars[0], both.scalars[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.vectors[0], both.vectors[0], rtol=1e-4, atol=1e-4)


def test_a_missing_e3nn_is_named_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e3nn", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'relaxion\[train\]'"):
        AtomCritics(AtomNetworkSettings(backbone="tensor_field"))


def test_the_light_network_loads_no_e3nn() -> None:
    code = (
        "import sys; from relaxion.model.atom_policies import AtomPolicy; "
        "from relaxion.model.actions import MoveActions; "
        "AtomPolicy(MoveActions()); print('e3nn' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_another_default_precision_changes_nothing() -> None:
    """e3nn follows the global default; here the network's own precision decides."""
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=0)
    state = state_of(Structures.from_ase(atoms))
    policy = AtomPolicy(MoveActions(), AtomNetworkSettings(backbone="tensor_field", channels=4)).double()
    before = policy(state).displacements
    torch.set_default_dtype(torch.float64)
    try:
        again = policy(state).displacements
    finally:
        torch.set_default_dtype(torch.float32)
    assert before.dtype == torch.float64
    assert torch.equal(before, again)
