"""`relaxion doctor`: is everything here that a relaxation needs, and is it as it should be?

Each check is a function that answers with one or more findings: state, sentence and, where it is not well, advice.
"""

from __future__ import annotations

import json
import locale
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.text import Text

from relaxion.cli.ending import DONE, ERROR, Interrupts
from relaxion.cli.progress import counted, print_table, tell
from relaxion.cli.showing_requests import DoctorRequest
from relaxion.version import __version__

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"
OLDEST_PYTHON, OLDEST_ASE, OLDEST_TORCH = (3, 11), (3, 26), (2, 4)
PACKAGES = ("numpy", "scipy", "vesin", "gymnasium", "safetensors", "pydantic", "typer", "spglib")
OFTEN_HIDDEN = ("ase", "torch", "numpy", "scipy", "spglib", "typer", "relaxion", "calculator", "random", "types")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STYLES = {OK: "green", NOTE: "cyan", WARN: "yellow", FAIL: "bold red"}
COPPER_EV_PER_ATOM = -0.0057  # ASE's EMT at 3.61 Å
OPENMP_LIBRARIES = ("libgomp", "libiomp5", "libomp")
Found = Iterator[tuple[Any, ...]]  # state, sentence and perhaps advice


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
        print_table([("", True), ("", True), ("", False)], map(_row, findings), show_header=False)
        tell(_closing([finding.state for finding in findings]))
    return ERROR if sick else DONE


def examined(check: Callable[[], Found]) -> list[Finding]:
    """A check that breaks is itself a finding."""
    name = check.__name__.replace("_", " ")
    try:
        return [Finding(name, *found) for found in check()]
    except Exception as error:  # noqa: BLE001 - what is being looked for is what is broken
        return [Finding(name, FAIL, f"failed: {type(error).__name__}: {error}", "reinstall: pip install -U relaxion")]


def _row(finding: Finding) -> tuple[Text, str, str]:
    advice = "" if finding.advice is None else f"; try: {finding.advice}"
    return Text(finding.state, STYLES[finding.state]), finding.check, finding.sentence + advice


def _closing(states: list[str]) -> str:
    said = [f"{counted(states.count(FAIL), 'thing')} to repair"] * (FAIL in states)
    said += [counted(states.count(WARN), "warning")] * (WARN in states)
    return f"{', '.join(said)}." if said else "All is well."


def python() -> Found:
    where = sys.prefix if sys.prefix != sys.base_prefix else f"{sys.prefix}, no virtual environment"
    yield from _old("Python", platform.python_version(), OLDEST_PYTHON, "install a newer Python") or [
        (OK, f"Python {platform.python_version()} on {platform.system()} {platform.machine()} ({where})")
    ]


def relaxion() -> Found:
    yield OK, f"relaxion {__version__} in {Path(__file__).parents[1]}"


def ase() -> Found:
    found = installed("ase")
    if found is None:
        yield FAIL, "ASE is not installed", "pip install ase"
    else:
        yield from _old("ASE", found, OLDEST_ASE, "pip install --upgrade ase") or [(OK, f"ASE {found}")]


def torch() -> Found:
    if installed("torch") is None:
        yield FAIL, "PyTorch is not installed", "pip install torch"
        return
    import torch as library

    found, cuda = library.__version__, library.version.cuda
    if old := _old("PyTorch", found, OLDEST_TORCH, "pip install -U torch"):
        yield from old
    elif cuda is not None and not library.cuda.is_available():
        smaller = "the CPU build is gigabytes smaller: pip install torch --index-url"
        sentence = f"PyTorch {found} is built for CUDA {cuda}, but there is no GPU here"
        yield WARN, sentence, f"{smaller} https://download.pytorch.org/whl/cpu"
    else:
        yield OK, f"PyTorch {found}, {'CPU build' if cuda is None else 'GPU present'}"
        if library.get_default_dtype() != library.float32:
            yield WARN, f"torch's default dtype is {library.get_default_dtype()}: another package set it"


def _old(name: str, found: str, oldest: tuple[int, int], advice: str) -> list[tuple[str, str, str]]:
    """What is said where a version is too old; else nothing."""
    if numbers(found) >= oldest:
        return []
    return [(FAIL, f"{name} {found} is too old; {oldest[0]}.{oldest[1]} or newer is needed", advice)]


