"""Reading files and splitting data sets by key."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import ase.io
import pytest
from ase import Atoms
from ase.build import bulk

from relaxion.errors import FileError, InputError
from relaxion.train.data.dataset import Dataset, read

METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au", "Fe")


IMPOSSIBLE_GROUP = b"""data_x
_cell_length_a 4
_cell_length_b 4
_cell_length_c 4
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_space_group_IT_number 500
loop_
_atom_site_label
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
Cu 0 0 0
"""


def alloys() -> list[Atoms]:
    images = []
    for first in METALS:
        for second in METALS:
            atoms = bulk("Cu", cubic=True)
            atoms.set_chemical_symbols([first, first, second, second])
            atoms.info["prototype"] = f"{first}-like"
            images.append(atoms)
    return images


def test_reads_what_ase_reads_also_compressed(tmp_path: Path) -> None:
    ase.io.write(tmp_path / "all.extxyz", alloys()[:5])
    (tmp_path / "all.extxyz.gz").write_bytes(gzip.compress((tmp_path / "all.extxyz").read_bytes()))
    assert [str(a.symbols) for a in read(tmp_path / "all.extxyz.gz")] == [str(a.symbols) for a in alloys()[:5]]
    assert len(read(tmp_path / "all.extxyz", index=2)) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.xyz", None, "does not exist"),
        ("empty.xyz", b"", "is empty"),
        ("nothing.unknown", b"hello", "cannot be read"),
        ("broken.xyz", b"3\nwater\nH 0 0\n", "cannot be read"),
        ("broken.extxyz.gz", b"not compressed", "cannot be read"),
        ("broken.cif", b"data_x\nloop_\n_atom\n", "cannot be read|no structure"),
        ("broken.traj", b"- of Ulm garbage", "cannot be read"),
        ("POSCAR", b"Cu\n1.0\n1 0 0\n", "cannot be read"),
        ("none.extxyz", b"0\nno atoms\n", "no structure with atoms"),
        ("group.cif", IMPOSSIBLE_GROUP, "cannot be read: SpacegroupNotFoundError"),
        ("OUTCAR", b" vasp.6.3.0\n POTCAR:    PAW_PBE Cu\n", "cannot be read: ParseError"),
        ("random.db", bytes(range(256)) * 20, "cannot be read: DatabaseError"),
        ("broken.cif.xz", b"\xfd7zXZ\x00 and then nonsense", "cannot be read: LZMAError"),
        ("n" * 300 + ".xyz", None, "cannot be read: File name too long"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=message) as caught:
        read(path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_package_of_a_reader_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "netCDF4", None)  # as if it were not installed
    (tmp_path / "run.nc").write_bytes(b"CDF\x01" + bytes(100))
    with pytest.raises(FileError, match=r"run\.nc cannot be read: "):
        read(tmp_path / "run.nc")


@pytest.mark.skipif(os.geteuid() == 0, reason="no permission stops root")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(FileError, match="Permission denied"):
        read(tmp_path / "closed" / "a.xyz")


def test_index_beyond_the_end_is_explained(tmp_path: Path) -> None:
    ase.io.write(tmp_path / "one.xyz", bulk("Cu"))
    with pytest.raises(FileError):
        read(tmp_path / "one.xyz", index=5)


@pytest.mark.parametrize("key", ["composition", "system", "prototype"])
def test_no_key_stands_on_both_sides(key: str) -> None:
    data = Dataset.of(alloys(), key)
    parts = data.split(0.5, 0.25)
    assert sum(len(part) for part in parts) == len(data)
    for number, part in enumerate(parts):
        others = set().union(*[set(p.keys) for n, p in enumerate(parts) if n != number])
        assert not set(part.keys) & others


def test_composition_is_reduced_and_order_free() -> None:
    data = Dataset.of([Atoms("Al2Fe2"), Atoms("FeAl"), Atoms("Al2Fe")])
    assert data.keys[0] == data.keys[1] != data.keys[2]
    assert Dataset.of([Atoms("FeAl2")], "system").keys == ("Al-Fe",)


def test_split_does_not_depend_on_order_or_company() -> None:
    images = alloys()
    train = set(Dataset.of(images).split(0.6)[0].keys)
    assert set(Dataset.of(images[::-1]).split(0.6)[0].keys) == train
    fewer = Dataset.of(images[::3]).split(0.6)[0].keys
    assert set(fewer) == train & set(Dataset.of(images[::3]).keys)
    assert set(Dataset.of(images).split(0.6, seed=1)[0].keys) != train


def test_split_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from ase import Atoms; from relaxion.train.data.dataset import Dataset;"
        "print(Dataset.of([Atoms(f'Al{n}Fe') for n in range(1, 30)]).split(0.5)[0].keys)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert len(next(iter(runs))) > 50


def test_fractions_hold_on_average() -> None:
    data = Dataset(tuple(alloys()[:1] * 2000), tuple(str(n) for n in range(2000)))
    sizes = [len(part) for part in data.split(0.7, 0.2)]
    assert sizes == pytest.approx([1400, 400, 200], abs=70)


@pytest.mark.parametrize("fractions", [(), (0.0,), (0.8, 0.3), (-0.5,)])
def test_nonsense_fractions_are_refused(fractions: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="fractions"):
        Dataset.of(alloys()).split(*fractions)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(InputError, match="prototype"):
        Dataset.of(alloys(), "prototipe")


def test_hold_out_elements() -> None:
    rest, held = Dataset.of(alloys()).hold_out(["Pd"])
    assert all("Pd" not in atoms.get_chemical_symbols() for atoms in rest.images)
    assert all("Pd" in atoms.get_chemical_symbols() for atoms in held.images)
    assert len(held) == 15
    assert len(rest) == 49
