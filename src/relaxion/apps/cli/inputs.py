"""From file names to structures that can be relaxed, and what is refused, or worth a word, before they are."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import chemical_symbols
from ase.io.formats import filetype
from ase.neighborlist import neighbor_list

from relaxion.apps.cli.progress import say
from relaxion.apps.result_folder import stem
from relaxion.errors import FileError, MissingStressError, PotentialError, RelaxionError, SettingsError, StructureError
from relaxion.paths import chosen_numbers, without_slice
from relaxion.potentials.base import Potential, elements_in_words
from relaxion.potentials.eam import ZhouEam
from relaxion.potentials.emt import Emt
from relaxion.potentials.engines import is_installed
from relaxion.potentials.registry import EXTRAS, make_potential, with_options
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


# ---- which calculator, where none is named

AUTO = "auto"
FOR_CRYSTALS = ("chgnet", "sevennet", "mace")  # in this order, those that are installed
FOR_MOLECULES = ("gfn2",)
FOR_PLANS = ("sevennet", "mace", "chgnet")  # smooth ones first: steps go to the minimum of their surface

Elements = frozenset[int]  # atomic numbers


@dataclass(frozen=True)
class Choice:
    """A calculator, and how many of the structures it has all elements of."""

    name: str  # for --calc
    fits: int
    structures: int

    def in_words(self) -> str | None:
        """What is said of it; of EMT, which is the default where it fits, nothing."""
        if self.name == "emt" and self.fits == self.structures:
            return None
        which = "the elements" if self.fits == self.structures else f"{self.fits} of {self.structures} structures"
        fits = f"--calc is not given, so {self.name} is used, which is installed and fits {which}"
        return f"{fits}; 'relaxion calculators' lists others"


def calculator_for(images: Iterable[Atoms], device: str | None = None) -> Choice:
    """The first that has all elements of all structures, else of most. PotentialError where nothing installed has any.

    Engines are asked which elements they have, so the choice cannot differ from what they answer later; they stay
    loaded, and whoever makes the chosen one on the same `device` does not wait again.
    """
    kinds = Counter[Elements]()
    molecules = True
    for atoms in images:
        # what is no element is refused later, of that structure alone
        kinds[frozenset(int(number) for number in atoms.numbers if 0 < number < len(chemical_symbols))] += 1
        molecules = molecules and not atoms.pbc.any()
    number = kinds.total()
    best = None
    engines = [name for name in (FOR_MOLECULES if molecules else FOR_CRYSTALS) if is_installed(EXTRAS[name].package)]
    asked: dict[str, Elements | None] = {}
    for name, known in _known(engines, device):
        asked[name] = known
        fits = sum(count for elements, count in kinds.items() if known is None or elements <= known)
        if best is None or fits > best.fits:
            best = Choice(name, fits, number)
        if fits == number:
            return Choice(name, number, number)
    if best is None or best.fits == 0:
        raise PotentialError(_nothing_fits(frozenset().union(*kinds), asked, molecules))
    return best


def model_for(images: Sequence[Atoms], calc: str, device: str | None = None) -> str:
    """The cheaper calculator that plans for `calc`: installed, not the same, and with all elements."""
    elements = frozenset(int(number) for atoms in images for number in atoms.numbers)
    molecules = all(not atoms.pbc.any() for atoms in images)
    for name in (*(FOR_MOLECULES if molecules else ()), *FOR_PLANS):
        if name == calc or not is_installed(EXTRAS[name].package):
            continue
        with closing(make_potential(name, device)) as engine:
            if engine.elements is None or elements <= engine.elements:
                return name
    raise PotentialError(f"no installed calculator can plan for {calc} with {elements_in_words(elements)}")


def planner(
    model: str | None, calc: str, images: Sequence[Atoms], device: str | None = None
) -> tuple[str, Potential] | None:
    """The cheaper calculator that plans for `calc`, and its name; None, with a sentence, where it cannot be had."""
    if model is None:
        return None
    try:
        name = model_for(images, calc, device) if model == AUTO else model
        if model == AUTO:
            say(f"relaxion: the model is {name}, which is installed and fits the elements")
        if name == calc:
            raise SettingsError(f"{name} is the calculator itself")
        return name, make_potential(name, device)
    except RelaxionError as error:
        say(f"relaxion: no model: {error}; relaxing continues without it")
        return None


def _known(engines: Sequence[str], device: str | None) -> Iterator[tuple[str, Elements | None]]:
    """Names in the order of preference, with the elements they have; an engine is loaded only when it is its turn."""
    emt = Emt().elements or frozenset()
    yield "emt", frozenset(number for number in emt if chemical_symbols[number] not in FOR_FUN)
    for name in engines:
        with closing(make_potential(name, device)) as engine:
            yield name, engine.elements
    yield "emt", emt
    yield "eam", ZhouEam().elements


def _nothing_fits(elements: Elements, asked: dict[str, Elements | None], molecules: bool) -> str:
    missing = {name: elements - known for name, known in asked.items() if known is not None}
    lacks = "; ".join(f"{name} has no {elements_in_words(numbers)}" for name, numbers in missing.items())
    engines = FOR_MOLECULES if molecules else FOR_CRYSTALS
    ways = [f"--calc {name} ({EXTRAS[name].how_to_install})" for name in engines if name not in asked]
    others = "; or ".join([*ways, "any ASE calculator: --calc module:factory"])
    return f"no installed calculator fits: {lacks}; try {others}"
