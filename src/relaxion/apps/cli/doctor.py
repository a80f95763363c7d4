"""`relaxion doctor`: is everything here that a relaxation needs?"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.text import Text

from relaxion import __version__
from relaxion.apps.cli.command import DONE, ERROR
from relaxion.apps.cli.progress import counted, print_table, tell

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
