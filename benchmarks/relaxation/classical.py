"""Force calls of ours beside ASE's optimizers on every set of `relaxion bench`, as Markdown.

    export OMP_NUM_THREADS=1
    python benchmarks/relaxation/classical.py [--sets emt-bulk,lj38] [--policy none] [--with BFGS] [--number 20]
        [--out DIR] [--check]

The same as `relaxion bench SET` for one set after the other, with one more row: the core without its springs, a plain
curvature-scaled L-BFGS. `--out` keeps JSON and performance profile of each set. `--check` exits with 1 unless the bar
of the first set holds and nothing of ours failed where a classical optimizer succeeded.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from profile_picture import draw_profile

from relaxion import Relaxer
from relaxion.apps.cli.bench import HEADINGS, BenchRequest, as_plain, cells, find_starts, measure, sentences
from relaxion.apps.comparison import SETS
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.trust_region import TrustRegionSettings
from relaxion.train.data.dataset import FIRST_MEASURING_SEED
from relaxion.train.judge.runs import (
    Contestant,
    classical_contestants,
    our_contestants,
    policy_argument,
)
from relaxion.train.judge.statistics import Circumstances, ContestResult

FMAX = 0.05  # eV/Å
CAP = 500  # force calls
BAR = 0.9  # of the force calls of the best ASE optimizer on the first set


class WithoutSprings(Relaxer):
    """The same core on a plain multiple of 1: what the springs are worth."""

    def __init__(self, atoms):
        super().__init__(atoms, logfile=None, policy=None)
        self._stepper = new_stepper(ClassicalSettings(TrustRegionSettings(largest=self.maxstep), use_springs=False))


PLAIN = Contestant("core without springs", WithoutSprings, classical=False)


def run_set(name: str, options: argparse.Namespace) -> ContestResult:
    starts = find_starts(BenchRequest(name, number=options.number, seed=FIRST_MEASURING_SEED))
    others = classical_contestants(options.others, without_gpmin=starts.without_gpmin, free_cell=starts.free_cell)
    told = Circumstances(
        set_name=name,
        title=starts.title,
        calculator=starts.calculator,
        policy=options.policy,
        fmax=options.fmax,
        cap=CAP,
        free_cell=starts.free_cell,
        seed=FIRST_MEASURING_SEED,
        perturb=None,
        command=shlex.join(["python", *sys.argv]),
    )
    contestants = [*our_contestants(policy_argument(options.policy)), PLAIN, *others]
    return measure(starts, contestants, told, quiet=False)


def as_markdown(result: ContestResult) -> str:
    """A heading, the same table, the sentences."""
    told = result.circumstances
    lines = [f"### `{told.set_name}`: {told.title}", "", f"| optimizer | {' | '.join(HEADINGS)} |"]
    lines.append("|---" * (len(HEADINGS) + 1) + "|")
    lines += [f"| {name} | {' | '.join(cells(result, name))} |" for name in result.by_calls()]
    return "\n".join([*lines, "", *sentences(result)])


def keep(result: ContestResult, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = result.circumstances.set_name
    (folder / f"{name}.json").write_text(json.dumps(as_plain(result), indent=1, ensure_ascii=False) + "\n")
    draw_profile(result, folder / f"{name}.png")


def avoidable_failures(result: ContestResult) -> int:
    """Starts that a classical optimizer relaxed and ours did not."""
    return sum(
        not ours.converged and any(result.scores[name][place].converged for name in result.classical)
        for place, ours in enumerate(result.scores[result.ours])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS), help="which, with commas between them")
    parser.add_argument("--policy", default="none", help="of ours; none: the classical core alone")
    parser.add_argument("--with", dest="others", default="", help="ASE's optimizers beside ours")
    parser.add_argument("--number", type=int, help="structures per set")
    parser.add_argument("--fmax", type=float, default=FMAX, help="eV/Å")
    parser.add_argument("--out", type=Path, help="folder for JSON and pictures")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if the first ratio is above {BAR}")
    options = parser.parse_args()
    results = []
    for name in options.sets.split(","):
        results.append(run_set(name, options))
        print(f"\n{as_markdown(results[-1])}", flush=True)
        if options.out:
            keep(results[-1], options.out)
    first = results[0].to_best
    too_many = first is not None and first.ratio.value > BAR
    return int(options.check and (too_many or any(avoidable_failures(result) for result in results)))


if __name__ == "__main__":
    sys.exit(main())
