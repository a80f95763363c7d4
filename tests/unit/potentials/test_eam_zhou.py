"""The analytic alloy potential: continuity, what the paper fitted, what the switch changes, mixing."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.data import atomic_numbers

from relaxion.potentials import ZhouEam
from relaxion.potentials import eam as eam_zhou
from relaxion.structures import Structures

BCC, HCP = {"Fe", "Mo", "Ta", "W"}, {"Mg", "Co", "Ti", "Zr"}
METALS = list(eam_zhou.PARAMETERS)
# eV per atom: the fit meets these two decimals within 5e-4, which typing errors would not
COHESIVE_ENERGIES = {
    "Cu": 3.54, "Ag": 2.85, "Au": 3.93, "Ni": 4.45, "Pd": 3.91, "Pt": 5.77, "Al": 3.58, "Pb": 2.02,
    "Fe": 4.29, "Mo": 6.81, "Ta": 8.09, "W": 8.76, "Mg": 1.55, "Co": 4.41, "Ti": 4.87, "Zr": 6.36,
}  # fmt: skip
# C. Kittel, Introduction to Solid State Physics, eV per atom
MEASURED_ENERGIES = {
    "Cu": 3.49, "Ag": 2.95, "Au": 3.81, "Ni": 4.44, "Pd": 3.89, "Pt": 5.84, "Al": 3.39, "Pb": 2.03,
    "Fe": 4.28, "Mo": 6.82, "Ta": 8.10, "W": 8.90, "Mg": 1.51, "Co": 4.39, "Ti": 4.85, "Zr": 6.25,
}  # fmt: skip
# experiment, Å: a for fcc and bcc, nearest distance for hcp
LATTICE_CONSTANTS = {
    "Cu": 3.615, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92, "Al": 4.05, "Pb": 4.95,
    "Fe": 2.866, "Mo": 3.15, "Ta": 3.303, "W": 3.165, "Mg": 3.20, "Co": 2.506, "Ti": 2.934, "Zr": 3.20,
}  # fmt: skip


def value(metal: str, name: str) -> float:
    return eam_zhou.PARAMETERS[metal][eam_zhou.COLUMNS.index(name)]


def crystal(metal: str, scale: float = 1.0) -> Atoms:
    """The pure metal with r_e as its nearest distance; hcp with the ideal c/a."""
    distance = scale * value(metal, "r_e")
    if metal in BCC:
        return bulk(metal, "bcc", a=2 * distance / math.sqrt(3))
    if metal in HCP:
        return bulk(metal, "hcp", a=distance, c=distance * math.sqrt(8 / 3))
    return bulk(metal, "fcc", a=distance * math.sqrt(2))


def embed(metal: str, densities: list[float]) -> tuple[np.ndarray, np.ndarray]:
    potential = ZhouEam()
    numbers = torch.full((len(densities),), atomic_numbers[metal])
    density = torch.tensor(densities, dtype=torch.float64)
    energies, slopes = potential.embedding(density, potential.kinds_of(numbers))
    return energies.numpy(), slopes.numpy()


def best_scale(metal: str) -> tuple[float, float]:
    """Scale and energy per atom at the bottom of a parabola through three nearby crystals."""
    scales = np.array([0.998, 1.0, 1.002])
    images = [crystal(metal, scale) for scale in scales]
    energies = ZhouEam()(Structures.from_ase(images)).energies.numpy() / len(images[0])
    second, first, constant = np.polyfit(scales - 1, energies, 2)
    lowest = -first / (2 * second)
    return 1 + lowest, constant + first * lowest / 2


@pytest.mark.parametrize("metal", METALS)
def test_embedding_function_is_smooth_at_its_joints(metal: str) -> None:
    for joint in (value(metal, "rho_n/rho_e"), eam_zhou.UPPER_JOINT):
        at = joint * value(metal, "rho_e")
        energies, slopes = embed(metal, [at * (1 - 1e-12), at * (1 + 1e-12)])
        assert energies[0] == pytest.approx(energies[1], abs=1e-6)
        assert slopes[0] == pytest.approx(slopes[1], abs=5e-6)


@pytest.mark.parametrize("metal", METALS)
def test_no_density_no_energy(metal: str) -> None:
    energies, _ = embed(metal, [0.0])
    assert abs(energies[0]) < 1.5e-6  # the printed digits allow 1e-6
    alone = ZhouEam()(Structures.from_ase(Atoms(metal)))
    assert float(alone.energies) == energies[0]


@pytest.mark.parametrize("metal", METALS)
def test_density_in_the_perfect_crystal_is_rho_e(metal: str) -> None:
    # F has its minimum F0 at rho_e, so the embedding energy is a sharp test of f_e, beta and lambda
    potential, atoms = ZhouEam(), crystal(metal)
    structures = Structures.from_ase(atoms)
    recorded: list[torch.Tensor] = []
    embedding = potential.embedding

    def record(densities: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recorded.append(densities)
        return embedding(densities, kinds)

    potential.embedding = record  # type: ignore[method-assign]
    potential(structures)
    np.testing.assert_allclose(recorded[0].numpy(), value(metal, "rho_e"), rtol=1e-4)


@pytest.mark.parametrize("metal", METALS)
def test_cohesive_energy(metal: str) -> None:
    atoms = crystal(metal)
    energy = float(ZhouEam()(Structures.from_ase(atoms)).energies) / len(atoms)
    assert energy == pytest.approx(-COHESIVE_ENERGIES[metal], abs=5e-4)
    assert energy == pytest.approx(-MEASURED_ENERGIES[metal], rel=0.06)


@pytest.mark.parametrize("metal", METALS)
def test_lattice_constant_has_no_pressure(metal: str) -> None:
    evaluation = ZhouEam()(Structures.from_ase(crystal(metal)))
    assert evaluation.stresses is not None
    pressure = -float(evaluation.stresses[0].trace()) / 3 * 160.21766  # GPa
    assert abs(pressure) < 0.06  # bulk moduli are 35 to 310 GPa
    scale, _ = best_scale(metal)
    assert scale == pytest.approx(1, abs=2e-4)
    factor = 1.0 if metal in HCP else 2 / math.sqrt(3) if metal in BCC else math.sqrt(2)
    assert scale * value(metal, "r_e") * factor == pytest.approx(LATTICE_CONSTANTS[metal], rel=2e-3)


@pytest.mark.parametrize("metal", METALS)
def test_cutoff_and_switch_change_little(metal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale, energy = best_scale(metal)
    monkeypatch.setattr(eam_zhou, "CUTOFF_FACTOR", 3.0)
    bare_scale, bare_energy = best_scale(metal)
    assert scale == pytest.approx(bare_scale, abs=1e-4)
    assert energy == pytest.approx(bare_energy, abs=3e-4)
    assert energy != bare_energy


def test_energy_and_force_reach_zero_at_the_cutoff() -> None:
    # Al–Pb: the cutoff of the pair is that of the larger atom
    cutoff = math.sqrt(5) * value("Pb", "r_e")
    distances = [cutoff - 1e-2, cutoff - 1e-4, cutoff + 1e-4]
    images = [Atoms("AlPb", positions=[[0, 0, 0], [0, 0, distance]]) for distance in distances]
    evaluation = ZhouEam()(Structures.from_ase(images))
    alone = float(ZhouEam()(Structures.from_ase([Atoms("Al"), Atoms("Pb")])).energies.sum())
    away = (evaluation.energies - alone).abs()
    forces = evaluation.forces[::2].norm(dim=1)
    assert 0 < away[1] < 1e-4 * away[0]
    assert 0 < forces[1] < 1e-3 * forces[0]
    assert away[2] < 1e-15
    assert forces[2] == 0


def test_unlike_pair_is_the_published_mixture() -> None:
    """φ_ab = ½ (f_b/f_a φ_aa + f_a/f_b φ_bb), worked out here with plain floats inside of the switch."""
    distance = 2.7

    def function(metal: str, size: str, decay: str, onset: str) -> float:
        x = distance / value(metal, "r_e")
        return value(metal, size) * math.exp(-value(metal, decay) * (x - 1)) / (1 + (x - value(metal, onset)) ** 20)

    density = {metal: function(metal, "f_e", "beta", "lambda") for metal in ("Al", "Fe")}
    own = {
        metal: function(metal, "A", "alpha", "kappa") - function(metal, "B", "beta", "lambda") for metal in ("Al", "Fe")
    }
    mixed = (density["Fe"] / density["Al"] * own["Al"] + density["Al"] / density["Fe"] * own["Fe"]) / 2
    expected = mixed + embed("Al", [density["Fe"]])[0][0] + embed("Fe", [density["Al"]])[0][0]
    pair = Atoms("AlFe", positions=[[0, 0, 0], [0, 0, distance]])
    assert float(ZhouEam()(Structures.from_ase(pair)).energies) == pytest.approx(expected, rel=1e-12)


def test_neighbours_in_the_batch_do_not_matter() -> None:
    # lead has the longest reach: with it in the batch the search goes further, copper must not notice
    copper = crystal("Cu")
    alone = ZhouEam()(Structures.from_ase(copper))
    together = ZhouEam()(Structures.from_ase([copper, crystal("Pb")]))
    assert float(together.energies[0]) == pytest.approx(float(alone.energies), rel=1e-13)


def test_atoms_on_top_of_each_other_stay_finite() -> None:
    pair = Atoms("WPb", positions=[[0, 0, 0], [0, 0, 1e-3]])
    evaluation = ZhouEam()(Structures.from_ase(pair))
    assert torch.isfinite(evaluation.energies).all()
    assert torch.isfinite(evaluation.forces).all()


def test_numbers_are_the_compared_ones() -> None:
    """Some numbers hardly show in a crystal (kappa of Cu, say), so the table is also held by its digest."""
    rows = [f"{metal} " + " ".join(f"{number:.6f}" for number in row) for metal, row in eam_zhou.PARAMETERS.items()]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    assert digest == "ecae5a2f6ea29811f636ad6078a4a1be09f82bce34e30de8841a409f6cdd59df"
