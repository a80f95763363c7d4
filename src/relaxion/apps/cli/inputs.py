"""From file names to structures that can be relaxed, and what is refused, or worth a word, before they are."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.io.formats import filetype
from ase.neighborlist import neighbor_list

from relaxion.apps.compare.result_folder import stem
from relaxion.errors import FileError, MissingStressError, SettingsError, StructureError
from relaxion.paths import chosen_numbers, without_slice
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import with_options
from relaxion.settings import assigned
from relaxion.structures import Structures
from relaxion.structures.structures import check_atoms
from relaxion.train.data.dataset import read
from relaxion.train.data.perturbations import rattle

FOR_FUN = ("H", "C", "N", "O")  # ASE gives EMT parameters for them under the heading "just for fun"
CLOSEST_ANGSTROM = 0.3  # no bond is nearly as short (H2: 0.74 Å); nearer, every potential answers nonsense


def check_structure(atoms: Atoms, potential: Potential, *, free_cell: bool) -> None:
    """Refuse, before any force call, what cannot be relaxed."""
    check_atoms(atoms)
    check_overlaps(atoms)
    potential.check_elements(Structures.from_ase(_without_constraints(atoms)))
    if not free_cell:
        return
    if not atoms.pbc.all():
        raise StructureError(
            f"the structure is periodic along {int(atoms.pbc.sum())} of 3 axes, so it has no cell to relax; "
            "keep the cell fixed"
        )
    if not potential.has_stress:
        raise MissingStressError(
            f"the calculator {potential.name} gives no stress, which a free cell needs; keep the cell fixed, or take "
            "another calculator, such as emt"
        )


def check_overlaps(atoms: Atoms, closest: float = CLOSEST_ANGSTROM) -> None:
    """Refuse atoms (or images of one atom) nearer than `closest`, Å."""
    first, second, distances = neighbor_list("ijd", atoms, closest)
    if len(distances) == 0:
        return
    nearest_pair = int(np.argmin(distances))
    i, j = sorted((int(first[nearest_pair]), int(second[nearest_pair])))
    who = f"atoms {i} and {j} ({atoms.symbols[i]}, {atoms.symbols[j]}) are"
    if i == j:
        who = f"atom {i} ({atoms.symbols[i]}) and its own periodic image are"
    raise StructureError(
        f"{who} {distances[nearest_pair]:.3g} Å apart, below {closest} Å; "
        "remove one of them or correct the positions, the cell or its unit (Å)"
    )


def rattled(atoms: Atoms, size_angstrom: float, seed: int) -> Atoms:
    """Moved at random by `size_angstrom` along each axis; constraints hold. The seed alone decides, not the order."""
    if size_angstrom == 0:
        return atoms
    only_fixed = _without_constraints(atoms)
    only_fixed.set_constraint([c for c in atoms.constraints if isinstance(c, FixAtoms)])
    generator = torch.Generator().manual_seed(seed)
    moved = rattle(Structures.from_ase(only_fixed), generator, size_angstrom=size_angstrom)
    result = atoms.copy()
    result.set_positions(moved.positions.numpy())
    return result


def occupancy_note(atoms: Atoms) -> str | None:
    """ASE reads a partly occupied site as its most frequent element: worth a word."""
    sites = atoms.info.get("occupancy")
    if not isinstance(sites, dict):
        return None
    shared = [site for site, shares in sites.items() if not math.isclose(max(shares.values()), 1.0, abs_tol=1e-3)]
    if not shared:
        return None
    return f"{len(shared)} sites are partly occupied; each was taken as its most frequent element"


def emt_note(atoms: Atoms, calculator: str) -> str | None:
    """EMT answers for light elements too, but nobody should believe it."""
    light = [symbol for symbol in FOR_FUN if symbol in atoms.symbols]
    if calculator != "emt" or not light:
        return None
    return (
        f"EMT is made for metals; its parameters for {', '.join(light)} are not meant for real use (ASE's "
        "documentation), so do not trust the result; 'relaxion calculators' lists others"
    )


def _without_constraints(atoms: Atoms) -> Atoms:
    bare = atoms.copy()
    bare.set_constraint()
    return bare


# ---- What is checked before anything is read, and the way from file names to structures that can be relaxed.


@dataclass(frozen=True, kw_only=True)
class RelaxingOptions:
    """How structures are relaxed: the options that `relax` and `relax-many` have in common."""

    calc: str
    calc_options: list[str] | None
    model: str | None  # a cheaper calculator that plans
    policy: str
    device: str | None
    allow_unseen: bool
    fmax: float  # eV/Å
    steps: int
    cell: bool
    pressure: float  # GPa
    cell_mask: str
    keep_symmetry: bool
    database: Path | None
    settings: Path | None


@dataclass(frozen=True)
class RelaxationJob:
    """One structure to relax, or the reason why its file could not be read."""

    file: Path
    index: int | None  # place in a file of several structures; None: the only one
    folder: str  # in the output; told apart from all others
    atoms: Atoms | None
    error: str | None = None

    @property
    def label(self) -> str:
        return str(self.file) if self.index is None else f"{self.file}[{self.index}]"

    @property
    def stem(self) -> str:
        """Of the relaxed structure in the format of the input."""
        return self._numbered(stem(self.file))

    @property
    def name(self) -> str:
        """Of the other files. ASE takes anything with POSCAR in its name for one, also POSCAR.extxyz."""
        misleading = filetype(f"{self.stem}.extxyz", read=False) != "extxyz"
        return self._numbered("relaxed") if misleading else self.stem

    def _numbered(self, name: str) -> str:
        return name if self.index is None else f"{name}-{self.index}"


def read_jobs(files: Sequence[Path]) -> list[RelaxationJob]:
    """Every structure of every file, in order."""
    twice = [file for file, count in Counter(file.absolute() for file in files).items() if count > 1]
    if twice:
        raise SettingsError(f"{twice[0].name} is given twice; name each file once")
    jobs = [job for file, folder in zip(files, _folders(files), strict=True) for job in _jobs(file, folder)]
    return _told_apart(jobs)


def _jobs(file: Path, folder: str) -> list[RelaxationJob]:
    file, words = without_slice(file)
    try:
        images = read(file)
        numbers = range(len(images)) if words is None else sliced(file, words, len(images))
    except FileError as error:
        return [RelaxationJob(file, None, folder, None, str(error))]
    if len(images) == 1:
        return [RelaxationJob(file, None, folder, images[0])]
    return [RelaxationJob(file, index, f"{folder}-{index}", images[index]) for index in numbers]


def sliced(file: Path, words: str, number: int) -> Sequence[int]:
    """Numbers of the structures that `file@words` means; FileError where there are none."""
    if found := chosen_numbers(words, number):
        return found
    counted = "1 structure" if number == 1 else f"{number} structures, numbered 0 to {number - 1}"
    raise FileError(f"{file}@{words} selects no structure: {file} has {counted}")


def _folders(files: Sequence[Path]) -> list[str]:
    """The stem where it is unique, else the whole name, else with the name of the folder before it."""
    bare = [without_slice(file)[0] for file in files]
    tries = [(stem(file), file.name, f"{file.absolute().parent.name}-{file.name}") for file in bare]
    stems, names, _ = (Counter(names) for names in zip(*tries, strict=True))
    return [short if stems[short] == 1 else name if names[name] == 1 else path for short, name, path in tries]


def _told_apart(jobs: list[RelaxationJob]) -> list[RelaxationJob]:
    """The last resort: a number behind names that still meet."""
    taken: set[str] = set()
    for place, job in enumerate(jobs):
        names = chain([job.folder], (f"{job.folder}_{number}" for number in count(2)))
        folder = next(name for name in names if name not in taken)
        taken.add(folder)
        jobs[place] = replace(job, folder=folder)
    return jobs


def checked_start(atoms: Atoms, potential: Potential, rattle: float, seed: int, *, free_cell: bool) -> Atoms:
    """Moved at random by `rattle` (Å); what cannot be relaxed is refused before a force call is spent."""
    check_structure(atoms, potential, free_cell=free_cell)
    start = rattled(atoms, rattle, seed)
    check_structure(start, potential, free_cell=free_cell)
    return start


def calculator_word(calc: str, options: Sequence[str] | None) -> str:
    """What --calc and all --calc-option mean together, as `potential` reads it."""
    return with_options(calc, assigned(options or (), "--calc-option", "dispersion=true"))


def refuse_folder(option: str, path: Path, name: str) -> None:
    if path.is_dir():
        raise FileError(f"{option} {path} is a folder; name a file, such as {option} {path / name}")


def command_line() -> str:
    """As it was typed, with quotes where a shell needs them."""
    program, *rest = sys.argv
    name = Path(program).name
    return shlex.join(["relaxion" if name == "__main__.py" else name, *rest])
