"""What is checked before anything is read, and the way from file names to structures that can be relaxed."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from ase import Atoms
from ase.io.formats import filetype

from relaxion.bench.checks import check_structure, rattled
from relaxion.bench.result_folder import stem
from relaxion.cli.requests import RaceRequest, RelaxRequest
from relaxion.errors import FileError, SettingsError
from relaxion.potentials.potential import Potential
from relaxion.structures.dataset import read


@dataclass(frozen=True)
class Job:
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


def read_jobs(files: Sequence[Path]) -> list[Job]:
    """Every structure of every file, in order."""
    twice = [file for file, count in Counter(file.absolute() for file in files).items() if count > 1]
    if twice:
        raise SettingsError(f"{twice[0].name} is given twice; name each file once")
    jobs = [job for file, folder in zip(files, _folders(files), strict=True) for job in _jobs(file, folder)]
    return _told_apart(jobs)


def _jobs(file: Path, folder: str) -> list[Job]:
    try:
        images = read(file)
    except FileError as error:
        return [Job(file, None, folder, None, str(error))]
    if len(images) == 1:
        return [Job(file, None, folder, images[0])]
    return [Job(file, index, f"{folder}-{index}", atoms) for index, atoms in enumerate(images)]


def _folders(files: Sequence[Path]) -> list[str]:
    """The stem where it is unique, else the whole name, else with the name of the folder before it."""
    tries = [(stem(file), file.name, f"{file.absolute().parent.name}-{file.name}") for file in files]
    stems, names, _ = (Counter(names) for names in zip(*tries, strict=True))
    return [short if stems[short] == 1 else name if names[name] == 1 else path for short, name, path in tries]


def _told_apart(jobs: list[Job]) -> list[Job]:
    """The last resort: a number behind names that still meet."""
    taken: set[str] = set()
    for place, job in enumerate(jobs):
        names = chain([job.folder], (f"{job.folder}_{number}" for number in count(2)))
        folder = next(name for name in names if name not in taken)
        taken.add(folder)
        jobs[place] = replace(job, folder=folder)
    return jobs


def check_numbers(fmax: float, steps: int, *, fewest_steps: int = 0, rattle: float = 0.0) -> None:
    """Refuse options that make no sense, before anything is read."""
    if not (math.isfinite(fmax) and fmax > 0):
        raise SettingsError(f"--fmax is a force in eV/Å above 0, got {fmax}; try --fmax 0.05")
    if steps < fewest_steps:
        raise SettingsError(f"--steps is {fewest_steps} or more, got {steps}; try --steps 500")
    if not (math.isfinite(rattle) and rattle >= 0):
        raise SettingsError(f"--rattle is a length in Å, 0 or more, got {rattle}; try --rattle 0.05")


def checked_start(atoms: Atoms, potential: Potential, request: RelaxRequest | RaceRequest) -> Atoms:
    """Moved at random if asked for; what cannot be relaxed is refused before a force call is spent."""
    check_structure(atoms, potential, free_cell=request.cell)
    start = rattled(atoms, request.rattle, request.seed)
    check_structure(start, potential, free_cell=request.cell)
    return start


def refuse_folder(option: str, path: Path, name: str) -> None:
    if path.is_dir():
        raise FileError(f"{option} {path} is a folder; name a file, such as {option} {path / name}")


def command_line() -> str:
    """As it was typed, with quotes where a shell needs them."""
    program, *rest = sys.argv
    return shlex.join([Path(program).name, *rest])
