"""EAM from tables: reading, agreement with ASE's calculator, the ends of the tables, broken files."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.eam import EAM
from scipy.interpolate import InterpolatedUnivariateSpline

from relaxion.errors import FileError
from relaxion.potentials import TabulatedEam, ZhouEam
from relaxion.potentials.eam import Splines, read_eam_tables
from relaxion.structures import Structures

N_RHO, N_R, CUTOFF, LARGEST_DENSITY = 400, 500, 6.0, 40.0
REAL_FILES = sorted(Path(__file__).parents[4].glob("shared/data/*[sy].gz"))  # absent outside of our machines


def smooth_functions(symbols: list[str]) -> dict[str, np.ndarray]:
    """Made-up functions with the shape of a metal's; every pair of elements has its own density."""
    r = CUTOFF / N_R * np.arange(N_R)
    tail = np.clip(1 - r / CUTOFF, 0, None) ** 3
    kinds = np.arange(1, len(symbols) + 1)
    rho = LARGEST_DENSITY / (N_RHO - 1) * np.arange(N_RHO)
    source, site = kinds[:, None, None], kinds[None, :, None]
    return {
        "F": -1.3 * kinds[:, None] * np.sqrt(rho + 0.1) + 0.01 * rho,
        "rho": (9.0 + source + 0.4 * site) * np.exp(-(0.9 + 0.05 * source - 0.02 * site) * r) * tail,
        "rphi": (20.0 + 3 * (source + site)) * np.exp(-1.5 * r) * tail,
    }


def write_table(path: Path, symbols: list[str], finnis_sinclair: bool) -> Path:
    functions = smooth_functions(symbols)
    header = ["made up", "for", "tests", f"{len(symbols)} {' '.join(symbols)}"]
    header.append(f"{N_RHO} {LARGEST_DENSITY / (N_RHO - 1)!r} {N_R} {CUTOFF / N_R!r} {CUTOFF}")
    blocks = []
    for number in range(len(symbols)):
        blocks.append(f"{number + 20} 50.0 4.0 fcc")
        blocks.append(_rows(functions["F"][number]))
        densities = functions["rho"][number]
        blocks += [_rows(row) for row in (densities if finnis_sinclair else densities[:1])]
    for i in range(len(symbols)):
        blocks += [_rows(functions["rphi"][i, j]) for j in range(i + 1)]
    text = "\n".join([*header, *blocks]) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def _rows(values: np.ndarray) -> str:
    return "\n".join(" ".join(f"{value:.16e}" for value in row) for row in values.reshape(-1, 5))


def crystals(symbols: list[str], number: int = 3, volume: float = 15.0) -> list[Atoms]:
    generator = np.random.default_rng(5)
    images = []
    for count in range(2, 2 + number):
        cell = (volume * count) ** (1 / 3) * (np.eye(3) + generator.normal(0, 0.08, (3, 3)))
        positions = generator.random((count, 3)) @ cell
        images.append(Atoms(generator.choice(symbols, count), positions=positions, cell=cell, pbc=True))
    return images


def ase_calculator(path: Path, form: str) -> EAM:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return EAM(potential=io.StringIO(text), form=form)


def check_against_ase(path: Path, form: str, images: list[Atoms]) -> None:
    calculator = ase_calculator(path, form)
    evaluation = TabulatedEam.from_file(path)(Structures.from_ase(images))
    assert evaluation.stresses is not None
    forces = evaluation.forces.split([len(atoms) for atoms in images])
    for number, atoms in enumerate(images):
        atoms.calc = calculator
        assert float(evaluation.energies[number]) == pytest.approx(atoms.get_potential_energy(), rel=1e-8)
        assert calculator.total_density.max() < calculator.rho[-1], "ASE would extrapolate"
        largest = np.abs(atoms.get_forces()).max()
        np.testing.assert_allclose(forces[number], atoms.get_forces(), rtol=0, atol=1e-8 * largest + 1e-12)
        if atoms.cell.rank == 3:
            stress = atoms.get_stress(voigt=False)
            limit = 1e-8 * np.abs(stress).max()
            np.testing.assert_allclose(evaluation.stresses[number], stress, rtol=0, atol=limit)


GENERATED = [
    (name, symbols)
    for name in ("a.eam.alloy", "a.eam.alloy.gz", "a.eam.fs", "a.fs.gz")
    for symbols in (["Al"], ["Al", "Fe"], ["Ni", "Al", "Cu"])
]


