"""Valid files of every kind that relaxion reads, and everything that can be wrong with them.

Nothing here is stored: seeds are made by relaxion and ASE themselves, spoilt copies by rules and a fixed random seed.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.constraints import FixAtoms
from safetensors.torch import save
from torch import Tensor

from relaxion.files import Format, Stored

Spoil = Callable[[Path], None]
"""Changes the copy of a seed in its place."""

CANARY = "canary"  # a file that a payload would leave in the working directory


@dataclass(frozen=True)
class Case:
    """One spoilt copy before one door."""

    door: str
    seed: str
    wrong: str  # in words
    spoil: Spoil
    must_be_seed: bool = False  # a digest guards the content: read means read as it was
    must_be_read: bool = False  # nothing is wrong with it


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(CANARY),)


# --------------------------------------------------------------------------------------------------- any file

NOT_UTF8 = b"\xff\xfe\xc3\x28\xa0\xa1\x80"
BOMB = 1 << 29  # bytes that a compressed file of a few megabytes becomes


def damaged_bytes(content: bytes, chance: random.Random, flips: int, cuts: int) -> Iterator[tuple[str, bytes]]:
    """What disks, networks and editors do."""
    size = len(content)
    for cut in sorted({0, 1, 7, 8, 9, size // 2, size - 1, *(chance.randrange(size) for _ in range(cuts))}):
        yield f"cut after {cut} bytes", content[:cut]
    for _ in range(flips):
        place, bit = chance.randrange(size), chance.randrange(8)
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        yield f"bit {bit} of byte {place} flipped", bytes(changed)
    for _ in range(max(flips // 6, 2)):
        begin, length = chance.randrange(size), chance.randrange(1, 64)
        yield f"{length} bytes from {begin} on are zero", content[:begin] + bytes(length) + content[begin + length :]
        yield f"{length} bytes from {begin} on are missing", content[:begin] + content[begin + length :]
        yield f"{length} bytes from {begin} on are there twice", content[: begin + length] + content[begin:]
        noise = chance.randbytes(length)
        yield f"{length} bytes from {begin} on are noise", content[:begin] + noise + content[begin + length :]
    yield "appended noise", content + chance.randbytes(200)
    yield "twice", content + content
    yield "all noise", chance.randbytes(max(size, 100))
    yield "all zero", bytes(max(size, 100))
    yield "not UTF-8 at the start", NOT_UTF8 + content
    yield "not UTF-8 in the middle", content[: size // 2] + NOT_UTF8 + content[size // 2 :]
    yield "Windows line ends", content.replace(b"\n", b"\r\n")
    yield "no line ends", content.replace(b"\n", b" ")
    yield "UTF-16", content.decode("latin-1").encode("utf-16")
    yield "byte order mark", b"\xef\xbb\xbf" + content
    yield "a pickle", pickle.dumps(Payload())
    yield "a pickle of protocol 0", pickle.dumps(Payload(), protocol=0)
    yield "a megabyte of brackets", b"[" * 1_000_000
    yield "a line of a megabyte", b"7" * 1_000_000
    yield "a megabyte of line ends", b"\n" * 1_000_000


def strange_places(path: Path) -> Iterator[tuple[str, Spoil]]:
    """Something else in place of the file."""
    del path

    def folder(file: Path) -> None:
        file.unlink()
        file.mkdir()

    def linked_to(target: str) -> Spoil:
        def spoil(file: Path) -> None:
            file.unlink()
            file.symlink_to(file.name if target == "self" else target)

        return spoil

    def pipe(file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    def secret(file: Path) -> None:
        file.chmod(0)

    yield "a folder", folder
    yield "a link to itself", linked_to("self")
    yield "a link to nothing", linked_to("nowhere")
    yield "a link to /dev/zero", linked_to("/dev/zero")
    yield "a link to a folder", linked_to("/etc")
    yield "a pipe nobody writes into", pipe
    yield "not readable", secret


def replaced(content: bytes) -> Spoil:
    def spoil(file: Path) -> None:
        file.unlink()
        file.write_bytes(content)

    return spoil


def any_file(
    door: str, seed: str, file: Path, inside: str, flips: int, cuts: int, *, guarded: bool = False
) -> Iterator[Case]:
    """Byte damage and strange places of one file; `inside`: its place in a seed that is a folder."""
    chance = random.Random(f"{door} {seed} {inside}")

    def within(spoil: Spoil) -> Spoil:
        return lambda root: spoil(root / inside if inside else root)

    about = f"{inside}: " if inside else ""
    for words, content in damaged_bytes(file.read_bytes(), chance, flips, cuts):
        yield Case(door, seed, about + words, within(replaced(content)), must_be_seed=guarded)
    for words, spoil in strange_places(file):
        yield Case(door, seed, about + words, within(spoil))


# ----------------------------------------------------------------------------------------------- plain values

DEEP = 100_000
STRANGE_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "0": 0,
    "huge": 10**30,
    "float": 1e308,
    "nan": float("nan"),
    "infinity": float("inf"),
    "word": "../../etc/passwd",
    "long word": "x" * 100_000,
    "zero byte": "a\0b",
    "lone surrogate": "\ud800",
    "list": [1, [2, "three"]],
    "empty list": [],
    "table": {"a": {"b": None}},
    "empty table": {},
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain values, tables and lists included."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for key in range(min(len(value), 2)):
            yield from leaves(value[key], (*path, key))


def with_leaf(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at that place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_leaf(value[path[0]], path[1:], new)
    return copy


def without_leaf(value: Any, path: tuple[Any, ...]) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without_leaf(value[path[0]], path[1:])
    return copy


def spoilt_values(values: Any, chance: random.Random, number: int) -> Iterator[tuple[str, Any]]:
    """Wrong kinds and sizes at places of chance; every key left out once."""
    places = list(leaves(values))
    for path in places:
        if path and len(path) <= 2:
            yield f"without {'.'.join(map(str, path))}", without_leaf(values, path)
    every = [(path, word) for path in places for word in STRANGE_VALUES]
    for path, word in chance.sample(every, min(number, len(every))):
        yield f"{'.'.join(map(str, path)) or 'all'} is {word}", with_leaf(values, path, STRANGE_VALUES[word])


def spoilt_json(text: str, chance: random.Random, number: int) -> Iterator[tuple[str, bytes]]:
    """JSON that is well formed but wrong, and some that is not."""
    values = json.loads(text)
    for words, changed in spoilt_values(values, chance, number):
        yield words, json.dumps(changed).encode()
    yield "nested too deeply", (b"[" * DEEP + b"]" * DEEP)
    yield "tables nested too deeply", (b'{"a":' * DEEP + b"1" + b"}" * DEEP)
    if isinstance(values, dict) and values:
        key = next(iter(values))
        deep = json.dumps({**values, key: "HERE"}).replace('"HERE"', "[" * DEEP + "]" * DEEP)
        yield f"{key} nested too deeply", deep.encode()
        yield "every key twice", (text.rstrip()[:-1] + "," + text.lstrip()[1:]).encode()
        yield "a number of 10 000 digits", json.dumps({**values, key: "HERE"}).replace('"HERE"', "9" * 10_000).encode()


def json_file(door: str, seed: str, file: Path, inside: str, number: int) -> Iterator[Case]:
    chance = random.Random(f"values {door} {seed} {inside}")
    for words, content in spoilt_json(file.read_text(), chance, number):
        spoil = replaced(content)
        yield Case(door, seed, f"{inside}: {words}" if inside else words, _inside(spoil, inside))


def _inside(spoil: Spoil, inside: str) -> Spoil:
    return (lambda root: spoil(root / inside)) if inside else spoil


# ------------------------------------------------------------------------------------------- files of tensors


def spoilt_tensors(tensors: dict[str, Tensor], chance: random.Random, number: int) -> Iterator[tuple[str, dict]]:
    """Tensors of other kinds, shapes and values than whoever wrote the file would have written."""
    names = sorted(tensors)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "of 64 bits": lambda t: t.to(torch.float64),
        "of 16 bits": lambda t: t.to(torch.float16),
        "bfloat16": lambda t: t.to(torch.bfloat16),
        "whole numbers": lambda t: t.to(torch.int64),
        "truth values": lambda t: t.bool(),
        "a byte": lambda t: t.to(torch.uint8),
        "of eight bits": lambda t: t.float().to(torch.float8_e4m3fn),
        "flat": lambda t: t.reshape(-1),
        "one axis more": lambda t: t[None].clone(),
        "empty": lambda t: t.reshape(-1)[:0].clone(),
        "twice as long": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]),
        "one number": lambda t: t.reshape(-1)[:1].sum(),
        "negative": lambda t: -t.to(torch.int64) - 1 if not t.is_floating_point() else -t - 1,
        "huge": lambda t: torch.full_like(t, 2**62 if t.dtype == torch.int64 else 1),
        "NaN": lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t.new_zeros((3, 3)),
        "infinite": lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t.new_zeros(7),
    }
    for name in names:
        yield f"without {name}", {key: tensor for key, tensor in tensors.items() if key != name}
    every = [(name, words) for name in names for words in changes]
    for name, words in chance.sample(every, min(number, len(every))):
        yield f"{name} is {words}", {**tensors, name: changes[words](tensors[name]).contiguous()}
    yield "no tensor at all", {"nothing": torch.zeros(1)}
    yield "a tensor too many", {**tensors, "../../escape": torch.zeros(2)}


def crafted(
    door: str, seed: str, file: Path, inside: str, form: Format, kind: str, n_values: int, n_tensors: int
) -> Iterator[Case]:
    """Files of tensors with the right digest and the wrong content: no accident, but somebody's work."""
    chance = random.Random(f"crafted {door} {seed} {inside}")
    stored = form.read(file, kind)

    def case(words: str, tensors: dict[str, Tensor], values: Any) -> Case:
        def spoil(root: Path) -> None:
            target = root / inside if inside else root
            target.unlink()
            form.write(target, kind, tensors, values)

        return Case(door, seed, f"crafted: {words}", spoil)

    for words, values in spoilt_values(stored.values, chance, n_values):
        yield case(words, stored.tensors, values)
    for words, tensors in spoilt_tensors(stored.tensors, chance, n_tensors):
        yield case(words, tensors, stored.values)
    for words, text in (
        ("values nested too deeply", "[" * DEEP + "]" * DEEP),
        ("values are no JSON", "{"),
        ("values are empty", ""),
        ("values are a number of 10 000 digits", "9" * 10_000),
    ):
        yield _with_text(door, seed, inside, f"crafted: {words}", form, kind, stored, text)
    yield from spoilt_headers(door, seed, file, inside)


