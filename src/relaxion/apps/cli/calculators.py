"""`relaxion calculators`, and which one relaxes where --calc names none: installed, and with the elements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from ase import Atoms
from ase.data import chemical_symbols

from relaxion.apps.cli.command import DONE
from relaxion.apps.cli.progress import print_table, tell
from relaxion.apps.compare.checks import FOR_FUN
from relaxion.errors import PotentialError
from relaxion.potentials.base import elements_in_words
from relaxion.potentials.eam import ZhouEam
from relaxion.potentials.emt import Emt
from relaxion.potentials.engines import is_installed
from relaxion.potentials.registry import EXTRAS, PotentialEntry, known_potentials, make_potential

AUTO = "auto"
FOR_CRYSTALS = ("chgnet", "sevennet", "mace")  # in this order, those that are installed
FOR_MOLECULES = ("gfn2",)

Elements = frozenset[int]  # atomic numbers


def list_calculators(*, as_json: bool) -> int:
    """A table for people, or one JSON object per line."""
    entries = known_potentials()
    if as_json:
        for entry in entries:
            tell(json.dumps(asdict(entry), ensure_ascii=False))
    else:
        columns = [("--calc", True), ("what", False), ("elements", False), ("state", False)]
        print_table(columns, map(_calculator, entries))
    return DONE


def _calculator(entry: PotentialEntry) -> list[str]:
    state = "ready" if entry.available else f"missing: {entry.how_to_install}"
    return [entry.spec, entry.description, "no list" if entry.elements is None else " ".join(entry.elements), state]


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
    return f"no calculator that is installed fits: {lacks}; try {others}"
