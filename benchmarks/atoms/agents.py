"""Agents × policies on structures held out, beside ASE's optimizers from the same starts.

    python benchmarks/atoms/agents.py --runs FOLDER [--only al-fe] [--policy light] [--agent td3] [--seed 0] [--table]

Trains every agent with each policy on Al–Fe and on EMT metals, short runs of the shipped recipes (`SHORT`), and prints
the tables of README.md. The metric policy is taught on Al–Fe only, by lessons alone (`LESSONS`). Finished runs are not
run again, interrupted ones go on: stop and start it as you like. `--table` trains nothing and shows what is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from relaxion.files import write_json
from relaxion.training.loop import train
from relaxion.training.recipe import find, settings_from_recipe
from relaxion.training.relax_settings import RelaxRunSettings
from relaxion.training.relax_task import relax_task

SETS = {"al-fe": "Al–Fe, 2–20 atoms", "emt-metals": "EMT metals, 2–16 atoms"}
AGENTS = ("td3", "sac", "d4pg", "ddpg")
POLICIES = {"light": "light", "metric": "metric", "tensor_field": "e3nn"}  # the quick ones first
CLASSICAL = ("BFGS", "BFGSLineSearch", "FIRE")
STARTS = 64
SHORT = {  # what differs from the recipes: a fraction of their steps
    "emt-metals": {
        "steps": 4_000,
        "n_structures": 32,
        "updates_per_round": 8,
        "batch_size": 16,
        "warmup_steps": 500,
        "expert_steps": 2_500,
        "replay_capacity": 8_000,
        "assessment_interval_steps": 2_000,
        "assessment_starts": STARTS,
        "checkpoint_interval_steps": 500,
    },
    "al-fe": {  # relaxations are four times as long: fewer side by side, so that enough of them reach their end
        "steps": 6_000,
        "n_structures": 16,
        "updates_per_round": 5,
        "batch_size": 24,
        "warmup_steps": 600,
        "expert_share": 0.8,
        "expert_steps": 4_000,
        "imitation_weight": 2.0,
        "replay_capacity": 8_000,
        "assessment_interval_steps": 3_000,
        "assessment_starts": STARTS,
        "checkpoint_interval_steps": 500,
    },
}
LESSONS = {
    "al-fe": {
        "policy": "metric",
        "max_displacement_angstrom": 0.3,
        "expert_share": 0.0,
        "imitation_weight": 0.0,
        "lesson_updates": 400,
        "steps": 400,
        "lesson_force_calls": 100,
    }
}


def settings_of(name: str, agent: str, policy: str, seed: int) -> RelaxRunSettings:
    kind = LESSONS[name] if agent == "lessons" else {"backbone": policy}
    chosen = "td3" if agent == "lessons" else agent  # which takes no step there
    settings = settings_from_recipe(find(name), chosen, {**SHORT[name], **kind, "seed": seed})
    assert isinstance(settings, RelaxRunSettings)
    return settings


def trained(name: str, agent: str, policy: str, seed: int, runs: Path) -> None:
    """Go through this run, or what is left of it."""
    out = runs / f"{name}-{agent}-{policy}-{seed}"
    if (out / "result.json").exists():
        return
    begin, resume = time.process_time(), (out / "checkpoint.safetensors").exists()
    train(settings_of(name, agent, policy, seed), out, resume=resume)
    print(f"{out.name}: {time.process_time() - begin:.0f} CPU-seconds", flush=True)


def learners(name: str, policy: str) -> tuple[str, ...]:
    """Who learns such a policy."""
    if policy == "metric":
        return ("lessons",) if name in LESSONS else ()
    return AGENTS


def classical(name: str, runs: Path) -> dict[str, dict[str, Any]]:
    """ASE's optimizers from the starts that every agent is assessed on."""
    file = runs / f"{name}-classical.json"
    if not file.exists():
        assessor = relax_task(settings_of(name, "td3", "light", 0)).assessor()
        write_json(file, {kind: assessor.measure(kind).as_plain() for kind in CLASSICAL})
    return json.loads(file.read_text())


def show(name: str, runs: Path, seed: int) -> None:
    rows = [
        (kind, "–", statistics.mean(row["force_calls"]), statistics.median(row["force_calls"]), row["failures"])
        for kind, row in classical(name, runs).items()
    ]
    for policy, word in POLICIES.items():
        for agent in learners(name, policy):
            file = runs / f"{name}-{agent}-{policy}-{seed}" / "result.json"
            if file.exists():
                result = json.loads(file.read_text())
                failures = round((1 - result["final_success_rate"]) * STARTS)
                calls = result["final_force_calls_mean"], result["final_force_calls_median"]
                rows.append((f"**{agent.upper()}**" if agent in AGENTS else "lessons alone", word, *calls, failures))
    print(f"\n### {SETS[name]}\n\n| | policy | mean | median | failures of {STARTS} |\n|---|---|---|---|---|")
    for label, word, mean, median, failures in sorted(rows, key=lambda row: row[2]):
        print(f"| {label} | {word} | {mean:.1f} | {median:.0f} | {failures} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", choices=list(SETS), help="one set of structures")
    parser.add_argument("--policy", choices=list(POLICIES), help="train with this one only")
    parser.add_argument("--agent", choices=AGENTS, help="train this one only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    names = [options.only] if options.only else list(SETS)
    if not options.table:
        for policy in [options.policy] if options.policy else POLICIES:
            for name in names:
                for agent in learners(name, policy):
                    if options.agent in (None, agent):
                        trained(name, agent, policy, options.seed, options.runs)
    for name in names:
        show(name, options.runs, options.seed)


if __name__ == "__main__":
    main()