def _with_text(
    door: str, seed: str, inside: str, words: str, form: Format, kind: str, stored: Stored, text: str
) -> Case:
    from relaxion.files import _digest_of_all

    def spoil(root: Path) -> None:
        target = root / inside if inside else root
        header = {
            "relaxion_kind": kind,
            "relaxion_format_version": str(form.version),
            "relaxion_digest": _digest_of_all(stored.tensors, kind, text),
            "relaxion_values": text,
        }
        target.unlink()
        target.write_bytes(save(stored.tensors, metadata=header))

    return Case(door, seed, words, spoil)


def spoilt_headers(door: str, seed: str, file: Path, inside: str) -> Iterator[Case]:
    """The first bytes of a safetensors file: length, then JSON with names, kinds, shapes and places."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(key for key in header if key != "__metadata__")
    about, other = header["__metadata__"], header[name]

    def packed(new: Any, rest: bytes = data) -> bytes:
        text = new if isinstance(new, bytes) else json.dumps(new).encode()
        return struct.pack("<Q", len(text)) + text + rest

    def changed(**more: Any) -> bytes:
        return packed({**header, name: {**other, **more}})

    def told(**more: Any) -> bytes:
        return packed({**header, "__metadata__": {**about, **more}})

    files = {
        "header of 2^63 bytes": struct.pack("<Q", 2**63) + content[8:],
        "header of 2^40 bytes": struct.pack("<Q", 2**40) + content[8:],
        "header longer than the file": struct.pack("<Q", len(content) * 2) + content[8:],
        "header of no bytes": struct.pack("<Q", 0) + content[8:],
        "header shorter than it is": struct.pack("<Q", length - 5) + content[8:],
        "header of a megabyte of blanks": packed(b" " * (1 << 20)),
        "header nested too deeply": packed(b"[" * DEEP),
        "header is a list": packed([]),
        "header not UTF-8": packed(b'{"' + NOT_UTF8 + b'": 1}'),
        "header has every tensor twice": packed(content[8 : 8 + length].rstrip()[:-1] + content[9 : 8 + length]),
        "no metadata": packed({key: value for key, value in header.items() if key != "__metadata__"}),
        "metadata is a list": packed({**header, "__metadata__": []}),
        "metadata of numbers": packed({**header, "__metadata__": {"relaxion_kind": 7}}),
        "shape of 2^60": changed(shape=[2**60]),
        "shape that overflows": changed(shape=[2**32, 2**32, 2**32]),
        "negative shape": changed(shape=[-1]),
        "shape of words": changed(shape=["many"]),
        "place outside the file": changed(data_offsets=[0, 2**50]),
        "place backwards": changed(data_offsets=[8, 0]),
        "place negative": changed(data_offsets=[-8, 8]),
        "unknown kind of numbers": changed(dtype="PICKLE"),
        "other kind of numbers": changed(dtype="I8"),
        "bfloat16": changed(dtype="BF16"),
        "data shorter": packed(header, data[: len(data) // 2]),
        "data longer": packed(header, data + bytes(1000)),
        "no data": packed(header, b""),
        "kind of another file": told(relaxion_kind="relaxion something"),
        "version of the future": told(relaxion_format_version="999"),
        "version of 10 000 digits": told(relaxion_format_version="9" * 10_000),
        "version of strange digits": told(relaxion_format_version="²"),
        "negative version": told(relaxion_format_version="-1"),
        "no digest": told(relaxion_digest=""),
        "wrong digest": told(relaxion_digest="0" * 64),
        "values nested too deeply": told(relaxion_values="[" * DEEP),
        "a name of a path": packed({**{k: v for k, v in header.items() if k != name}, "../../" + name: other}),
    }
    for words, new in files.items():
        yield Case(door, seed, words, _inside(replaced(new), inside), must_be_seed=words != "no metadata")


# ------------------------------------------------------------------------------------------------- structures


def structure_seeds() -> dict[str, Atoms]:
    crystal = bulk("Cu", a=3.7, cubic=True)
    crystal.symbols[0] = "Au"
    crystal.positions[1] += 0.1
    return {"crystal": crystal, "molecule": molecule("H2O", vacuum=3.0)}


STRUCTURE_FILES: dict[str, tuple[str, str]] = {
    # name of the file: (format of ASE, seed)
    "a.extxyz": ("extxyz", "crystal"),
    "a.xyz": ("xyz", "crystal"),
    "a.cif": ("cif", "crystal"),
    "POSCAR": ("vasp", "crystal"),
    "XDATCAR": ("vasp-xdatcar", "crystal"),
    "a.traj": ("traj", "crystal"),
    "a.json": ("json", "crystal"),
    "a.db": ("db", "crystal"),
    "a.xsf": ("xsf", "crystal"),
    "a.cube": ("cube", "crystal"),
    "a.pdb": ("proteindatabank", "crystal"),
    "geometry.in": ("aims", "crystal"),
    "a.pwi": ("espresso-in", "crystal"),
    "a.gen": ("gen", "crystal"),
    "a.cell": ("castep-cell", "crystal"),
    "a.res": ("res", "crystal"),
    "a.cfg": ("cfg", "crystal"),
    "a.gro": ("gromacs", "crystal"),
    "coord": ("turbomole", "molecule"),
    "a.mol": ("mol", "molecule"),
    "a.sdf": ("sdf", "molecule"),
    "a.nwi": ("nwchem-in", "molecule"),
    "a.com": ("gaussian-in", "molecule"),
    "a.xtl": ("mustem", "crystal"),
    "CONFIG": ("dlp4", "crystal"),
    "a.ascii": ("v-sim", "crystal"),
}
NO_FUZZ = ("a.sdf", "a.mol", "a.xtl")  # written by hand below, or not writable by ASE


def write_structures(folder: Path) -> list[str]:
    """One file of every format that ASE can write; their names."""
    from ase.io import write

    folder.mkdir(parents=True, exist_ok=True)
    seeds, written = structure_seeds(), []
    for name, (form, seed) in STRUCTURE_FILES.items():
        more: dict[str, Any] = {}
        if form == "espresso-in":
            more = {"pseudopotentials": {"Cu": "Cu.upf", "Au": "Au.upf"}}
        if form == "cube":
            import numpy as np

            more = {"data": np.zeros((2, 2, 2))}
        try:
            write(folder / name, seeds[seed], format=form, **more)
        except Exception:  # noqa: BLE001 - a format that this ASE cannot write has no seed, and is counted nowhere
            (folder / name).unlink(missing_ok=True)
            continue
        written.append(name)
    fixed = seeds["crystal"].copy()
    fixed.set_constraint(FixAtoms([0]))
    write(folder / "fixed.traj", [fixed, fixed], format="traj")
    write(folder / "two.extxyz", [fixed, seeds["crystal"]], format="extxyz")
    (folder / "a.extxyz.gz").write_bytes(gzip.compress((folder / "a.extxyz").read_bytes()))
    return [*written, "fixed.traj", "two.extxyz", "a.extxyz.gz"]


NUMBERS = {
    "0": "0",
    "-1": "-1",
    "nan": "nan",
    "inf": "inf",
    "1e308": "1e308",
    "1e-12": "1e-12",
    "huge": "999999999999",
    "10 000 digits": "9" * 10_000,
    "word": "x../../etc/passwd",
    "expression": "__import__('os').mkdir('canary')",
}


def spoilt_words(content: bytes, chance: random.Random, number: int) -> Iterator[tuple[str, bytes]]:
    """Text with one word replaced by a number that nobody expects."""
    text = content.decode("latin-1")
    pieces = text.replace("\n", " \n ").replace("=", " = ").split(" ")
    places = [place for place, word in enumerate(pieces) if word.strip()]
    for _ in range(number):
        place, name = chance.choice(places), chance.choice(list(NUMBERS))
        changed = [*pieces[:place], NUMBERS[name], *pieces[place + 1 :]]
        words = f"word {place} is {name}"
        yield words, " ".join(changed).replace(" = ", "=").replace(" \n ", "\n").encode("latin-1")


def crafted_structures() -> dict[str, bytes]:
    """Files by hand, each with one idea."""
    cell = 'Lattice="3 0 0 0 3 0 0 0 3"'
    line = "Cu 0 0 0\n"
    files: dict[str, bytes] = {
        "many.extxyz": b"999999999999\n\nCu 0 0 0\n",
        "negative.extxyz": b"-5\n\nCu 0 0 0\n",
        "none.extxyz": b"0\n\n",
        "columns.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:999999999\n{line}".encode(),
        "property.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3:numbers:R:3\n{line}".encode(),
        "twice.extxyz": f"1\n{cell} {cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "quotes.extxyz": b'1\nLattice="3 0 0 0 3 0 0 0 3 Properties=species:S:1\n' + line.encode(),
        "evil.extxyz": f"1\n{cell} calc=\"__import__('os').mkdir('canary')\"\n{line}".encode(),
        "json.extxyz": f'1\n{cell} a="_JSON {"[" * 50_000}"\n{line}'.encode(),
        "array.extxyz": f'1\n{cell} a="{{{" ".join(["1"] * 200_000)}}}"\n{line}'.encode(),
        "nan.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\nCu nan 0 0\n".encode(),
        "infinite.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\nCu inf 0 0\n".encode(),
        "nancell.extxyz": b'1\nLattice="nan 0 0 0 3 0 0 0 3" Properties=species:S:1:pos:R:3\nCu 0 0 0\n',
        "tiny.extxyz": b'1\nLattice="1e-7 0 0 0 1e9 0 0 0 1e9" Properties=species:S:1:pos:R:3\nCu 0 0 0\n',
        "thin.extxyz": b'1\nLattice="1e-3 0 0 0 1e-3 0 0 0 1e6" Properties=species:S:1:pos:R:3\nCu 0 0 0\n',
        "far.extxyz": b"2\nProperties=species:S:1:pos:R:3\nCu 0 0 0\nCu 1e300 0 0\n",
        "wide.extxyz": b"2\nProperties=species:S:1:pos:R:3\nCu 0 0 0\nCu 1e7 1e7 1e7\n",
        "vast.extxyz": b'1\nLattice="1e12 0 0 0 1e12 0 0 0 1e12" Properties=species:S:1:pos:R:3\nCu 0 0 0\n',
        "element.extxyz": b"1\nProperties=species:S:1:pos:R:3\nXx 0 0 0\n",
        "number.extxyz": b"1\nProperties=Z:I:1:pos:R:3\n99999 0 0 0\n",
        "minus.extxyz": b"1\nProperties=Z:I:1:pos:R:3\n-7 0 0 0\n",
        "move.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3:move_mask:L:3\nCu 0 0 0 T F T\n".encode(),
        "huge/POSCAR": b"x\n1.0\n3 0 0\n0 3 0\n0 0 3\nCu\n99999999999\nDirect\n0 0 0\n",
        "large/POSCAR": b"x\n1.0\n3 0 0\n0 3 0\n0 0 3\nCu\n400000000\nDirect\n0 0 0\n",
        "scale/POSCAR": b"x\n1e-9\n3 0 0\n0 3 0\n0 0 3\nCu\n1\nDirect\n0 0 0\n",
        "minus/POSCAR": b"x\n-1e30\n3 0 0\n0 3 0\n0 0 3\nCu\n1\nDirect\n0 0 0\n",
        "counts/POSCAR": b"x\n1\n3 0 0\n0 3 0\n0 0 3\nCu\n-1\nDirect\n0 0 0\n",
        "huge.cube": b"a\nb\n1 0 0 0\n99999 1 0 0\n99999 0 1 0\n99999 0 0 1\n29 0 0 0 0\n0.0\n",
        "atoms.cube": b"a\nb\n999999999 0 0 0\n2 1 0 0\n2 0 1 0\n2 0 0 1\n29 0 0 0 0\n0.0\n",
        "huge.xsf": b"CRYSTAL\nPRIMVEC\n3 0 0\n0 3 0\n0 0 3\nPRIMCOORD\n999999999 1\n29 0 0 0\n",
        "symmetry.cif": b"data_a\n_cell_length_a 3\n_cell_length_b 3\n_cell_length_c 3\n_cell_angle_alpha 90\n"
        b"_cell_angle_beta 90\n_cell_angle_gamma 90\n_symmetry_space_group_name_H-M '../../x'\nloop_\n"
        b"_atom_site_label\n_atom_site_fract_x\n_atom_site_fract_y\n_atom_site_fract_z\nCu 0 0 0\n",
        "operations.cif": b"data_a\n_cell_length_a 3\n_cell_length_b 3\n_cell_length_c 3\n_cell_angle_alpha 90\n"
        b"_cell_angle_beta 90\n_cell_angle_gamma 90\nloop_\n_symmetry_equiv_pos_as_xyz\n"
        b'\'x+__import__("os").mkdir("canary"),y,z\'\nloop_\n_atom_site_label\n_atom_site_fract_x\n'
        b"_atom_site_fract_y\n_atom_site_fract_z\nCu 0 0 0\n",
        "angles.cif": b"data_a\n_cell_length_a 3\n_cell_length_b 3\n_cell_length_c 3\n_cell_angle_alpha 0\n"
        b"_cell_angle_beta 180\n_cell_angle_gamma 720\nloop_\n_atom_site_label\n_atom_site_fract_x\n"
        b"_atom_site_fract_y\n_atom_site_fract_z\nCu 0 0 0\n",
        "loop.cif": b"data_a\nloop_\n" + b"_atom_site_label\n" * 20_000,
        "name@0.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "a,b;c $(touch canary).extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "postgresql:x.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "mysql.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "-dash.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "line\nend.extxyz": f"1\n{cell} Properties=species:S:1:pos:R:3\n{line}".encode(),
        "billion.xsd": _billion(b"XSD"),
        "vasprun-billion/vasprun.xml": _billion(b"modeling"),
        "entity/vasprun.xml": b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><modeling>&x;</modeling>',
        "old.traj": pickle.dumps({"version": 1, "ase": Payload()}, protocol=2),
        "magic.traj": b"PickleTrajectory" + pickle.dumps(Payload()),
        "a.pckl": pickle.dumps(Payload()),
        "a.pickle": pickle.dumps(Payload()),
        "a.npz": b"PK\x03\x04" + pickle.dumps(Payload()),
        "a.py": b"import os\nos.mkdir('canary')\nfrom ase import Atoms\natoms = Atoms('Cu')\n",
        "a.json": json.dumps({"1": {"numbers": [29], "positions": [[0, 0, 0]], "calculator": "canary"}}).encode(),
        "array.json": b'{"1": {"numbers": {"__ndarray__": [[99999999999], "float64", [1]]}}, "ids": [1], "nextid": 2}',
        "object.json": b'{"__ase_objtype__": "atoms", "numbers": [29], "positions": [[0, 0, 0]], "celldisp": "x"}',
        "deep.json": b'{"1":' * DEEP,
        "constraint.json": json.dumps(
            {
                "1": {
                    "numbers": [29],
                    "positions": [[0, 0, 0]],
                    "cell": [[3, 0, 0], [0, 3, 0], [0, 0, 3]],
                    "pbc": [True] * 3,
                    "unique_id": "a" * 32,
                    "ctime": 1.0,
                    "mtime": 1.0,
                    "user": "x",
                    "constraints": [{"name": "system", "kwargs": {"command": "touch canary"}}],
                },
                "ids": [1],
                "nextid": 2,
            }
        ).encode(),
        "sql.db": b"SQLite format 3\0" + bytes(200),
        "bomb.extxyz.gz": _bomb(b"1\n" + cell.encode() + b"\nCu 0 0 0\n"),
        "bomb.json.gz": _bomb(b""),
        "no.xyz.gz": b"\x1f\x8b" + bytes(50),
        "no.xyz.bz2": b"BZh9" + bytes(50),
        "no.xyz.xz": b"\xfd7zXZ\0" + bytes(50),
    }
    return files


def _billion(root: bytes) -> bytes:
    """Entities that stand for ten of the one before: a billion laughs."""
    lines = [b'<?xml version="1.0"?>\n<!DOCTYPE ' + root + b" [", b'<!ENTITY l0 "ha">']
    lines += [b'<!ENTITY l%d "%s">' % (n, b"&l%d;" % (n - 1) * 10) for n in range(1, 10)]
    return b"\n".join([*lines, b"]>", b"<" + root + b">&l9;</" + root + b">"])


def _bomb(head: bytes) -> bytes:
    """Gzip of a few megabytes that stands for half a gigabyte."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    pieces = [packer.compress(head)]
    block = bytes(1 << 20)
    pieces += [packer.compress(block) for _ in range(BOMB >> 20)]
    return b"".join([*pieces, packer.flush()])


def copied(seed: Path, target: Path) -> Path:
    """A copy to be spoilt."""
    if seed.is_dir():
        shutil.copytree(seed, target, symlinks=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(seed, target)
    return target
