"""`relaxion calculators` and `doctor`: what is installed, whether it works, and what relaxes without --calc."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from ase import Atoms
from ase.data import chemical_symbols
from rich.text import Text

from relaxion import __version__
from relaxion.apps.cli.command import DONE, ERROR
from relaxion.apps.cli.inputs import FOR_FUN
from relaxion.apps.cli.progress import counted, print_table, tell
from relaxion.errors import PotentialError
from relaxion.potentials.base import elements_in_words
from relaxion.potentials.eam import ZhouEam
from relaxion.potentials.emt import Emt
from relaxion.potentials.engines import is_installed
from relaxion.potentials.registry import EXTRAS, PotentialEntry, known_potentials, make_potential

AUTO = "auto"
FOR_CRYSTALS = ("chgnet", "sevennet", "mace")  # in this order, those that are installed
FOR_MOLECULES = ("gfn2",)
FOR_PLANS = ("sevennet", "mace", "chgnet")  # smooth ones first: steps go to the minimum of their surface

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


# ---- `relaxion doctor`: is everything here that a relaxation needs?

OK = "ok"
NOTE = "note"
FAIL = "fail"
STYLES = {OK: "green", NOTE: "cyan", FAIL: "bold red"}
PACKAGES = ("ase", "torch", "numpy", "scipy", "vesin", "gymnasium", "safetensors", "pydantic", "typer", "spglib")
COPPER_EV_PER_ATOM = -0.0057  # ASE's EMT at 3.61 Å


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is, in a sentence, and what to do where it is not well."""

    check: str
    state: str  # ok, note (good to know) or fail (does not work)
    sentence: str
    advice: str | None = None


def examine(*, as_json: bool) -> int:
    """Look at everything; the exit code is 1 if something does not work."""
    findings = [finding for check in (versions, calculators, relaxation) for finding in examined(check)]
    failed = [finding for finding in findings if finding.state == FAIL]
    if as_json:
        tell(json.dumps({"ok": not failed, "findings": [asdict(one) for one in findings]}, ensure_ascii=False))
    else:
        print_table([("", True), ("", True), ("", False)], map(_row, findings), show_header=False)
        tell(f"{counted(len(failed), 'thing')} to repair." if failed else "All is well.")
    return ERROR if failed else DONE


def examined(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is itself a finding."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - what is being looked for is what is broken
        sentence = f"failed: {type(error).__name__}: {error}"
        return [Finding(check.__name__, FAIL, sentence, "reinstall: pip install -U relaxion")]


def _row(finding: Finding) -> tuple[Text, str, str]:
    advice = "" if finding.advice is None else f"; try: {finding.advice}"
    return Text(finding.state, STYLES[finding.state]), finding.check, finding.sentence + advice


def versions() -> Iterator[Finding]:
    yield Finding("python", OK, f"Python {platform.python_version()} on {platform.system()} ({sys.prefix})")
    yield Finding("relaxion", OK, f"relaxion {__version__}")
    for package in PACKAGES:
        try:
            yield Finding(package, OK, f"{package} {version(package)}")
        except PackageNotFoundError:
            yield Finding(package, FAIL, f"{package} is not installed", f"pip install {package}")


def calculators() -> Iterator[Finding]:
    from relaxion.potentials.registry import known_potentials

    known = known_potentials()
    ready = ", ".join(entry.spec for entry in known if entry.available)
    yield Finding("calculators", OK, f"ready for --calc: {ready}")
    for entry in known:
        if not entry.available:
            sentence = f"{entry.spec} is not installed ({entry.description})"
            yield Finding("calculators", NOTE, sentence, entry.how_to_install)


def relaxation() -> Iterator[Finding]:
    """The thing itself: a small relaxation with a known end."""
    from ase.build import bulk
    from ase.calculators.emt import EMT

    from relaxion import Relaxer

    atoms = bulk("Cu", cubic=True)
    atoms.positions[0, 0] += 0.2
    atoms.calc = EMT()
    optimizer = Relaxer(atoms, logfile=None)
    converged = optimizer.run(fmax=0.01)
    energy = atoms.get_potential_energy() / len(atoms)
    sentence = f"four copper atoms: {optimizer.force_calls} force calls, {energy:.4f} eV per atom"
    if converged and abs(energy - COPPER_EV_PER_ATOM) < 1e-3:
        yield Finding("relaxation", OK, sentence)
    else:
        report = "please report this with the output of 'relaxion doctor --json'"
        yield Finding("relaxation", FAIL, sentence, f"expected {COPPER_EV_PER_ATOM:.4f} eV per atom; {report}")
