"""Self-consistent calculations of relaxations with Quantum ESPRESSO: by us, by ASE, and by its own relax and vc-relax.

    make espresso                                # Debian's quantum-espresso and quantum-espresso-data
    python benchmarks/dft/run.py                 # all that is not in results/ yet; may be stopped at any time
    python benchmarks/dft/run.py --methods BFGS  # of these optimizers only; --systems likewise
    python benchmarks/dft/run.py --table         # the table of what there is

ASE's optimizers and ours ask pw.x through a socket; it stays up until the cell has changed by 6 %
(`relaxion.potentials.counting`). A free cell is relaxed in legs: each begins with a pw.x of its own, and the last
one is a single calculation, which is converged. All calculations are counted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ase import Atoms
from ase.io import read, write
from ase.optimize import BFGS, BFGSLineSearch
from systems import FILES, SYSTEMS, System

from relaxion.apps.comparison import run_ase_optimizer, run_relaxer
from relaxion.potentials import AsePotential
from relaxion.train.judge.runs import PolicyChoice, RelaxationTask

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "examples" / "engines"))
from espresso import PSEUDOPOTENTIALS, espresso  # noqa: E402

RESULTS = HERE / "results"
FMAX = 0.03  # eV/Å
MOST_CALLS = 60
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
    leg = leg_by_espresso if method == ESPRESSO else leg_by_socket
    legs: list[Leg] = []
    began = time.perf_counter()
    start = system.start()
    while True:
        where = folder / f"leg-{len(legs) + 1}"
        where.mkdir()
        left = MOST_CALLS - sum(done.calls for done in legs)
        legs.append(leg(system, method, start, left, where))
        last = legs[-1]
        if last.outcome != "converged" or last.fresh:
            break
        assert last.final is not None
        start = last.final
    texts = [[file.read_text() for file in sorted(folder.glob(f"leg-{n + 1}/pw*.out"))] for n in range(len(legs))]
    return {
        "outcome": last.outcome,
        "calls": sum(done.calls for done in legs),
        "calls_of_legs": [done.calls for done in legs],
        "launches": sum(len(of_leg) for of_leg in texts),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(sum(processor_seconds(text) for of_leg in texts for text in of_leg), 1),
        "scf_iterations": sum(scf_iterations(text)[1] for of_leg in texts for text in of_leg),
        "energy_ev": last.energy_ev,
        "fmax_ev_per_angstrom": last.fmax_ev_per_angstrom,
        "policy_used": last.policy_used,
        "error": last.error,
    }


@dataclass(frozen=True)
class Leg:
    """A relaxation with the plane waves of its start; of a free cell the end has to be looked at with its own."""

    outcome: str
    calls: int
    energy_ev: float | None
    fmax_ev_per_angstrom: float | None
    final: Atoms | None
    fresh: bool  # energy and forces of the end were computed with plane waves and k-points of its own cell
    policy_used: str | None = None
    error: str | None = None


def leg_by_socket(system: System, method: str, start: Atoms, steps: int, folder: Path) -> Leg:
    """Relaxion or an optimizer of ASE."""
    potential = AsePotential(espresso(system.pw_settings, FILES, system.kpts, folder, timeout=600.0))
    task = RelaxationTask(start, potential, FMAX, steps, system.cell)
    try:
        if method in OURS:
            choice = PolicyChoice.of(OURS[method], task.start, allow_unseen=False)
            run = run_relaxer(task, choice, None, None, lambda *_: None)
        else:
            run = run_ase_optimizer(OPTIMIZERS[method], task, lambda *_: None)
    finally:
        potential.close()
    return Leg(
        run.outcome, run.force_calls, run.energy_ev, run.fmax_ev_per_angstrom, run.final,
        fresh=not system.cell or run.force_calls == 1, policy_used=run.policy_used, error=run.error,
    )  # fmt: skip


def processor_seconds(text: str) -> float:
    """Of pw.x, at its last word on it; unlike the time on the clock it does not depend on who else computes."""
    found = re.findall(r"total cpu time spent up to now is\s+(\S+) secs", text)
    return float(found[-1]) if found else 0.0


def scf_iterations(text: str) -> tuple[int, int]:
    """Self-consistent calculations in an output of pw.x, and the iterations they took together."""
    counts = [int(number) for number in re.findall(r"convergence has been achieved in\s+(\d+) iterations", text)]
    return len(counts), sum(counts)


def leg_by_espresso(system: System, method: str, start: Atoms, steps: int, folder: Path) -> Leg:
    """Its own BFGS, with the same tolerance: of every component of a force, where ASE takes the length."""
    del method
    # what ASE's FrechetCellFilter compares with fmax: V σ / n
    pressure = float(FMAX * len(start) / start.get_volume()) if system.cell else np.inf  # eV/Å³
    data = {
        "pseudo_dir": str(PSEUDOPOTENTIALS),
        "outdir": str(folder / "out"),
        "nosym": True,
        "conv_thr": 1e-8,
        "forc_conv_thr": FMAX / RYDBERG_PER_BOHR,
        "etot_conv_thr": 1.0,  # forces decide, as in ASE
        "nstep": steps,
        "ion_dynamics": "bfgs",
        **system.pw_settings,
        "calculation": "vc-relax" if system.cell else "relax",
    }
    if system.cell:
        data |= {"cell_dynamics": "bfgs", "press_conv_thr": pressure * KILOBAR}
    write(folder / "pw.in", start, format="espresso-in", input_data=data, pseudopotentials=FILES, kpts=system.kpts)
    with (folder / "pw.out").open("w") as out:
        subprocess.run(["pw.x", "-in", "pw.in"], cwd=folder, stdout=out, stderr=subprocess.STDOUT, check=False)
    text = (folder / "pw.out").read_text()
    error = None if "JOB DONE" in text else "pw.x stopped early"
    outcome = "converged" if "bfgs converged" in text else "step_limit"
    calls = scf_iterations(text)[0]
    if error or outcome != "converged":
        return Leg(outcome, calls, None, None, None, fresh=False, error=error)
    # with a free cell the last of its calculations has plane waves of the final cell: that one is read
    final: Any = read(folder / "pw.out")
    forces = np.abs(final.get_forces()).max()
    stress = np.abs(final.get_stress()).max() if system.cell else 0.0
    return Leg(
        outcome, calls, float(final.get_potential_energy()), float(forces), final,
        fresh=forces <= FMAX and stress <= pressure,
    )  # fmt: skip


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