@pytest.mark.parametrize(("name", "symbols"), [*GENERATED, *((str(path), None) for path in REAL_FILES)])
def test_equal_to_ase(name: str, symbols: list[str] | None, tmp_path: Path) -> None:
    form, path = "fs" if "fs" in name else "alloy", Path(name)
    if symbols:
        path = write_table(tmp_path / name, symbols, finnis_sinclair=form == "fs")
    elements = read_eam_tables(path).elements
    assert symbols in (None, elements)
    cluster = Atoms(elements[-1] * 3, positions=[[0, 0, 0], [2.2, 0.3, 0], [0.4, 2.9, 0.5]])
    check_against_ase(path, form, [*crystals(elements, number=3 if symbols else 2), cluster])


def test_density_is_made_by_the_section_and_felt_by_its_table(tmp_path: Path) -> None:
    """The convention of LAMMPS: section of the source, table of the site; an asymmetric file can tell."""
    functions = smooth_functions(["Al", "Fe"])
    tables = read_eam_tables(write_table(tmp_path / "a.fs", ["Al", "Fe"], finnis_sinclair=True))
    np.testing.assert_allclose(tables.densities, functions["rho"])
    distance_index = 200
    distance = CUTOFF / N_R * distance_index
    pair = Atoms("AlFe", positions=[[0, 0, 0], [0, 0, distance]])
    felt_by_aluminium = functions["rho"][1, 0, distance_index]
    felt_by_iron = functions["rho"][0, 1, distance_index]
    rho = tables.density_spacing * np.arange(N_RHO)
    expected = functions["rphi"][0, 1, distance_index] / distance
    expected += float(InterpolatedUnivariateSpline(rho, functions["F"][0])(felt_by_aluminium))
    expected += float(InterpolatedUnivariateSpline(rho, functions["F"][1])(felt_by_iron))
    energy = float(TabulatedEam(tables)(Structures.from_ase(pair)).energies)
    assert energy == pytest.approx(expected, rel=1e-12)


def test_table_of_the_analytic_potential_gives_the_analytic_potential(tmp_path: Path) -> None:
    """Independent of ASE: tabulate Zhou's copper from its own pair terms, read it back."""
    zhou, n_points, cutoff = ZhouEam(), 3000, 5.7
    kinds = zhou.kinds_of(torch.full((2, n_points), 29))
    distances = cutoff / n_points * torch.arange(n_points, dtype=torch.float64).clamp_min(0.5)
    terms = zhou.pair_terms(distances, kinds)
    assert terms.densities is not None
    rho = torch.linspace(0, 100, n_points, dtype=torch.float64)
    embedding = zhou.embedding(rho, kinds[0])[0]
    body = [embedding, terms.densities[0], terms.energies * distances]
    lines = ["c", "c", "c", "1 Cu", f"{n_points} {float(rho[1])!r} {n_points} {cutoff / n_points!r} {cutoff}"]
    lines += ["29 63.5 3.61 fcc", *[_rows(values.numpy()) for values in body]]
    path = tmp_path / "cu.set"
    path.write_text("\n".join(lines))
    structures = Structures.from_ase(bulk("Cu", cubic=True) * (2, 1, 1))
    exact, tabulated = zhou(structures), TabulatedEam.from_file(path)(structures)
    torch.testing.assert_close(tabulated.energies, exact.energies, rtol=1e-6, atol=0)
    torch.testing.assert_close(tabulated.stresses, exact.stresses, rtol=0, atol=1e-6)


