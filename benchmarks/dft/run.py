"""Self-consistent calculations of relaxations with Quantum ESPRESSO: by us, by ASE, and by its own relax and vc-relax.

    make espresso                                # Debian's quantum-espresso and quantum-espresso-data
    python benchmarks/dft/run.py                 # all that is not in results/ yet; may be stopped at any time
    python benchmarks/dft/run.py --table         # the table of what there is

ASE's optimizers and ours ask pw.x through a socket; it stays up during a relaxation and is started anew for the next.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ase import Atoms
from ase.io import read, write
from ase.optimize import BFGS, BFGSLineSearch
from systems import FILES, SYSTEMS, System

from relaxion.bench.comparison import run_ase_optimizer, run_relaxer
from relaxion.bench.optimizers import PolicyChoice
from relaxion.bench.runs import Task
from relaxion.potentials import AsePotential
from relaxion.potentials.closing import close_calculator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "examples" / "engines"))
from espresso import PSEUDOPOTENTIALS, espresso  # noqa: E402

RESULTS = HERE / "results"
FMAX = 0.03  # eV/Å
MOST_CALLS = 60
RYDBERG = 13.605693  # eV
RYDBERG_PER_BOHR = 25.711  # eV/Å
KILOBAR = 1602.1766  # per eV/Å³
OURS = {"relaxion": "auto", "core": "none"}
OPTIMIZERS = {"BFGS": BFGS, "BFGSLineSearch": BFGSLineSearch}
ESPRESSO = "pw.x"
METHODS = (*OURS, *OPTIMIZERS, ESPRESSO)


def result_file(name: str, method: str) -> Path:
    return RESULTS / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.{method}.json"


def relax(system: System, method: str, folder: Path) -> dict[str, Any]:
    """One relaxation; calls, seconds and where it ended."""
    if method == ESPRESSO:
        return relax_by_espresso(system, folder)
    calculator = espresso(system.pw_settings, FILES, system.kpts, folder, timeout=600.0)
    potential = AsePotential(calculator)
    task = Task(system.start(), potential, FMAX, MOST_CALLS, system.cell)
    try:
        if method in OURS:
            choice = PolicyChoice.of(OURS[method], task.start, allow_unseen=False)
            run = run_relaxer(task, choice, None, None, lambda *_: None)
        else:
            run = run_ase_optimizer(OPTIMIZERS[method], task, lambda *_: None)
    finally:
        potential.close()
    return {
        "outcome": run.outcome,
        "calls": run.force_calls,
        "seconds": round(run.wall_time_seconds, 1),
        "processor_seconds": processor_seconds((folder / "pw.out").read_text()),
        "scf_iterations": scf_iterations((folder / "pw.out").read_text())[1],
        "energy_ev": run.energy_ev if run.final is None else energy(system, run.energy_ev, run.final, folder),
        "fmax_ev_per_angstrom": run.fmax_ev_per_angstrom,
        "policy_used": run.policy_used,
        "error": run.error,
    }


def energy(system: System, found: float | None, final: Atoms, folder: Path) -> float | None:
    """To be compared: with a free cell of the final structure afresh, as plane waves of the way stay with a cell."""
    if not system.cell:
        return found
    calculator = espresso(system.pw_settings, FILES, system.kpts, folder / "afresh", timeout=600.0)
    final = final.copy()
    final.calc = calculator
    try:
        return float(final.get_potential_energy())
    finally:
        close_calculator(calculator)


def processor_seconds(text: str) -> float | None:
    """Of pw.x, at its last word on it; unlike the time on the clock it does not depend on who else computes."""
    found = re.findall(r"total cpu time spent up to now is\s+(\S+) secs", text)
    return float(found[-1]) if found else None


def scf_iterations(text: str) -> tuple[int, int]:
    """Self-consistent calculations in an output of pw.x, and the iterations they took together."""
    counts = [int(number) for number in re.findall(r"convergence has been achieved in\s+(\d+) iterations", text)]
    return len(counts), sum(counts)


def relax_by_espresso(system: System, folder: Path) -> dict[str, Any]:
    """Its own BFGS, with the same tolerance: of every component of a force, where ASE takes the length."""
    start = system.start()
    data = {
        "calculation": "vc-relax" if system.cell else "relax",
        "pseudo_dir": str(PSEUDOPOTENTIALS),
        "outdir": str(folder / "out"),
        "nosym": True,
        "conv_thr": 1e-8,
        "forc_conv_thr": FMAX / RYDBERG_PER_BOHR,
        "etot_conv_thr": 1.0,  # forces decide, as in ASE
        "nstep": MOST_CALLS,
        "ion_dynamics": "bfgs",
        **system.pw_settings,
    }
    if system.cell:  # what ASE's FrechetCellFilter compares with fmax: V σ / n
        pressure = float(FMAX * len(start) / start.get_volume() * KILOBAR)
        data |= {"cell_dynamics": "bfgs", "press_conv_thr": pressure}
    write(folder / "pw.in", start, format="espresso-in", input_data=data, pseudopotentials=FILES, kpts=system.kpts)
    began = time.perf_counter()
    with (folder / "pw.out").open("w") as out:
        subprocess.run(["pw.x", "-in", "pw.in"], cwd=folder, stdout=out, stderr=subprocess.STDOUT, check=False)
    text = (folder / "pw.out").read_text()
    calls, iterations = scf_iterations(text)
    ends = re.findall(r"Final (?:energy|enthalpy)\s*=\s*(\S+) Ry", text)
    return {
        "outcome": "converged" if "bfgs converged" in text else "step_limit",
        "calls": calls,
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": processor_seconds(text),
        "scf_iterations": iterations,
        "energy_ev": energy(system, float(ends[-1]) * RYDBERG, read(folder / "pw.out"), folder) if ends else None,
        "fmax_ev_per_angstrom": None,
        "policy_used": None,
        "error": None if "JOB DONE" in text else "pw.x stopped early",
    }


def run_all(names: list[str], methods: list[str]) -> None:
    for name in names:
        for method in methods:
            file = result_file(name, method)
            if file.exists():
                continue
            with TemporaryDirectory(prefix="dft-") as folder:
                result = {"system": name, "method": method, **relax(SYSTEMS[name], method, Path(folder))}
            part = file.with_suffix(".part")
            part.write_text(json.dumps(result, indent=1) + "\n")
            part.replace(file)
            print(f"{name}, {method}: {result['outcome']}, {result['calls']} calls, {result['seconds']} s", flush=True)


def table() -> None:
    """Calls (iterations of the electrons), and how far above the lowest each ended, if by more than 2 meV per atom."""
    print("| system | atoms | " + " | ".join(METHODS) + " |\n" + "|---" * (2 + len(METHODS)) + "|")
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    for name, system in SYSTEMS.items():
        found = {m: json.loads(result_file(name, m).read_text()) for m in METHODS if result_file(name, m).exists()}
        if not found:
            continue
        start = system.start()
        cells = [cell(found.get(method), list(found.values()), len(start)) for method in METHODS]
        print(f"| {name} | {len(start)} | " + " | ".join(cells) + " |")
        best = found.get("BFGS", {}).get("calls")
        for method, result in found.items():
            if best and result["outcome"] == "converged":
                ratios[method].append(result["calls"] / best)
    means = [f"{np.exp(np.mean(np.log(found))):.2f}" if found else "" for found in ratios.values()]
    print("| of BFGS's calls (geometric mean) | | " + " | ".join(means) + " |")


def cell(result: dict[str, Any] | None, others: list[dict[str, Any]], n_atoms: int) -> str:
    if result is None:
        return ""
    if result["outcome"] != "converged":
        return f"{result['outcome'].replace('_', ' ')} after {result['calls']}"
    lowest = min(other["energy_ev"] for other in others if other["energy_ev"] is not None)
    above = 1000 * (result["energy_ev"] - lowest) / n_atoms
    return f"{result['calls']} ({result['scf_iterations']})" + (f", {above:.0f} meV/atom higher" if above > 2 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="NAME")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if not arguments.table:
        run_all(arguments.systems, arguments.methods)
    table()


if __name__ == "__main__":
    main()
