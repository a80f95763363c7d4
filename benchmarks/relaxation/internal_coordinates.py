"""Force calls on molecules: ours beside geomeTRIC, Sella (internal) and pyberny, and beside ASE's optimizers.

    pip install 'relaxion[molecules,internal]'
    python benchmarks/relaxation/internal_coordinates.py molecules --number 30 --fmax 1e-4
    python benchmarks/relaxation/internal_coordinates.py dimers --methods relaxion,BFGS,BFGSLineSearch

Starts are those of `relaxion bench SET` (seed 9000). All are counted by the same calculator. One run to the tightest
tolerance gives the calls to every looser one: the first at which the largest force was below it. What fails is charged
the cap. Forces decide for all; the other criteria of geomeTRIC and pyberny are off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import FrechetCellFilter
from ase.units import Bohr, Hartree
from molecular_sets import find_set

from relaxion import Relaxer
from relaxion.apps.comparison import StartSet
from relaxion.potentials.counting import Answered, CountingCalculator
from relaxion.train.data.dataset import FIRST_MEASURING_SEED
from relaxion.train.judge.runs import known_optimizers

CAP = 400  # force calls
TOLERANCES = (0.05, 0.01, 1e-3, 1e-4)  # eV/Å
RESAMPLES = 4000

Relax = Callable[[Any, float], None]  # atoms or filter, fmax


def relaxed_by_ours(target: Any, fmax: float) -> None:
    Relaxer(target, logfile=None).run(fmax=fmax, steps=CAP)


def relaxed_by_core(target: Any, fmax: float) -> None:
    Relaxer(target, logfile=None, policy=None).run(fmax=fmax, steps=CAP)


def relaxed_by_sella(atoms: Any, fmax: float) -> None:
    from sella import Sella

    Sella(atoms, order=0, internal=True, logfile=None).run(fmax=fmax, steps=CAP)


def relaxed_by_geometric(atoms: Any, fmax: float) -> None:
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
    options = OptParams(convergence_gmax=fmax * Bohr / Hartree, maxiter=CAP, **loose)
    with tempfile.TemporaryDirectory() as folder:
        Optimizer(molecule.xyzs[0].flatten() / Bohr, molecule, coordinates, engine, folder, options).optimizeGeometry()


def relaxed_by_pyberny(atoms: Any, fmax: float) -> None:
    from berny import Berny, geomlib

    geometry = geomlib.Geometry(atoms.get_chemical_symbols(), atoms.positions)
    # its own criteria are for gradients by internal coordinates: never met, so that forces decide
    optimizer = Berny(geometry, maxsteps=CAP, gradientmax=1e-12, gradientrms=1e-12, stepmax=1e9, steprms=1e9)
    for geometry in optimizer:
        atoms.positions = geometry.coords
        forces = atoms.get_forces()
        if np.linalg.norm(forces, axis=1).max() < fmax:
            return
        optimizer.send((atoms.get_potential_energy() / Hartree, -forces / Hartree * Bohr))


INTERNAL: dict[str, Relax] = {
    "geomeTRIC": relaxed_by_geometric,
    "Sella": relaxed_by_sella,
    "pyberny": relaxed_by_pyberny,
}
OURS: dict[str, Relax] = {"relaxion": relaxed_by_ours, "core": relaxed_by_core}


def method_of(name: str) -> Relax:
    """Ours, one in internal coordinates, or any of ASE's."""
    if name in OURS or name in INTERNAL:
        return (OURS | INTERNAL)[name]
    kind: Any = known_optimizers()[name]

    def relax(target: Any, fmax: float) -> None:
        kind(target, logfile=None).run(fmax=fmax, steps=CAP)

    return relax