def test_crowded_atoms_stay_on_a_straight_line(tmp_path: Path) -> None:
    """Beyond the last density F continues with its last slope, so energies stay finite and smooth."""
    values = smooth_functions(["Al"])["F"]
    splines = Splines(0.0, LARGEST_DENSITY / (N_RHO - 1), values)
    at = torch.tensor([LARGEST_DENSITY, LARGEST_DENSITY + 1, LARGEST_DENSITY + 1e6, -1.0], dtype=torch.float64)
    energies, slopes = splines(torch.zeros(4, dtype=torch.int64), at, straight_ends=True)
    assert float(energies[0]) == pytest.approx(values[0, -1], rel=1e-12)
    assert float(energies[1] - energies[0]) == pytest.approx(float(slopes[0]), rel=1e-9)
    assert float(slopes[2]) == float(slopes[0])
    assert torch.isfinite(energies).all()
    path = write_table(tmp_path / "a.eam.alloy", ["Al"], finnis_sinclair=False)
    beyond = TabulatedEam.from_file(path).embedding(at, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(beyond[0], energies)
    assert torch.equal(beyond[1], slopes)
    pressed = Structures.from_ase([bulk("Al", a=1.5), Atoms("Al2", positions=[[0, 0, 0], [0, 0, 1e-6]])])
    evaluation = TabulatedEam.from_file(path)(pressed)
    assert torch.isfinite(evaluation.energies).all()
    assert torch.isfinite(evaluation.forces).all()


def test_cutoff_beyond_the_table_is_not_believed(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.eam.alloy", ["Al"], finnis_sinclair=False)
    path.write_text(path.read_text().replace(f" {CUTOFF}\n", " 50.0\n", 1))
    pair = Structures.from_ase(Atoms("Al2", positions=[[0, 0, 0], [0, 0, CUTOFF + 1]]))
    alone = Structures.from_ase([Atoms("Al"), Atoms("Al")])
    potential = TabulatedEam.from_file(path)
    assert float(potential(pair).energies) == float(potential(alone).energies.sum())


def test_fortran_exponents(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.eam.alloy", ["Al"], finnis_sinclair=False)
    expected = read_eam_tables(path)
    path.write_text(path.read_text().replace("e+", "D+").replace("e-", "d-"))
    np.testing.assert_array_equal(read_eam_tables(path).embedding, expected.embedding)


@pytest.mark.parametrize("comment", ["Schönfeld, 3.5 Å".encode("latin-1"), b"a\x85b\x1cc\x0cd", "Å\u2028".encode()])
def test_comments_are_in_any_encoding(tmp_path: Path, comment: bytes) -> None:
    path = write_table(tmp_path / "a.eam.alloy", ["Al"], finnis_sinclair=False)
    expected = read_eam_tables(path)
    path.write_bytes(path.read_bytes().replace(b"made up", comment, 1))
    np.testing.assert_array_equal(read_eam_tables(path).pair_products, expected.pair_products)


@pytest.mark.parametrize("symbols", [["Al"], ["Al", "Fe"], ["Ni", "Al", "Cu"]])
@pytest.mark.parametrize("finnis_sinclair", [False, True])
@pytest.mark.parametrize("lines", [1, 3000])  # the latter are more words than the tables of either kind
def test_text_after_the_tables_is_ignored(
    tmp_path: Path, symbols: list[str], finnis_sinclair: bool, lines: int
) -> None:
    path = write_table(tmp_path / "table", symbols, finnis_sinclair=finnis_sinclair)
    expected = read_eam_tables(path)
    path.write_text(path.read_text() + "# fitted in 2004\n1.0\n" * lines)
    found = read_eam_tables(path)
    np.testing.assert_array_equal(found.densities, expected.densities)
    np.testing.assert_array_equal(found.pair_products, expected.pair_products)


BROKEN = {
    "empty": (lambda _: "", "ends before the number of elements"),
    "no number of elements": (lambda text: text.replace("2 Al Fe", "Al Fe"), "is 'Al', not a whole number"),
    "unknown element": (lambda text: text.replace("2 Al Fe", "2 Al Qq"), "names the elements ['Al', 'Qq']"),
    "repeated element": (lambda text: text.replace("2 Al Fe", "2 Al Al"), "names the elements ['Al', 'Al']"),
    "cut off": (lambda text: text[: len(text) // 2], "values where its sizes ask for"),
    "too long": (lambda text: text + "1.0\n", "values where its sizes ask for"),
    "not a number": (lambda text: text.replace("e-01", "x-01", 1), "could not convert"),
    "not finite": (lambda text: text.replace("e-01", "e+999", 1), "not finite"),
    "negative spacing": (lambda text: text.replace(f"{N_RHO} 0", f"{N_RHO} -0", 1), "not above 0"),
    "too few points": (lambda text: text.replace(f"{N_RHO} 0", "2 0", 1), "a spline needs 4 points"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_explained(case: str, tmp_path: Path) -> None:
    damage, word = BROKEN[case]
    path = write_table(tmp_path / "a.eam.alloy", ["Al", "Fe"], finnis_sinclair=False)
    path.write_text(damage(path.read_text()))
    with pytest.raises(FileError) as caught:
        TabulatedEam.from_file(path)
    message = str(caught.value)
    assert word in message
    assert str(path) in message
    assert "setfl" in message


def test_unreadable_files_are_explained(tmp_path: Path) -> None:
    damaged = tmp_path / "a.fs.gz"
    damaged.write_bytes(gzip.compress(b"text" * 1000)[:40])
    binary = tmp_path / "a.fs"
    binary.write_bytes(bytes(range(256)))
    for path, word in (
        (tmp_path / "none.fs", "no file"),
        (tmp_path, "cannot be read"),
        (damaged, "cannot be read"),
        (binary, "cannot be read"),
    ):
        with pytest.raises(FileError, match=word):
            TabulatedEam.from_file(path)
