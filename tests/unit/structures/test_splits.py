"""What is never trained on: the rule, and that makers keep to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ase import Atoms

from relaxion.errors import SettingsError
from relaxion.train.data.dataset import ELEMENTS, belongs, reasons, reasons_of
from relaxion.train.data.prototypes import prototypes, random_crystal, random_perovskite
from relaxion.train.data.slabs import g2_molecules, random_molecule, random_surface

HELD_PROTOTYPES = (38, "A12B_cI26_204_g_a", "A_oC8_64_f")
HELD_MOLECULES = ["AlCl3", "AlF3", "C2H6SO", "C3H4_C3v"]
HELD_SALTS = ["KO", "CaF2", "BaS", "BaI2", "NiF2"]


@pytest.mark.parametrize("formula", ["SrTiO3", "Y2O3", "Ca3Ti2O7", "Sr2TiO4", "Sr4Ti4O12", "O3TiSr"])
def test_compositions_of_the_macs_recipe_are_held_apart_whatever_way_they_are_written(formula: str) -> None:
    assert reasons(elements=Atoms(formula).get_chemical_symbols(), formula=formula) == {"composition"}


def is_held_apart(**known: Any) -> bool:
    return bool(reasons(**known))


def test_elements_of_the_macs_recipe_are_trained_on() -> None:
    assert not ELEMENTS & {"Sr", "Ti", "O", "Y", "Ca"}
    assert len(ELEMENTS) == 6
    assert is_held_apart(elements=["Ga", "As"])
    assert not is_held_apart(elements=["Al", "As"])


def test_the_rule_is_recorded_by_its_answers() -> None:
    """Whoever changes hash or shares changes what old assessments meant: these must not move."""
    held = sorted({p.label for p in prototypes() if is_held_apart(prototype=p.label)})
    assert (len(held), held[0], held[-1]) == HELD_PROTOTYPES
    assert sorted(name for name in g2_molecules() if is_held_apart(molecule=name))[:4] == HELD_MOLECULES
    salts = [f"{a}{b}" for a in ("Na", "K", "Mg", "Ca", "Ba", "Zn", "Ni", "Fe") for b in ("O", "S", "F2", "Cl2", "I2")]
    assert [salt for salt in salts if is_held_apart(formula=salt)] == HELD_SALTS


def test_shares_are_about_what_they_should_be() -> None:
    labels = [f"label {k}" for k in range(4000)]
    assert np.mean([is_held_apart(prototype=label) for label in labels]) == pytest.approx(1 / 7, abs=0.02)
    assert np.mean([is_held_apart(molecule=label) for label in labels]) == pytest.approx(1 / 5, abs=0.02)
    formulas = [f"Al{k}O{k + 1}" for k in range(1, 2000)]
    assert np.mean([is_held_apart(formula=formula) for formula in formulas]) == pytest.approx(1 / 10, abs=0.02)


def test_pure_elements_are_no_compositions() -> None:
    assert not any(
        is_held_apart(formula=symbol) for symbol in ("C", "Fe", "Cu4", "Si8", "W", "Au", "H2", "Mg", "Zr", "Na")
    )


def test_a_joined_molecule_is_held_apart_with_any_of_its_parts() -> None:
    name = next(name for name in g2_molecules() if is_held_apart(molecule=name))
    assert is_held_apart(molecule=f"CH4+{name}")
    assert is_held_apart(molecule=f"{name}+H2O/Cl")


def test_sides() -> None:
    assert belongs(frozenset(), "training")
    assert not belongs(frozenset(), "assessment")
    assert belongs({"element"}, "assessment")
    with pytest.raises(SettingsError, match="did you mean 'training'"):
        belongs(frozenset(), "trainin")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("make", [random_crystal, random_perovskite, random_molecule])
def test_makers_keep_the_sides_apart(make) -> None:
    random = np.random.default_rng(5)
    assert not any(reasons_of(make(random, side="training")) for _ in range(40))
    assert all(reasons_of(make(random, side="assessment")) for _ in range(15))


def test_slabs_come_from_crystals_of_their_side() -> None:
    random = np.random.default_rng(6)
    for _ in range(5):
        slab = random_surface(random, side="training", adsorbate_share=1.0)
        assert not reasons_of(slab.info["crystal"])


@pytest.mark.parametrize("why", ["element", "prototype", "composition"])
def test_assessment_can_ask_for_one_reason_alone(why) -> None:
    random = np.random.default_rng(7)
    assert all(reasons_of(random_crystal(random, side="assessment", why=why)) == {why} for _ in range(5))
