"""Pendulum-v1, every agent, several seeds, judged by the worst seed.

    python benchmarks/control/pendulum.py                       # all of it, two runs at a time
    python benchmarks/control/pendulum.py --agents sac --seeds 0 1 --set batch_size=64

Runs that have a result are not run again, runs that were cut are resumed, so the script may be killed at will.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

AGENTS = ("sac", "d4pg", "td3", "ddpg")
LIMIT = -200.0  # every seed must be above


def main() -> None:
    options = arguments()
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {
            agent: [pool.submit(result_of, agent, seed, options) for seed in options.seeds] for agent in options.agents
        }
        results = {agent: [job.result() for job in waiting] for agent, waiting in jobs.items()}
    print("\n".join(table(results)))
    sys.exit(any(run["final_return_mean"] <= LIMIT for runs in results.values() for run in runs))


def result_of(agent: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Of an earlier run, or of one made now."""
    out = options.out / f"{agent}-{seed}"
    if not (out / "result.json").exists():
        command = ["nice", "relaxion", "train", "pendulum", "--agent", agent, "--seed", str(seed), "--out", str(out)]
        command += [word for assignment in options.set for word in ("--set", assignment)]
        command += ["--resume"] if (out / "checkpoint.safetensors").exists() else []
        subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads((out / "result.json").read_text())


def table(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "| agent | steps | mean return of each seed | mean | worst seed | worst single start | seconds per run |"
    yield "|---|---|---|---|---|---|---|"
    for agent, runs in results.items():
        returns = [run["final_return_mean"] for run in runs]
        worst_start = min(run["final_return_worst"] for run in runs)
        seconds = mean(run["wall_time_seconds"] for run in runs)
        each = ", ".join(f"{value:.0f}" for value in returns)
        numbers = f"{each} | {mean(returns):.0f} | {min(returns):.0f} | {worst_start:.0f} | {seconds:.0f}"
        yield f"| {agent.upper()} | {runs[0]['steps']:,} | {numbers} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", default=AGENTS, choices=AGENTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-pendulum"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