def forces_on_the_way(relax: Relax, start: Atoms, chosen: StartSet, fmax: float) -> tuple[list[float], float]:
    """The largest force at every call, that on a free cell included, and the last energy."""
    atoms, found, energies = start.copy(), list[float](), [np.inf]
    atoms.calc = counter = CountingCalculator(chosen.make_potential(), stress=chosen.free_cell, limit=CAP)
    target: Any = FrechetCellFilter(atoms) if chosen.free_cell else atoms

    def note(point: Answered) -> None:
        energies.append(point.answer["energy"])
        found.append(_largest_force(atoms, point, chosen.free_cell))

    counter.on_answer = note
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            relax(target, fmax)
    except Exception as error:  # noqa: BLE001  # whatever another package raises is its failure, and is counted so
        print(f"  {start.get_chemical_formula()}: {type(error).__name__} {str(error)[:100]}", flush=True)
    return found, energies[-1]


def _largest_force(atoms: Atoms, point: Answered, free_cell: bool) -> float:
    forces = point.answer["forces"].copy()
    for constraint in atoms.constraints:
        constraint.adjust_forces(atoms, forces)
    largest = float(np.linalg.norm(forces, axis=1).max())
    if not free_cell:
        return largest
    pull = point.atoms.get_volume() * point.answer["stress"][[[0, 5, 4], [5, 1, 3], [4, 3, 2]]] / len(atoms)
    return max(largest, float(np.linalg.norm(pull, axis=1).max()))


def calls_to(forces: list[float], tolerance: float) -> int:
    """Until the largest force is below; the cap where it never is."""
    return next((number for number, force in enumerate(forces, start=1) if force < tolerance), CAP)


def ratio(ours: np.ndarray, others: np.ndarray) -> str:
    """Of means, with a paired 95 % interval."""
    which = np.random.default_rng(0).integers(0, len(ours), (RESAMPLES, len(ours)))
    low, high = np.percentile(ours[which].mean(axis=1) / others[which].mean(axis=1), [2.5, 97.5])
    return f"{ours.mean() / others.mean():.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", default="molecules")
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=FIRST_MEASURING_SEED)
    parser.add_argument("--fmax", type=float, default=0.01)
    parser.add_argument("--methods", default="relaxion,geomeTRIC,pyberny,Sella")
    parser.add_argument("--json", type=Path, help="kept after each start; what is there is not run again")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    chosen = find_set(given.set)
    starts = chosen.starts(given.number, given.seed)
    kept = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    tolerances = [tolerance for tolerance in TOLERANCES if tolerance >= given.fmax]
    for name in given.methods.split(","):
        found = kept.setdefault(name, {"calls": {f"{tolerance:g}": [] for tolerance in tolerances}, "energies": []})
        for start in starts[len(found["energies"]) :]:
            forces, energy = forces_on_the_way(method_of(name), start, chosen, given.fmax)
            for tolerance in tolerances:
                found["calls"][f"{tolerance:g}"].append(calls_to(forces, tolerance))
            found["energies"].append(energy)
            if given.json:
                given.json.write_text(json.dumps(kept))
    report(kept)


def report(kept: dict[str, Any]) -> None:
    """Mean calls by tolerance, and ours over each."""
    ours = next(name for name in kept if name in OURS)
    sizes = len(kept[ours]["energies"])
    for name, found in kept.items():
        lower = int((np.array(kept[ours]["energies"]) < np.array(found["energies"]) - 1e-2).sum())
        higher = int((np.array(kept[ours]["energies"]) > np.array(found["energies"]) + 1e-2).sum())
        parts = []
        for tolerance, calls in found["calls"].items():
            other, own = np.array(calls), kept[ours]["calls"].get(tolerance)
            against = "" if own is None or name == ours else f" ours {ratio(np.array(own), other)}"
            parts.append(f"{tolerance}: {other.mean():.1f} ({(other >= CAP).sum()} failed){against}")
        print(f"{name:12s} n {sizes} {'; '.join(parts)}; ours lower {lower}, higher {higher}", flush=True)


if __name__ == "__main__":
    main()
