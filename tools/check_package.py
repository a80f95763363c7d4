"""Build wheel and sdist, check them, install the wheel into an empty environment and relax there.

python tools/check_package.py            (what `make package` runs; files in build/dist)

The sdist is built from the checkout and the wheel from the sdist, so both are complete. The environment is new, has no
access to the checkout and gets only what the package declares; versions are those of constraints.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "build" / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
LARGEST_WHEEL_BYTES = 5_000_000
USED = """
import sys, relaxion
from ase.build import bulk
from ase.calculators.emt import EMT
assert "site-packages" in relaxion.__file__, relaxion.__file__
atoms = bulk("Cu", cubic=True)
atoms.rattle(0.1, seed=0)
atoms.calc = EMT()
opt = relaxion.Relaxer(atoms, logfile=None)
assert opt.run(fmax=0.05) and opt.policy_used == "metals", opt.policy_used
print(relaxion.__version__)
"""


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints; a failure ends this script with its output."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}\nexit code {done.returncode}")
    return done.stdout


def built() -> tuple[Path, Path]:
    """The wheel and the sdist; both pass twine's check, and the wheel is small."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    if wheel.stat().st_size > LARGEST_WHEEL_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST_WHEEL_BYTES}")
    return wheel, sdist


def installed(wheel: Path, folder: Path) -> Path:
    """The bin folder of a new environment with the wheel and what it declares."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", CONSTRAINTS]
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    run(*pip, torch)  # first: asked for by another package, pip would take the newest build with gigabytes of CUDA
    run(*pip, wheel)
    return folder / "bin"


def tried(programs: Path, folder: Path) -> str:
    """Relax from Python and on the command line; the version found."""
    shutil.copy(ROOT / "examples" / "alloy.cif", folder)
    version = run(programs / "python", "-c", USED, cwd=folder).strip()
    said = run(programs / "relaxion", "relax", "alloy.cif", "--report", "--out", "relaxed", cwd=folder)
    if "policy metals" not in said or not (folder / "relaxed" / "alloy" / "report.html").is_file():
        sys.exit(f"relaxion relax in the new environment:\n{said}")
    return version


def main() -> None:
    wheel, sdist = built()
    with tempfile.TemporaryDirectory() as name:
        version = tried(installed(wheel, Path(name) / "env"), Path(name))
    sizes = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in (wheel, sdist))
    print(f"{sizes}: checked, installed without the checkout and used, version {version}")


if __name__ == "__main__":
    main()
