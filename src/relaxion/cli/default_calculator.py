"""Which calculator relaxes where --calc names none: one that is installed and covers the elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ase import Atoms
from ase.data import chemical_symbols

from relaxion.bench.checks import FOR_FUN
from relaxion.errors import FileError, PotentialError
from relaxion.paths import without_slice
from relaxion.potentials.eam_zhou import ZhouEam
from relaxion.potentials.emt import Emt
from relaxion.potentials.extras import is_installed
from relaxion.potentials.registry import EXTRAS
from relaxion.structures.dataset import read

AUTO = "auto"
FOR_CRYSTALS = ("chgnet", "sevennet", "mace")  # in this order, those that are installed
FOR_MOLECULES = ("gfn2",)


def calculator_for_files(files: Sequence[Path]) -> str:
    """For all structures of all files that can be read; the others are told about later."""
    return calculator_for(list(_structures(files)))


def calculator_for(images: Sequence[Atoms]) -> str:
    """The name for --calc. PotentialError where nothing that is installed fits."""
    elements = {int(number) for atoms in images for number in atoms.numbers}
    known = Emt().elements or frozenset()
    real = frozenset(number for number in known if chemical_symbols[number] not in FOR_FUN)
    if elements <= real:
        return "emt"
    molecules = bool(images) and not any(atoms.pbc.any() for atoms in images)
    for name in FOR_MOLECULES if molecules else FOR_CRYSTALS:
        if is_installed(EXTRAS[name].package):
            return name
    if elements <= known:
        return "emt"
    if elements <= (ZhouEam().elements or frozenset()):
        return "eam"
    raise PotentialError(_nothing_fits(elements - known, FOR_MOLECULES if molecules else FOR_CRYSTALS))


def choice_in_words(name: str) -> str | None:
    """What is said of a choice; of EMT, which is the default, nothing."""
    if name == "emt":
        return None
    fits = f"--calc is not given, so {name} is used, which is installed and fits the elements"
    return f"{fits}; 'relaxion calculators' lists others"


def _nothing_fits(missing: Iterable[int], engines: Sequence[str]) -> str:
    names = ", ".join(chemical_symbols[number] for number in sorted(missing))
    ways = "; or ".join(f"--calc {name} ({EXTRAS[name].how_to_install})" for name in engines)
    fits = f"EMT has no parameters for {names}, and nothing else that is installed fits"
    return f"{fits}; try {ways}; or any ASE calculator: --calc module:factory"


def _structures(files: Sequence[Path]) -> Iterator[Atoms]:
    for file in files:
        try:
            yield from read(without_slice(file)[0])
        except FileError:
            continue
