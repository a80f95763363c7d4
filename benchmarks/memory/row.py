"""Structures in a row that never repeat: what `relax-many --learn` saves against the shipped policy.

    python benchmarks/memory/row.py slabs --work WORK                       # EMT, 150 structures
    python benchmarks/memory/row.py packings --work WORK --table AlFe.fs    # an EAM table of Al and Fe, 300
    python benchmarks/memory/row.py --list

Both runs are `relaxion relax-many` in WORK/FAMILY, so an interrupted one goes on when started again. The result (calls
of every structure, ratios by thirds of the row with bootstrap intervals, seconds of study) goes to results/FAMILY.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import write

from relaxion.apps.comparison import find_set
from relaxion.apps.relax_many.learning import read_fit
from relaxion.database import RelaxationDatabase
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.optimizer.choice import load
from relaxion.train.data.alloys import EMT_METALS
from relaxion.train.data.perturbations import displaced
from relaxion.train.data.prototypes import random_perovskite
from relaxion.train.data.slabs import ADSORBATES, alloy_slab, random_molecule
from relaxion.train.judge.statistics import resampled
from relaxion.train.supervised.fine_tune import errors_of, held_out
from relaxion.train.supervised.fit import secants_of

RESULTS = Path(__file__).with_name("results")
SEED = 9700
COMMAND = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()"]
CAP = 500


@dataclass(frozen=True)
class Family:
    """Structures of one kind, and who relaxes them."""

    words: str
    number: int
    calculator: str
    make: Callable[[np.random.Generator], Atoms]


def of_set(name: str) -> Callable[[np.random.Generator], Atoms]:
    """As `relaxion bench` makes them, from other seeds."""
    return lambda random: find_set(name).make(random, 0)


def alloy_slabs(random: np.random.Generator) -> Atoms:
    return displaced(alloy_slab(random, EMT_METALS, (8, 27), ADSORBATES), random, 0.08)


def perovskite(random: np.random.Generator) -> Atoms:
    return displaced(random_perovskite(random, side="assessment"), random, 0.1)


def molecule(random: np.random.Generator) -> Atoms:
    return displaced(random_molecule(random, side="assessment", sizes=(6, 24)), random, 0.05, nearest=0.6)


FAMILIES = {
    "slabs": Family("fcc(111) of one metal, 12 atoms, an adsorbate", 150, "emt", of_set("emt-slabs")),
    "alloy-slabs": Family("slabs of metals and alloys, 8-27 atoms, adsorbates", 150, "emt", alloy_slabs),
    "bulk": Family("random alloys, 4-32 atoms", 150, "emt", of_set("emt-bulk")),
    "packings": Family("random Al-Fe packings, 2-16 atoms, EAM table", 300, "eam:TABLE", of_set("alfe")),
    "perovskites": Family("unseen cubic perovskites, fixed cell, CHGNet", 150, "chgnet", perovskite),
    "molecules": Family("unseen organic molecules, GFN2", 150, "gfn2", molecule),
}


def written(name: str, number: int, work: Path) -> Path:
    file = work / "row.extxyz"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        place = list(FAMILIES).index(name)
        images = [FAMILIES[name].make(np.random.default_rng([SEED, place, index])) for index in range(number)]
        for atoms in images:
            atoms.info = {}
        write(file, images)
    return file


def relaxed(file: Path, out: Path, calculator: str, options: Sequence[str]) -> list[int]:
    """Force calls in the order of the row; failures are charged the cap."""
    words = ["relax-many", str(file), "--out", str(out), "--calc", calculator, "--workers", "local:1", *options]
    subprocess.run([*COMMAND, *words], check=False)
    with (out / "summary.csv").open() as table:
        rows = list(csv.DictReader(table))
    return [int(row["force_calls"]) if row["outcome"] == "converged" else CAP for row in rows]


def error_ratio(learning: Path) -> float | None:
    """Error of predicted ways on all relaxations held out, after the last study over before the first."""
    studies = sorted((learning / "learned").glob("*.safetensors"))
    if not studies:
        return None
    stored = read_fit(studies[-1])
    name = str(stored.values["policy"])
    policy = load(name).policy
    assert isinstance(policy, StiffnessPolicy)
    network = deepcopy(policy.network)
    network.load_state_dict(stored.part("network"))
    every = (secants_of(t) for t in RelaxationDatabase.open(learning / "memory") if t.policy == name)
    apart = [one for one in every if one is not None and held_out(one.key)]
    return float(errors_of(network, apart).mean() / errors_of(policy.network, apart).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", choices=FAMILIES)
    parser.add_argument("--work", type=Path, default=Path("row-work"))
    parser.add_argument("--table", default="AlFe.fs", help="the EAM table of the packings")
    parser.add_argument("--number", type=int, default=None)
    parser.add_argument("--learn", type=int, default=10, help="structures per study")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list or given.family is None:
        for name, family in FAMILIES.items():
            print(f"{name}: {family.words}; {family.number} structures, {family.calculator}")
        return
    family, work = FAMILIES[given.family], given.work / given.family
    number = given.number or family.number
    calculator = family.calculator.replace("TABLE", given.table)
    file = written(given.family, number, work)
    began = time.monotonic()
    shipped = np.array(relaxed(file, work / "shipped", calculator, ["-q"]), float)
    middle = time.monotonic()
    learning = np.array(relaxed(file, work / "learning", calculator, ["--learn", str(given.learn)]), float)
    third = number // 3
    parts = [slice(k * third, (k + 1) * third if k < 2 else number) for k in range(3)]
    ratios = [resampled(learning[part], shipped[part]) for part in parts]
    result = {
        "family": given.family,
        "structures": number,
        "calculator": family.calculator,
        "learn_every": given.learn,
        "ratio_by_thirds": [[ratio.value, ratio.low, ratio.high] for ratio in ratios],
        "mean_calls_shipped": shipped.mean(),
        "mean_calls_last_third": [learning[parts[-1]].mean(), shipped[parts[-1]].mean()],
        "error_ratio": error_ratio(work / "learning"),
        "failures": [int((learning >= CAP).sum()), int((shipped >= CAP).sum())],
        "seconds": [middle - began, time.monotonic() - middle],
        "calls": {"shipped": shipped.tolist(), "learning": learning.tolist()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{given.family}.json").write_text(json.dumps(result) + "\n")
    print(f"{given.family}: by thirds " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
