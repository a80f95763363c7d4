"""Force calls until LJ38's global minimum is found: `python benchmarks/search/lj38.py [ARM ...]`.

Random clusters of OptBench (density 0.1 atoms per σ³), reduced units, every force call counted; a search that fails is
charged the budget. ARM: `mixture:SHARES@T` or `bandit:SHARES@T`, T in ε, such as `mixture:rattle=1@0.8`. Each arm is
one JSON file in the folder; without ARM the table of what is there is printed. The global minimum, a truncated
octahedron, has -173.928427 ε. Published: GMIN's basin hopping 266 000 calls, pele 521 600.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from relaxion.files import write_json
from relaxion.potentials.pairwise import LennardJones
from relaxion.search.choices import Bandit, Mixture
from relaxion.search.relaxing import TrialRelaxer, one_round
from relaxion.search.settings import SearchSettings
from relaxion.search.walk import Walk
from relaxion.train.data.alloys import optbench_cluster

LOWEST = {13: -44.326801, 26: -108.315616, 31: -133.586422, 38: -173.928427}  # ε
NEAR = 1e-2  # ε; the next minimum of LJ38 lies 0.68 above
FMAX = 0.05  # ε/σ


def searched(arm: str, size: int, runs: int, calls: int, seed: int) -> list[dict[str, float]]:
    """Calls and energy of each search; all of them hop in lockstep."""
    kind, _, words = arm.partition(":")
    shares, _, temperature = words.partition("@")
    moves = {name: float(share) for name, share in (part.split("=") for part in shares.split(","))}
    walks = []
    for number in range(runs):
        start = optbench_cluster(np.random.default_rng([seed, number]), size)
        settings = SearchSettings(
            calls=calls, moves=moves, temperature_ev=float(temperature), seed=1000 * seed + number, fmax=FMAX,
            policy=None, calls_per_hop=300,
        )  # fmt: skip
        walks.append(Walk(start, settings, Bandit() if kind == "bandit" else Mixture()))
    relax = TrialRelaxer(LennardJones(cutoff=15.0), SearchSettings(policy=None, fmax=FMAX))
    while any(not walk.stopped for walk in walks):
        one_round([walk for walk in walks if not walk.stopped], relax)
        for walk in walks:
            if walk.best_ev < LOWEST[size] + NEAR:
                walk.stopped = walk.stopped or "found"
    return [
        {"calls": walk.improved_at if walk.stopped == "found" else calls, "found": walk.stopped == "found",
         "best": walk.best_ev, "hops": len(walk.history)}
        for walk in walks
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*")
    parser.add_argument("--size", type=int, default=38, choices=sorted(LOWEST))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=9000)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "lj38")
    told = parser.parse_args()
    torch.set_num_threads(1)
    told.folder.mkdir(parents=True, exist_ok=True)
    for arm in told.arms:
        file = told.folder / f"lj{told.size}-{arm}-{told.seed}.json"
        if not file.exists():
            began = time.monotonic()
            runs = searched(arm, told.size, told.runs, told.calls, told.seed)
            write_json(file, {"arm": arm, "calls": told.calls, "seconds": time.monotonic() - began, "runs": runs})
    for file in sorted(told.folder.glob(f"lj{told.size}-*.json")):
        plain = json.loads(file.read_text())
        calls = np.array([run["calls"] for run in plain["runs"]])
        found = np.mean([run["found"] for run in plain["runs"]])
        print(f"{file.stem:60s} {calls.mean():8.0f} calls, median {np.median(calls):8.0f}, found {found:.2f}, "
              f"{plain['seconds']:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
