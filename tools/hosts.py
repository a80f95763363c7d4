"""Run the examples of examples/hosts and their tests in environments of their own; print the numbers of docs/hosts.md.

    python tools/hosts.py                  # all six: the two environments are made once in build/hosts, then kept
    python tools/hosts.py matgl atomate2   # only these

A host that cannot be installed or fails is a line of the table, not the end of the others.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SET_UP_SECONDS, INSTALL_SECONDS, RUN_SECONDS = 300, 1800, 900  # what takes longer is given up


@dataclass(frozen=True)
class Environment:
    """Hosts that live together, what pip is asked for, and what takes the place of our pins."""

    hosts: tuple[str, ...]
    requirements: tuple[str, ...]
    instead_of_pins: tuple[str, ...] = ()


ENVIRONMENTS = {
    "pinned": Environment(("pymatgen", "chgnet", "quacc", "matcalc"), ("--editable", f"{ROOT}[hosts]")),
    # matgl and maggma, which atomate2 stands on, bring boto3, whose botocore wants python-dateutil below 3
    "older-dateutil": Environment(
        ("matgl", "atomate2"), ("matgl", "atomate2[ase]", "--editable", f"{ROOT}[chgnet]"), ("python-dateutil<3",)
    ),
}
HOSTS = {host: name for name, environment in ENVIRONMENTS.items() for host in environment.hosts}


def interpreter(name: str, where: Path) -> Path:
    """That of the environment, which is made where it is not there yet. torch first: see the Makefile."""
    folder, environment = where / name, ENVIRONMENTS[name]
    python, ready, constraints = folder / "bin" / "python", folder / "ready", folder / "constraints.txt"
    if ready.exists():
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=SET_UP_SECONDS)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    replaced = {requirement.partition("<")[0] for requirement in environment.instead_of_pins}
    kept = [pin for pin in pins if pin.partition("==")[0] not in replaced]
    constraints.write_text("\n".join([*kept, *environment.instead_of_pins]) + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check", "--python", python]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    for wanted in ([torch], ["pytest", *environment.requirements]):
        install = [*pip, "install", "--no-compile", "--constraint", constraints, *wanted]
        subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
    ready.touch()
    return python


def run(name: str, where: Path) -> tuple[str, list[str]]:
    """The host's version and what its example printed while its test ran; raises where a step failed."""
    python = interpreter(HOSTS[name], where)
    ask = f"from importlib.metadata import version; print(version({name!r}))"
    host_version = subprocess.run(
        [python, "-c", ask], check=True, capture_output=True, text=True, timeout=SET_UP_SECONDS
    )
    test = [python, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-k", name, ROOT / "tests" / "hosts"]
    said = subprocess.run(test, check=True, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)
    return host_version.stdout.strip(), re.findall(r"(?:fixed|free) cell: .* eV", said.stdout)


def main() -> int:
    """The table; 1 where a host failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *HOSTS], help="hosts; all where none is named")
    parser.add_argument("--where", type=Path, default=ROOT / "build" / "hosts", help="folder of the environments")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.where.mkdir(parents=True, exist_ok=True)
    failures = 0
    print("| host | version | what it printed |\n|---|---|---|", flush=True)
    for name in options.names or HOSTS:
        try:
            host_version, lines = run(name, options.where.resolve())
            print(f"| {name} | {host_version} | {'<br>'.join(lines)} |", flush=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failures += 1
            print(f"| {name} | – | failed: `{' '.join(map(str, error.cmd))[-120:]}` |", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
