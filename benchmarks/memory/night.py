"""A policy learned overnight: from a memory of one family, judged on members of it that nobody has relaxed before.

    python benchmarks/memory/row.py packings --work WORK --table AlFe.fs       # leaves 300 relaxations
    python benchmarks/memory/night.py packings --work WORK --table AlFe.fs

`relaxion learn` makes WORK/FAMILY/night.safetensors from the memory of the row; then both policies relax unseen
structures (other seeds). The result goes to results/FAMILY-night.json. Interrupted, it goes on when started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np
from ase.io import write
from row import CAP, COMMAND, FAMILIES, RESULTS, relaxed

from relaxion.train.judge.statistics import resampled

SEED = 9800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--work", type=Path, default=Path("row-work"))
    parser.add_argument("--table", default="AlFe.fs")
    parser.add_argument("--origin", default="metals")
    parser.add_argument("--number", type=int, default=80)
    parser.add_argument("--updates", type=int, default=0, help="0: as many as 'relaxion learn' makes by itself")
    given = parser.parse_args()
    family, work = FAMILIES[given.family], given.work / given.family
    calculator = family.calculator.replace("TABLE", given.table)
    policy, told = work / "night.safetensors", work / "night.json"
    if not told.exists():
        words = ["learn", str(work / "learning" / "memory"), "--from", given.origin, "--out", str(policy), "--json"]
        words += ["--set", f"fit_updates={given.updates}"]
        told.write_text(subprocess.run([*COMMAND, *words, "--force"], capture_output=True, text=True).stdout)
    learned = json.loads(told.read_text())
    file, place = work / "unseen.extxyz", list(FAMILIES).index(given.family)
    images = [family.make(np.random.default_rng([SEED, place, index])) for index in range(given.number)]
    for atoms in images:
        atoms.info = {}
    write(file, images)
    own = ["--policy", str(policy) if learned["kept"] else given.origin, "-q"]
    after = np.array(relaxed(file, work / "unseen-night", calculator, own), float)
    before = np.array(relaxed(file, work / "unseen-shipped", calculator, ["--policy", given.origin, "-q"]), float)
    ratio = resampled(after, before)
    result = {
        "family": given.family,
        "learned": {name: value for name, value in learned.items() if name != "policy"},
        "unseen": given.number,
        "ratio": [ratio.value, ratio.low, ratio.high],
        "mean_calls": [after.mean(), before.mean()],
        "failures": [int((after >= CAP).sum()), int((before >= CAP).sum())],
    }
    (RESULTS / f"{given.family}-night.json").write_text(json.dumps(result) + "\n")
    print(f"{given.family}: {ratio:.2f} of {given.origin} on {given.number} unseen structures")


if __name__ == "__main__":
    main()
