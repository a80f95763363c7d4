"""Every table of README and docs, made again: commands, the time that their results took, and a run of all of them.

    python benchmarks/all_tables.py                                   # the list, with hours of one core
    python benchmarks/all_tables.py --run RUNS --mp20 MP_20_FILE      # all of them, one after the other; resumable
    python benchmarks/all_tables.py --run RUNS --only relaxing dft

Needs the environment of `make test`, `pip install -e '.[chgnet,sevenn,molecules,internal]'`, `make espresso` and, for
crystals, a file of MP-20. Hours are summed from the results in the repository; a dash stands where no time was written
down. Most scripts keep results that are there: remove those that shall be made anew, or see the help of the script.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = ("cpu_seconds", "wall_time_seconds", "seconds")  # the first that a record has


@dataclass(frozen=True)
class Table:
    """One or several tables that come from one script."""

    page: str
    command: str  # RUNS and MP20 stand for the options of this script
    results: str = ""  # files or folder below benchmarks/


TABLES = {
    "relaxing": Table(
        "README.md, docs/results/relaxing.md",
        "benchmarks/relaxation/tables.py --again --mp20 MP20",
        "relaxation/results/*.json",
    ),
    "molecules": Table(
        "docs/results/relaxing.md", "benchmarks/relaxation/internal_coordinates.py molecules --number 24 --fmax 1e-3"
    ),
    "flexible": Table(
        "docs/results/relaxing.md",
        "benchmarks/relaxation/internal_coordinates.py flexible --number 12 --fmax 1e-3 "
        "--methods relaxion,pyberny,Sella",
    ),
    "dft": Table("README.md, benchmarks/dft", "benchmarks/dft/run.py", "dft/results/*.json"),
    "two-levels": Table(
        "README.md, docs/tutorials/two-levels.md",
        "benchmarks/two_levels/trial.py --mp20 MP20",
        "two_levels/results/*.json",
    ),
    "learning": Table(
        "README.md, docs/results/learning.md",
        "benchmarks/atoms/learning.py --runs RUNS/learning",
        "atoms/results/learning/*.json",
    ),
    "tuning": Table(
        "docs/results/learning.md",
        "benchmarks/atoms/tuning_guide.py --runs RUNS/tuning",
        "atoms/results/learning/tuning-guide.json",
    ),
    "search": Table(
        "README.md, docs/results/learning.md",
        "benchmarks/search/trial.py unseen basin@0.2 bandit gaussian critic:shipped --folder RUNS/search",
    ),
    "pendulum": Table("docs/results/learning.md", "benchmarks/control/pendulum.py"),
    "half-cheetah": Table(
        "docs/results/learning.md", "benchmarks/control/half_cheetah.py", "control/half_cheetah_results/*/result.json"
    ),
    "torchsim": Table("benchmarks/torchsim", "benchmarks/torchsim/run.py --number 8", "torchsim/results/*.json"),
    "from-use": Table(
        "docs/learning.md", "benchmarks/memory/row.py perovskites --work RUNS/memory", "memory/results/*"
    ),
    "speed": Table("docs/results/relaxing.md", "benchmarks/speed/relax_batch.py --number 1000"),
    "potentials": Table("benchmarks/speed", "benchmarks/speed/potentials.py"),
    "updates": Table("benchmarks/speed", "benchmarks/speed/updates.py --rounds 100 --check"),
}


def hours(table: Table) -> float | None:
    """Of the results in the repository; None where no time is in them."""
    found = [json.loads(file.read_text()) for file in sorted(HERE.glob(table.results))] if table.results else []
    seconds = [second for content in found for second in _seconds(content)]
    return sum(seconds) / 3600 if seconds else None


def _seconds(content: Any) -> Iterator[float]:
    """Of every record below, the outermost that has a time."""
    if isinstance(content, list):
        for one in content:
            yield from _seconds(one)
    elif isinstance(content, dict):
        own = [content[name] for name in SECONDS if isinstance(content.get(name), int | float)]
        if own:
            yield own[0]
            return
        for one in content.values():
            yield from _seconds(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="RUNS", help="folder for what trainings leave")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--mp20", type=Path, help="crystals of MP-20, extended XYZ")
    options = parser.parse_args()
    for name in options.only:
        table = TABLES[name]
        known = hours(table)
        time = "    –" if known is None else f"{known:5.1f}"
        print(f"{name:12s} {time} h  {table.page:40s} python {table.command}", flush=True)
        if options.run is None:
            continue
        if "MP20" in table.command and options.mp20 is None:
            print(f"{name}: needs --mp20 FILE", flush=True)
            continue
        command = table.command.replace("RUNS", str(options.run)).replace("MP20", str(options.mp20))
        subprocess.run([sys.executable, *shlex.split(command)], check=True, cwd=HERE.parent)


if __name__ == "__main__":
    main()
