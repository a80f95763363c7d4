"""`relaxion doctor`: is everything here that a relaxation needs, and is it as it should be?

Each check is a function that answers with one or more findings.
"""

from __future__ import annotations

import json
import locale
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxion.cli.ending import DONE, ERROR, Interrupts
from relaxion.cli.progress import counted, tell
from relaxion.cli.requests import DoctorRequest
from relaxion.version import __version__

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"
OLDEST_PYTHON, OLDEST_ASE, OLDEST_TORCH = (3, 11), (3, 26), (2, 4)
PACKAGES = ("numpy", "scipy", "vesin", "gymnasium", "safetensors", "pydantic", "typer", "spglib")
OFTEN_HIDDEN = ("ase", "torch", "numpy", "scipy", "spglib", "typer", "relaxion", "calculator", "random", "types")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STYLES = {OK: "green", NOTE: "cyan", WARN: "yellow", FAIL: "bold red"}
COPPER_EV_PER_ATOM = -0.0057  # ASE's EMT at 3.61 Å
OPENMP_LIBRARIES = ("libgomp", "libiomp5", "libomp")


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is, in a sentence, and what to do where it is not well."""

    check: str
    state: str  # ok, note (good to know), warn (works, but) or fail (does not work)
    sentence: str
    advice: str | None = None


def doctor(request: DoctorRequest, _: Interrupts) -> int:
    """Look at everything; the exit code is 1 if something does not work."""
    findings = [finding for check in CHECKS for finding in examined(check)]
    sick = any(finding.state == FAIL for finding in findings)
    if request.as_json:
        tell(json.dumps({"ok": not sick, "findings": [asdict(one) for one in findings]}, ensure_ascii=False))
    else:
        Console(highlight=False).print(_table(findings))
        tell(_closing(findings))
    return ERROR if sick else DONE


def examined(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is itself a finding."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - what is being looked for is what is broken
        name = check.__name__.replace("_", " ")
        return [Finding(name, FAIL, f"it broke: {type(error).__name__}: {error}", "reinstall: pip install -U relaxion")]


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        advice = "" if finding.advice is None else f"; try: {finding.advice}"
        # Text: square brackets of 'relaxion[chgnet]' are no markup
        table.add_row(Text(finding.state, STYLES[finding.state]), Text(finding.check), Text(finding.sentence + advice))
    return table


def _closing(findings: list[Finding]) -> str:
    counts = {state: sum(finding.state == state for finding in findings) for state in (FAIL, WARN)}
    if not any(counts.values()):
        return "All is well."
    said = [f"{counted(counts[FAIL], 'thing')} to repair"] * bool(counts[FAIL])
    said += [counted(counts[WARN], "warning")] * bool(counts[WARN])
    return f"{', '.join(said)}."


def python() -> Iterator[Finding]:
    found = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("python", FAIL, f"Python {found} is too old; 3.11 or newer is needed", "install a newer Python")
        return
    where = sys.prefix if sys.prefix != sys.base_prefix else f"{sys.prefix}, no virtual environment"
    yield Finding("python", OK, f"Python {found} on {platform.system()} {platform.machine()} ({where})")


def own_package() -> Iterator[Finding]:
    import relaxion

    yield Finding("relaxion", OK, f"relaxion {__version__} in {Path(relaxion.__file__).parent}")


def ase() -> Iterator[Finding]:
    found = installed("ase")
    if found is None:
        yield Finding("ase", FAIL, "ASE is not installed", "pip install ase")
    elif numbers(found) < OLDEST_ASE:
        yield Finding("ase", FAIL, f"ASE {found} is too old; 3.26 or newer is needed", "pip install --upgrade ase")
    else:
        yield Finding("ase", OK, f"ASE {found}")


def torch() -> Iterator[Finding]:
    found = installed("torch")
    if found is None:
        yield Finding("torch", FAIL, "PyTorch is not installed", "pip install torch")
        return
    import torch as library

    found = library.__version__
    if numbers(found) < OLDEST_TORCH:
        yield Finding("torch", FAIL, f"PyTorch {found} is too old; 2.4 or newer is needed", "pip install -U torch")
        return
    built_for_cuda = library.version.cuda is not None
    if built_for_cuda and not library.cuda.is_available():
        yield Finding(
            "torch", WARN, f"PyTorch {found} is built for CUDA {library.version.cuda}, but there is no GPU here",
            "the CPU build is gigabytes smaller: pip install torch --index-url https://download.pytorch.org/whl/cpu",
        )  # fmt: skip
        return
    yield Finding("torch", OK, f"PyTorch {found}, {'GPU present' if built_for_cuda else 'CPU build'}")
    if library.get_default_dtype() != library.float32:
        yield Finding("torch", WARN, f"torch's default dtype is {library.get_default_dtype()}: another package set it")


def packages() -> Iterator[Finding]:
    found = {package: installed(package) for package in PACKAGES}
    missing = [package for package, at in found.items() if at is None]
    if missing:
        names = ", ".join(missing)
        yield Finding("packages", FAIL, f"missing: {names}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", OK, ", ".join(f"{package} {at}" for package, at in found.items()))


def calculators() -> Iterator[Finding]:
    from relaxion.potentials.registry import known_potentials

    known = known_potentials()
    ready = [entry.spec for entry in known if entry.available]
    yield Finding("calculators", OK, f"ready for --calc: {', '.join(ready)}")
    for entry in known:
        if not entry.available:
            sentence = f"{entry.spec} is not installed ({entry.description})"
            yield Finding("calculators", NOTE, sentence, entry.how_to_install)


def policies() -> Iterator[Finding]:
    from relaxion.bundles import known_policies, none_found

    known = known_policies()
    if not known:
        yield Finding("policies", NOTE, f"{none_found()}; the classical core relaxes")
        return
    readable = [policy.name for policy in known if policy.bundle is not None]
    if readable:
        yield Finding("policies", OK, f"found: {', '.join(readable)}")
    for policy in known:
        if policy.error is not None:
            yield Finding("policies", WARN, f"{policy.path}: {policy.error}", "delete it, or package the run again")


def threads() -> Iterator[Finding]:
    import torch as library

    yield from judged_threads(library.get_num_threads(), cores(), os.environ)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores() + 0.5:
        sentence = f"{load:.1f} processes want {cores()} cores: timings will say little"
        yield Finding("threads", NOTE, sentence)


def judged_threads(count: int, available: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """By numbers handed in, so that it can be checked without another machine."""
    given = {name: environment[name] for name in THREAD_VARIABLES if name in environment}
    said = ", ".join(f"{name}={value}" for name, value in given.items()) or "no thread variable is set"
    for name, value in given.items():
        if not value.split(",")[0].strip().isdigit():
            yield Finding("threads", WARN, f"{name}={value} is no number and is ignored", f"export {name}=1")
    if count > available:
        sentence = f"torch takes {count} threads, but this process may use {available} cores ({said})"
        yield Finding("threads", WARN, sentence, f"export OMP_NUM_THREADS={available}")
    elif available > 1 and "OMP_NUM_THREADS" not in given:
        sentence = f"torch takes {count} of {available} cores; several processes at once would get in each other's way"
        yield Finding("threads", NOTE, sentence, "export OMP_NUM_THREADS=1 for small structures or many processes")
    else:
        yield Finding("threads", OK, f"{count} torch threads on {available} cores ({said})")


def openmp() -> Iterator[Finding]:
    """Two OpenMP runtimes in one process make it slow, or end it."""
    import numpy  # noqa: F401 - to have loaded what a relaxation loads
    import torch as library  # noqa: F401

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    loaded = sorted({line.split()[-1] for line in maps.splitlines() if is_openmp(line.split()[-1])})
    kinds = {Path(path).name.split("-")[0].split(".")[0] for path in loaded}
    if len(kinds) > 1:
        sentence = f"several OpenMP runtimes are loaded: {', '.join(loaded)}"
        yield Finding("openmp", WARN, sentence, "install numpy, scipy and torch all by pip, or all by conda")
    else:
        yield Finding("openmp", OK, f"one OpenMP runtime ({', '.join(kinds) or 'none'})")


def is_openmp(path: str) -> bool:
    return Path(path).name.startswith(OPENMP_LIBRARIES)


def hidden_packages() -> Iterator[Finding]:
    """A file in the working directory that Python would take for a package."""
    here = Path.cwd()
    hiding = [name for name in OFTEN_HIDDEN if (here / f"{name}.py").exists()]
    if hiding:
        names = ", ".join(f"{name}.py" for name in hiding)
        yield Finding("working directory", WARN, f"{names} in {here} hides the package of that name", "rename it")
    elif not os.access(here, os.W_OK):
        yield Finding("working directory", WARN, f"no permission to write in {here}", "use --out with another folder")
    else:
        yield Finding("working directory", OK, f"{here} can be written to and hides no package")


def terminal() -> Iterator[Finding]:
    encoding = (sys.stdout.encoding or locale.getpreferredencoding(False)).lower().replace("-", "")
    if encoding.startswith("utf"):
        yield Finding("terminal", OK, f"writes {sys.stdout.encoding}")
    else:
        yield Finding("terminal", WARN, f"writes {encoding}, so Å becomes ?", "export PYTHONIOENCODING=utf-8")


def relaxation() -> Iterator[Finding]:
    """The thing itself: a small relaxation with a known end."""
    import time

    from ase.build import bulk
    from ase.calculators.emt import EMT

    from relaxion import Relaxer

    began = time.perf_counter()
    atoms = bulk("Cu", cubic=True)
    atoms.positions[0, 0] += 0.2
    atoms.calc = EMT()
    optimizer = Relaxer(atoms, logfile=None)
    optimizer.run(fmax=0.01)
    energy, seconds = atoms.get_potential_energy() / len(atoms), time.perf_counter() - began
    said = f"four copper atoms: {optimizer.force_calls} force calls, {energy:.4f} eV per atom, {seconds:.2f} s"
    right = optimizer.outcome.label == "converged" and abs(energy - COPPER_EV_PER_ATOM) < 1e-3
    wrong = (
        f"expected {COPPER_EV_PER_ATOM:.4f} eV per atom; please report this with the output of 'relaxion doctor --json'"
    )
    yield Finding("relaxation", OK if right else FAIL, said, None if right else wrong)


def cores() -> int:
    """That this process may use: what the scheduler allows, and what a container grants."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        granted = allowed if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        granted = allowed
    return min(allowed, granted)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """(3, 26) of 3.26.0rc1 and of 2.13.0+cpu."""
    return tuple(int("".join(filter(str.isdigit, piece)) or 0) for piece in text.split("+")[0].split(".")[:2])


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python, own_package, ase, torch, packages, calculators, policies, threads, openmp, hidden_packages, terminal,
    relaxation,
)  # fmt: skip
