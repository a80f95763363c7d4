"""CHGNet, SevenNet and GFN2: equal to their packages' own calculators, quiet, and nothing global is touched."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule

from relaxion.errors import MissingElementError, PotentialError, StructureError
from relaxion.potentials.chgnet import Chgnet, angles_between
from relaxion.potentials.chgnet import load_network as load_chgnet
from relaxion.potentials.engines import Gfn2
from relaxion.potentials.registry import potential
from relaxion.structures import Structures

ENERGY, FORCE, STRESS = 1e-4, 1e-3, 1e-4  # eV, eV/Å and eV/Å³ that float32 may cost against the packages themselves


def crystals() -> list[Atoms]:
    """An ionic crystal, a covalent one smaller than any cutoff, an oxide, a metal surface, an open molecular one."""
    salt = bulk("NaCl", "rocksalt", a=5.5, cubic=True)
    diamond = bulk("C", "diamond", a=3.6)
    perovskite = Atoms(
        "SrTiO3", scaled_positions=[[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]],
        cell=[3.95, 3.9, 4.0], pbc=True,
    )  # fmt: skip
    slab = fcc111("Pt", (1, 2, 2), a=3.97, vacuum=6.0, orthogonal=True)
    slab.pbc = True
    ice = molecule("H2O", cell=[4.0, 4.2, 4.4], pbc=True)
    images = [salt, diamond, perovskite, slab, ice]
    for seed, atoms in enumerate(images):
        atoms.rattle(0.06, seed=seed)
    return images


def molecules() -> list[Atoms]:
    images = [molecule(name) for name in ("H2O", "CH3CH2OH", "C6H6", "HCl")]
    for seed, atoms in enumerate(images):
        atoms.rattle(0.05, seed=seed)
    return images


def chgnets_own() -> Any:
    from chgnet.model.dynamics import CHGNetCalculator

    return CHGNetCalculator(use_device="cpu")


def sevenns_own() -> Any:
    from sevenn.calculator import SevenNetCalculator

    return SevenNetCalculator("7net-0", device="cpu")


def tblites_own() -> Any:
    from tblite.ase import TBLite

    return TBLite(method="GFN2-xTB", verbosity=0)


ENGINES: dict[str, tuple[Callable[[], Any], Callable[[], list[Atoms]]]] = {
    "chgnet": (chgnets_own, crystals),
    "sevennet": (sevenns_own, crystals),
    "gfn2": (tblites_own, lambda: [*molecules(), bulk("NaCl", "rocksalt", a=5.6)]),
}
every_engine = pytest.mark.parametrize("name", ENGINES)


@every_engine
def test_equals_the_packages_own_calculator(name: str) -> None:
    make, images = ENGINES[name]
    warnings.simplefilter("ignore")  # of their calculators; pytest sets it back
    calculator = make()
    found = potential(name)(Structures.from_ase(images()), stresses=True)
    assert found.stresses is not None
    assert found.energies.dtype == found.forces.dtype == found.stresses.dtype == torch.float64
    start = 0
    for number, atoms in enumerate(images()):
        atoms.calc = calculator
        forces = found.forces[start : start + len(atoms)].numpy()
        start += len(atoms)
        assert np.abs(atoms.get_forces()).max() > 0.1 or name == "gfn2"
        assert float(found.energies[number]) == pytest.approx(atoms.get_potential_energy(), abs=ENERGY)
        assert forces == pytest.approx(atoms.get_forces(), abs=FORCE)
        if atoms.pbc.all():
            stress = found.stresses[number].numpy()
            assert stress == pytest.approx(atoms.get_stress(voigt=False), abs=STRESS)
        else:
            assert not found.stresses[number].any()


@every_engine
def test_forces_and_stresses_are_slopes_of_the_energy(name: str) -> None:
    # steps as long as float32 needs them; to the last digit in tests/contracts/test_potentials.py, where float64 can
    engine, step = potential(name), 5e-3
    start = Structures.from_ase(ENGINES[name][1]()[0])
    found = engine(start, stresses=True)
    toward = torch.randn((start.n_atoms, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    toward = toward / toward.norm()
    sides = [replace(start, positions=start.positions + sign * step * toward) for sign in (1, -1)]
    energies = engine(Structures.concatenate(sides)).energies
    slope = float(energies[0] - energies[1]) / (2 * step)
    assert slope == pytest.approx(-float((found.forces * toward).sum()), abs=5e-3)
    if start.periodic.all():
        grown = [
            replace(start, positions=start.positions * (1 + sign * 1e-3), cells=start.cells * (1 + sign * 1e-3))
            for sign in (1, -1)
        ]
        energies = engine(Structures.concatenate(grown)).energies
        assert found.stresses is not None
        trace = float(found.stresses[0].trace() * start.volumes[0])
        assert float(energies[0] - energies[1]) / 2e-3 == pytest.approx(trace, rel=1e-2, abs=0.02)


@every_engine
def test_many_at_once_equals_one_by_one(name: str) -> None:
    engine, images = potential(name), ENGINES[name][1]()
    together = engine(Structures.from_ase(images), stresses=True)
    singles = [engine(Structures.from_ase(atoms), stresses=True) for atoms in images]
    assert engine.calls == 2 * len(images)
    assert together.stresses is not None
    stresses = [single.stresses for single in singles if single.stresses is not None]
    torch.testing.assert_close(together.energies, torch.cat([s.energies for s in singles]), rtol=0, atol=1e-5)
    torch.testing.assert_close(together.forces, torch.cat([s.forces for s in singles]), rtol=0, atol=1e-4)
    torch.testing.assert_close(together.stresses, torch.cat(stresses), rtol=0, atol=1e-5)


@every_engine
def test_more_than_fits_into_one_call_of_the_network(name: str) -> None:
    engine, atoms = potential(name), ENGINES[name][1]()[0]
    one = engine(Structures.from_ase(atoms))
    many = engine(Structures.from_ase([atoms] * 12))
    torch.testing.assert_close(many.energies, one.energies.expand(12), rtol=0, atol=1e-5)
    torch.testing.assert_close(many.forces, one.forces.repeat(12, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "symbol"), [("chgnet", "Po"), ("chgnet", "Cm"), ("sevennet", "Rn"), ("gfn2", "U")])
def test_an_element_it_does_not_know(name: str, symbol: str) -> None:
    engine = potential(name)
    with pytest.raises(MissingElementError, match=f"has no parameters for {symbol}; .*H to ") as caught:
        engine(Structures.from_ase(Atoms([symbol, "O"], positions=[[0, 0, 0], [0, 0, 2]])))
    assert len(str(caught.value)) < 120, "ranges of elements, not a list of 89"
    assert engine.calls == 0


def test_gfn2_is_periodic_along_all_axes_or_none() -> None:
    slab = fcc111("Al", (1, 1, 2), vacuum=5.0)
    with pytest.raises(StructureError, match="structure 1 is periodic along 2 of 3 axes"):
        Gfn2()(Structures.from_ase([molecule("H2O"), slab]))
    boxed = molecule("H2O", vacuum=4.0)
    evaluation = Gfn2()(Structures.from_ase([molecule("H2O"), boxed]), stresses=True)
    assert float(evaluation.energies[0]) == pytest.approx(float(evaluation.energies[1]), abs=1e-8)


def test_gfn2_without_an_answer() -> None:
    engine = Gfn2()
    engine.calculator.set(max_iterations=1)  # type: ignore[attr-defined]
    with pytest.raises(PotentialError, match=r"GFN2-xTB failed: .*"):
        engine(Structures.from_ase(molecule("C6H6")))


QUIET = """
import sys, warnings
warnings.simplefilter("error")
import torch
before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
import relaxion
from relaxion.structures import Structures
from ase.build import bulk, molecule
thing = molecule("H2O") if sys.argv[1] == "gfn2" else bulk("NaCl", "rocksalt", a=5.6)
thing = Structures.from_ase(thing)
with torch.no_grad():
    relaxion.potential(sys.argv[1])(thing)
after = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
assert before == after, (before, after)
torch.set_default_dtype(torch.float64)
relaxion.potential(sys.argv[1])(thing)
assert torch.get_default_dtype() == torch.float64
assert sys.argv[1] != "chgnet" or "chgnet" not in sys.modules  # two seconds of imports for a file of tensors
"""


@every_engine
def test_it_says_nothing_and_changes_nothing_global(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", QUIET, name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_networks_are_loaded_once() -> None:
    assert Chgnet()._network is Chgnet()._network
    assert Chgnet().calls == 0


def test_float32_is_float64_within_its_noise() -> None:
    structures = Structures.from_ase(crystals())
    rough, fine = Chgnet()(structures, stresses=True), Chgnet(torch.float64)(structures, stresses=True)
    torch.testing.assert_close(rough.energies, fine.energies, rtol=0, atol=1e-5)
    torch.testing.assert_close(rough.forces, fine.forces, rtol=0, atol=2e-4)
    torch.testing.assert_close(rough.stresses, fine.stresses, rtol=0, atol=1e-5)


def test_angles_by_hand() -> None:
    centers = torch.tensor([4, 1, 4, 4, 0])
    found = {(int(first), int(second)) for first, second in angles_between(centers).T}
    assert found == {(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)}
    assert angles_between(centers).shape == (2, 6)
    assert angles_between(torch.tensor([], dtype=torch.int64)).shape == (2, 0)


def test_a_wheel_with_other_weights_is_one_sentence(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pretrained" / "0.3.0"
    folder.mkdir(parents=True)
    monkeypatch.setattr("relaxion.potentials.chgnet.package_folder", lambda _: tmp_path)
    for content, word in ((None, "0 files of weights"), ({"model": {"state_dict": {}}}, "does not hold the weights")):
        load_chgnet.cache_clear()
        if content is not None:
            torch.save(content, folder / "weights.pth.tar")
        with pytest.raises(PotentialError, match=word) as caught:
            Chgnet()
        assert "try: pip install 'chgnet" in str(caught.value)
    load_chgnet.cache_clear()


def test_crowded_atoms_are_answered_with_nan_and_cost_no_memory() -> None:
    usual = crystals()
    crushed = bulk("Cu", "fcc", a=3.6, cubic=True)
    crushed.set_cell(crushed.cell * 0.2, scale_atoms=True)  # 25 million angles
    chgnet = Chgnet()
    alone = chgnet.evaluate(Structures.from_ase(usual), True)
    together = chgnet.evaluate(Structures.from_ase([*usual[:2], crushed, *usual[2:]]), True)
    assert torch.isnan(together.energies).tolist() == [False, False, True, False, False, False]
    kept = ~torch.isnan(together.energies)
    torch.testing.assert_close(together.energies[kept], alone.energies, atol=1e-4, rtol=0)
    assert alone.stresses is not None
    assert together.stresses is not None
    torch.testing.assert_close(together.stresses[kept], alone.stresses, atol=1e-4, rtol=0)
    finite = torch.isfinite(together.forces).all(dim=1)
    torch.testing.assert_close(together.forces[finite], alone.forces, atol=1e-3, rtol=0)
    assert int((~finite).sum()) == len(crushed)
    assert bool(torch.isnan(chgnet.evaluate(Structures.from_ase([crushed]), False).energies).all())
