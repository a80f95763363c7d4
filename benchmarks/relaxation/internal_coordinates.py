"""Force calls of Sella and geomeTRIC, which relax molecules in internal coordinates, beside ours from the same starts.

    pip install sella geometric jax
    python benchmarks/relaxation/internal_coordinates.py --number 40

Starts are those of `relaxion bench molecules` (seed 9000, GFN2-xTB). Calls are counted inside the calculator. geomeTRIC
ends where the largest force is below the tolerance; its other criteria are switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
from collections.abc import Callable

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.optimize import BFGS
from ase.units import Bohr, Hartree

from relaxion import Relaxer
from relaxion.bench.sets import FIRST_SEED, SETS

FMAX, CAP = 0.05, 500  # eV/Å, force calls


class Counting(Calculator):
    """Passes questions on, and counts them."""

    implemented_properties = ("energy", "forces")

    def __init__(self, asked: Calculator) -> None:
        super().__init__()
        self.asked, self.calls = asked, 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        self.calls += 1
        assert atoms is not None
        forces = self.asked.get_property("forces", atoms)
        self.results = {"energy": self.asked.get_property("energy", atoms), "forces": forces}


def relaxed_by_ours(atoms: Atoms) -> None:
    Relaxer(atoms, logfile=None).run(fmax=FMAX, steps=CAP)


def relaxed_by_bfgs(atoms: Atoms) -> None:
    BFGS(atoms, logfile=None).run(fmax=FMAX, steps=CAP)


def relaxed_by_sella(atoms: Atoms) -> None:
    from sella import Sella

    Sella(atoms, order=0, internal=True, logfile=None).run(fmax=FMAX, steps=CAP)


def relaxed_by_geometric(atoms: Atoms) -> None:
    from geometric.ase_engine import EngineASE
    from geometric.internal import DelocalizedInternalCoordinates
    from geometric.molecule import Molecule
    from geometric.optimize import Optimizer, OptParams

    molecule = Molecule()
    molecule.elem, molecule.xyzs = atoms.get_chemical_symbols(), [atoms.positions.copy()]
    molecule.build_topology()
    engine = EngineASE(molecule, atoms.calc)
    coordinates = DelocalizedInternalCoordinates(molecule, build=True, connect=False, addcart=False)
    loose = {f"convergence_{name}": 1e9 for name in ("energy", "grms", "drms", "dmax")}
    options = OptParams(convergence_gmax=FMAX * Bohr / Hartree, maxiter=CAP, **loose)
    with tempfile.TemporaryDirectory() as folder:
        result = Optimizer(molecule.xyzs[0].flatten() / Bohr, molecule, coordinates, engine, folder, options)
        result.optimizeGeometry()
    atoms.positions = result.progress.xyzs[-1]


METHODS: dict[str, Callable[[Atoms], None]] = {
    "relaxion": relaxed_by_ours,
    "Sella": relaxed_by_sella,
    "geomeTRIC": relaxed_by_geometric,
    "BFGS": relaxed_by_bfgs,
}


def calls(method: Callable[[Atoms], None], start: Atoms, engine: Calculator) -> int:
    """Those until the method is content; the cap where it fails or its end is none."""
    atoms = start.copy()
    atoms.calc = counting = Counting(engine)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            method(atoms)
    except Exception as error:  # noqa: BLE001  # whatever another package raises is its failure, and is counted so
        print(f"  {method.__name__} on {start.get_chemical_formula()}: {type(error).__name__} {error}")
        return CAP
    needed = counting.calls
    largest = np.linalg.norm(atoms.get_forces(), axis=1).max()
    return needed if largest < 1.02 * FMAX else CAP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40)
    given = parser.parse_args()
    logging.getLogger("geometric").setLevel(logging.ERROR)
    logging.disable(logging.INFO)
    chosen = SETS["molecules"]
    engine = chosen.make_potential().as_calculator()
    starts = chosen.starts(given.number, FIRST_SEED)
    found = {name: np.array([calls(method, start, engine) for start in starts]) for name, method in METHODS.items()}
    for name, each in found.items():
        ratio = found["relaxion"].mean() / each.mean()
        print(
            f"{name:10s} mean {each.mean():5.1f} median {np.median(each):4.0f} worst {each.max():3d} "
            f"failures {(each >= CAP).sum()}  ours over it {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