def packages() -> Found:
    found = {package: installed(package) for package in PACKAGES}
    missing = [package for package, at in found.items() if at is None]
    if missing:
        yield FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
    else:
        yield OK, ", ".join(f"{package} {at}" for package, at in found.items())


def calculators() -> Found:
    from relaxion.potentials.registry import known_potentials

    known = known_potentials()
    yield OK, f"ready for --calc: {', '.join(entry.spec for entry in known if entry.available)}"
    for entry in known:
        if not entry.available:
            yield NOTE, f"{entry.spec} is not installed ({entry.description})", entry.how_to_install


def policies() -> Found:
    from relaxion.bundles import known_policies, none_found

    known = known_policies()
    if not known:
        yield NOTE, f"{none_found()}; the classical optimizer is used"
    readable = [policy.name for policy in known if policy.bundle is not None]
    if readable:
        yield OK, f"found: {', '.join(readable)}"
    for policy in known:
        if policy.error is not None:
            yield WARN, f"{policy.path}: {policy.error}", "delete it, or package the run again"


def threads() -> Found:
    import torch as library

    yield from judged_threads(library.get_num_threads(), cores(), os.environ)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores() + 0.5:
        yield NOTE, f"{load:.1f} processes share {cores()} cores: timings are unreliable"


def judged_threads(count: int, available: int, environment: Mapping[str, str]) -> Found:
    """By numbers handed in, so that it can be checked without another machine."""
    given = {name: environment[name] for name in THREAD_VARIABLES if name in environment}
    said = ", ".join(f"{name}={value}" for name, value in given.items()) or "no thread variable is set"
    for name, value in given.items():
        if not value.split(",")[0].strip().isdigit():
            yield WARN, f"{name}={value} is not a number and is ignored", f"export {name}=1"
    if count > available:
        sentence = f"torch takes {count} threads, but this process may use {available} cores ({said})"
        yield WARN, sentence, f"export OMP_NUM_THREADS={available}"
    elif available > 1 and "OMP_NUM_THREADS" not in given:
        sentence = f"torch takes {count} of {available} cores; several processes at once would slow each other down"
        yield NOTE, sentence, "export OMP_NUM_THREADS=1 for small structures or many processes"
    else:
        yield OK, f"{count} torch threads on {available} cores ({said})"


def openmp() -> Found:
    """Two OpenMP runtimes in one process make it slow, or end it."""
    import numpy  # noqa: F401 - to have loaded what a relaxation loads
    import torch as library  # noqa: F401

    try:
        paths = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return
    loaded = sorted(path for path in paths if path.name.startswith(OPENMP_LIBRARIES))
    kinds = {path.name.split("-")[0].split(".")[0] for path in loaded}
    if len(kinds) > 1:
        sentence = f"several OpenMP runtimes are loaded: {', '.join(map(str, loaded))}"
        yield WARN, sentence, "install numpy, scipy and torch all by pip, or all by conda"
    else:
        yield OK, f"one OpenMP runtime ({', '.join(kinds) or 'none'})"


def working_directory() -> Found:
    """A file in it that Python would take for a package."""
    here = Path.cwd()
    hiding = ", ".join(f"{name}.py" for name in OFTEN_HIDDEN if (here / f"{name}.py").exists())
    if hiding:
        yield WARN, f"{hiding} in {here} hides the package of that name", "rename it"
    elif not os.access(here, os.W_OK):
        yield WARN, f"no permission to write in {here}", "use --out with another folder"
    else:
        yield OK, f"{here} can be written to and hides no package"


def terminal() -> Found:
    encoding = (sys.stdout.encoding or locale.getpreferredencoding(False)).lower().replace("-", "")
    if encoding.startswith("utf"):
        yield OK, f"writes {sys.stdout.encoding}"
    else:
        yield WARN, f"writes {encoding}, so Å becomes ?", "export PYTHONIOENCODING=utf-8"


def relaxation() -> Found:
    """The thing itself: a small relaxation with a known end."""
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
    if optimizer.outcome.label == "converged" and abs(energy - COPPER_EV_PER_ATOM) < 1e-3:
        yield OK, said
    else:
        report = "please report this with the output of 'relaxion doctor --json'"
        yield FAIL, said, f"expected {COPPER_EV_PER_ATOM:.4f} eV per atom; {report}"


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


CHECKS: tuple[Callable[[], Found], ...] = (
    python, relaxion, ase, torch, packages, calculators, policies, threads, openmp, working_directory, terminal,
    relaxation,
)  # fmt: skip
