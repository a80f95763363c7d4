"""Force calls of an expensive potential where a cheaper one is at hand: five ways to relax the same starts.

    make espresso                                                    # pw.x, for the family dft
    python benchmarks/two_levels/trial.py --mp20 MP_20_FILE          # all that is missing; may be stopped at any time
    python benchmarks/two_levels/trial.py --families dft molecules --methods model relaxer
    python benchmarks/two_levels/trial.py --table                    # the tables of what there is

Ways: `BFGS`; `relaxer` (no model); `cheap, BFGS` (relaxed in the cheap potential to the same fmax, then BFGS: what
people do today); `cheap, relaxer`; `model` (`Relaxer(model=…)`); and for the family dft `pw.x`, its own relax. Seeds
below 9000 are for choosing; results are of seed 9000. A free cell with pw.x is relaxed in legs, as in benchmarks/dft.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import Filter
from ase.optimize import BFGS
from starts import DFT, FAMILIES, FIRST_SEED, calculator

import run as dft  # isort: skip  # benchmarks/dft, which `starts` puts on the path
from relaxion.optimizer.point import bare_atoms
from relaxion.potentials import AsePotential
from relaxion.potentials.base import Potential, PotentialCalculator
from relaxion.relaxer import Relaxer
from relaxion.train.judge.runs import Conditions, Contestant, Score, relax_one
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM, resampled

HERE = Path(__file__).parent
CAP = 300  # force calls, charged where a relaxation failed
DFT_CAP = 60
DFT_FMAX = 0.03
DFT_CHEAP = "sevennet"
ESPRESSO = "pw.x"
METHODS = ("model", "relaxer", "cheap, relaxer", "cheap, BFGS", "BFGS", ESPRESSO)

made = lru_cache(maxsize=4)(calculator)  # one model per process


class Way:
    """How one method sets out from a start; afterwards, what it asked of the cheap potential."""

    def __init__(self, method: str, cheap: Potential, fmax: float) -> None:
        self.method = method
        self.cheap = cheap
        self.fmax = fmax
        self.optimizer: Any = None
        self.cheap_calls = 0
        self.cheap_seconds = 0.0

    def build(self, target: Atoms | Filter) -> Any:
        """The optimizer, on atoms that may have been relaxed in the cheap potential."""
        if self.method.startswith("cheap"):
            self._relax_cheaply(target)
        if self.method == "model":
            self.optimizer = Relaxer(target, logfile=None, model=self.cheap)
        elif "relaxer" in self.method:
            self.optimizer = Relaxer(target, logfile=None)
        else:
            self.optimizer = BFGS(target, logfile=None)  # pyright: ignore[reportArgumentType]
        return self.optimizer

    def _relax_cheaply(self, target: Atoms | Filter) -> None:
        atoms = bare_atoms(target)
        expensive = atoms.calc
        began = time.perf_counter()
        atoms.calc = PotentialCalculator(self.cheap)
        before = Relaxer(target, logfile=None)
        before.run(fmax=self.fmax, steps=CAP)
        atoms.calc = expensive
        self.cheap_calls = before.force_calls
        self.cheap_seconds = time.perf_counter() - began

    def told(self) -> dict[str, Any]:
        """Of the cheap potential, for the file."""
        if self.method != "model" or self.optimizer is None:
            return {"cheap_calls": self.cheap_calls, "cheap_seconds": round(self.cheap_seconds, 2)}
        return {
            "cheap_calls": self.optimizer.model_calls,
            "model_used": self.optimizer.model_used,
            "methods": [entry.method for entry in self.optimizer.history],
            "forces": [round(entry.fmax_ev_per_angstrom, 4) for entry in self.optimizer.history],
        }


def relaxed(method: str, start: Atoms, cheap: Potential, conditions: Conditions) -> tuple[Score, dict[str, Any]]:
    """One start by one method."""
    way = Way(method, cheap, conditions.fmax)
    score = relax_one(Contestant(method, way.build), start, conditions)
    found = {
        "converged": score.converged,
        "calls": score.charged,
        "energy_ev": score.energy_ev,
        "atoms": score.n_atoms,
        "seconds": round(score.seconds, 2),
        "expensive_seconds": round(score.calculator_seconds, 2),
        "error": score.error,
    }
    return score, found | way.told()


@dataclass(frozen=True)
class Job:
    """One start of one family by one method."""

    family: str
    method: str
    name: str
    fmax: float


def by_espresso(job: Job, seed: int) -> dict[str, Any]:
    """A system of the family dft; a free cell in legs, until one begins converged."""
    system = DFT[job.name]
    start = system.start(seed)
    legs: list[dict[str, Any]] = []
    while True:
        left = DFT_CAP - sum(leg["calls"] for leg in legs)
        with TemporaryDirectory(prefix="two-levels-") as folder:
            end, found = _leg(job, start, left, Path(folder))
        legs.append(found)
        if end is None or not system.cell or found["calls"] == 1 or _unmoved(start, end) or left <= found["calls"]:
            break
        start = end
    calls = sum(leg["calls"] for leg in legs) if found["converged"] else DFT_CAP
    seconds = round(sum(leg["seconds"] for leg in legs), 2)
    cheap_calls = sum(leg.get("cheap_calls", 0) for leg in legs)
    return legs[0] | {
        "converged": found["converged"], "energy_ev": found["energy_ev"], "calls": calls, "seconds": seconds,
        "cheap_calls": cheap_calls, "calls_of_legs": [leg["calls"] for leg in legs],
    }  # fmt: skip


def _unmoved(start: Atoms, end: Atoms) -> bool:
    """Whether a leg ended where it began; the cheap minimum may have been looked at before."""
    return np.allclose(start.positions, end.positions, atol=1e-6) and np.allclose(start.cell, end.cell, atol=1e-6)


def _leg(job: Job, start: Atoms, most: int, folder: Path) -> tuple[Atoms | None, dict[str, Any]]:
    system = DFT[job.name]
    if job.method == ESPRESSO:
        began = time.perf_counter()
        leg = dft.leg_by_espresso(system, ESPRESSO, start, most, folder)
        ended = leg.outcome == "converged"
        found = {"converged": ended, "calls": leg.calls, "energy_ev": leg.energy_ev, "atoms": len(start)}
        return leg.final, found | {"seconds": round(time.perf_counter() - began, 2), "error": leg.error}
    made_here = dft.espresso(system.pw_settings, dft.FILES, system.kpts, folder, timeout=600.0)
    expensive = AsePotential(made_here)
    try:
        conditions = Conditions(expensive, job.fmax, most, system.cell)
        score, found = relaxed(job.method, start, made(DFT_CHEAP), conditions)
    finally:
        expensive.close()
    if score.final is None:
        return None, found
    end = start.copy()
    end.set_cell(score.final.cell, apply_constraint=False)
    end.positions[:] = score.final.positions
    return end, found


def by_name(job: Job, seed: int, mp20: Path | None) -> dict[str, Any]:
    """A start of another family."""
    family = FAMILIES[job.family]
    start = family.make(family.number, seed, mp20)[int(job.name)]
    conditions = Conditions(made(family.expensive), job.fmax, CAP, family.free_cell)
    return relaxed(job.method, start, made(family.cheap), conditions)[1]


def jobs(families: list[str], methods: list[str], number: int | None) -> list[Job]:
    found = []
    for name in families:
        if name == "dft":
            found += [Job(name, method, system, DFT_FMAX) for system in DFT for method in METHODS if method in methods]
            continue
        family = FAMILIES[name]
        places = range(min(number or family.number, family.number))
        usual = [method for method in METHODS if method in methods and method != ESPRESSO]
        found += [Job(name, method, str(place), fmax) for place in places for fmax in family.fmax for method in usual]
    return found


def results_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def file_of(out: Path, job: Job) -> Path:
    return out / f"{job.family}-{job.fmax}.json"


def run_all(given: argparse.Namespace) -> None:
    """What is missing, in order; after each relaxation its file is complete."""
    for job in jobs(given.families, given.methods, given.number):
        file = file_of(given.out, job)
        known = results_of(file)
        if job.method in known.get(job.name, {}):
            continue
        try:
            found = by_espresso(job, given.seed) if job.family == "dft" else by_name(job, given.seed, given.mp20)
        except SystemExit as error:
            print(f"{job.family}: {error}", flush=True)
            continue
        known = results_of(file)  # another process may have written meanwhile
        known.setdefault(job.name, {})[job.method] = found
        part = file.with_suffix(".part")
        part.write_text(json.dumps(known, indent=0) + "\n")
        part.replace(file)
        words = f"{found['calls']} calls, cheap {found.get('cheap_calls', 0)}, {found['seconds']} s"
        told = f"; {found['model_used']}" if found.get("model_used") else ""
        print(f"{job.family} {job.name}, {job.method}, {job.fmax}: {words}{told}", flush=True)


def table(file: Path) -> None:
    """Calls of each start, where there are few; then `model` beside each other method, on the starts of both."""
    known = {name: row for name, row in results_of(file).items() if "model" in row}
    methods = [method for method in METHODS if any(method in row for row in known.values())]
    print(f"\n## {file.stem}: {len(known)} starts\n")
    print("| start | " + " | ".join(methods) + " |\n" + "|---" * (1 + len(methods)) + "|")
    for name, row in known.items() if file.stem.startswith("dft") else ():
        lowest = min((found["energy_ev"] for found in row.values() if found["energy_ev"] is not None), default=0.0)
        print(f"| {name} | " + " | ".join(_cell(row.get(method), lowest) for method in methods) + " |")
    if known:
        columns = [_beside(known, method) for method in methods]
        names = ("starts of both", "mean calls", "failed", "model, of its calls", "geometric")
        for place, words in enumerate((*names, "more than one call above it", "ends higher, lower")):
            print(f"| {words} | " + " | ".join(column[place] for column in columns) + " |")


def _beside(known: dict[str, Any], method: str) -> list[str]:
    """Rows of one column, over the starts that both methods have relaxed."""
    pairs = [(row["model"], row[method]) for row in known.values() if method in row]
    ours, theirs = (np.array([pair[number]["calls"] for pair in pairs], float) for number in (0, 1))
    gaps = [(a["energy_ev"] - b["energy_ev"]) / a["atoms"] for a, b in pairs if a["converged"] and b["converged"]]
    higher = sum(gap > SAME_MINIMUM_EV_PER_ATOM for gap in gaps)
    lower = sum(gap < -SAME_MINIMUM_EV_PER_ATOM for gap in gaps)
    return [
        str(len(pairs)),
        f"{theirs.mean():.2f}",
        str(sum(not pair[1]["converged"] for pair in pairs)),
        f"{resampled(ours, theirs):.2f}",
        f"{np.exp(np.mean(np.log(ours / theirs))):.2f}",
        str(int((ours > theirs + 1).sum())),
        f"{higher}, {lower}",
    ]


def _cell(found: dict[str, Any] | None, lowest: float) -> str:
    if found is None:
        return ""
    if not found["converged"]:
        return f"failed ({found['calls']})"
    above = 1000 * (found["energy_ev"] - lowest) / found["atoms"]
    return f"{found['calls']}" + (f", {above:.0f} meV/atom higher" if above > 2 else "")


def main() -> None:
    every = ["dft", *FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=every, choices=every, metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="NAME")
    parser.add_argument("--seed", type=int, default=FIRST_SEED)
    parser.add_argument("--number", type=int, help="the first so many starts of each family but dft")
    parser.add_argument("--mp20", type=Path, help="a file of MP-20, for the crystals")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.table:
        run_all(given)
    for file in sorted(given.out.glob("*.json")):
        table(file)


if __name__ == "__main__":
    main()
