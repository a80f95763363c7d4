"""Run the six examples of examples/hosts, each in an environment of its own, and print the table of docs/hosts.md.

    python tools/hosts.py --where build/hosts          # all six: environments are made once, then kept
    python tools/hosts.py matgl atomate2               # only these

A host that cannot be installed or fails is a line of the table, not the end of the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL_SECONDS, RUN_SECONDS = 1800, 900  # a host beyond these is given up


@dataclass(frozen=True)
class Host:
    """What pip is asked for, and which of our pins the host cannot live with."""

    requirements: tuple[str, ...]
    unpinned: tuple[str, ...] = ()


HOSTS = {
    "pymatgen": Host(("pymatgen",)),
    "chgnet": Host(("chgnet",)),
    "quacc": Host(("quacc",)),
    "matcalc": Host(("matcalc",)),
    # both bring boto3, whose botocore wants python-dateutil below 3
    "matgl": Host(("matgl",), ("python-dateutil",)),
    "atomate2": Host(("atomate2[ase]", "chgnet"), ("python-dateutil",)),
}


def environment(name: str, where: Path) -> Path:
    """The interpreter of the host's environment, made where it is not there yet. torch first: see the Makefile."""
    python = where / name / "bin" / "python"
    ready = where / name / "ready"
    if ready.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where / name], check=True, timeout=120)
    constraints = where / name / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [pin for pin in pins if pin.partition("==")[0] not in HOSTS[name].unpinned]
    constraints.write_text("\n".join(kept) + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check", "--python", python]
    install = [*pip, "install", "--no-compile", "--constraint", constraints]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    for wanted in ([torch], [*HOSTS[name].requirements, "pytest", "--editable", ROOT]):
        subprocess.run([*install, *wanted], check=True, timeout=INSTALL_SECONDS)
    ready.touch()
    return python


def run(name: str, where: Path) -> tuple[str, list[str]]:
    """The host's version and what its example printed; raises where a step failed."""
    python = environment(name, where)
    ask = f"from importlib.metadata import version; print(version({name!r}))"
    host_version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True, timeout=120).stdout
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", name, ROOT / "tests" / "hosts"]
    subprocess.run(tests, check=True, timeout=RUN_SECONDS, cwd=ROOT, stdout=sys.stderr)
    example = [python, ROOT / "examples" / "hosts" / f"{name}_relax.py"]
    folder = where / name / "run"
    folder.mkdir(exist_ok=True)
    said = subprocess.run(example, check=True, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=folder)
    return host_version.strip(), [line for line in said.stdout.splitlines() if " calls" in line]


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
