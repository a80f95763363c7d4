"""Agents × policies on structures held apart, beside ASE's optimizers from the same starts.

    python benchmarks/atoms/agents.py --runs FOLDER [--only al-fe] [--backbone light] [--seed 0] [--table]

Trains every agent with either backbone on Al–Fe and on EMT metals, short runs of the shipped recipes (`SHORT`), and
prints the tables of README.md. Finished runs are not run again, interrupted ones go on: stop and start it as you like.
`--table` trains nothing and shows what is there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from relaxion.physics.registry import potential
from relaxion.training import atom_assessment
from relaxion.training.atom_assessment import AtomAssessor
from relaxion.training.atom_task import atom_task
from relaxion.training.baselines import Calls, ase_calls
from relaxion.training.recipe import find, settings_from_recipe
from relaxion.training.run import train
from relaxion.training.run_settings import AtomRunSettings

SETS = {"al-fe": "Al–Fe, 2–20 atoms", "emt-metals": "EMT metals, 2–16 atoms"}
AGENTS = ("td3", "sac", "d4pg", "ddpg")
BACKBONES = {"light": "light", "tensor_field": "e3nn"}
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
        "expert_steps": 4_000,
        "replay_capacity": 8_000,
        "assessment_interval_steps": 3_000,
        "assessment_starts": STARTS,
        "checkpoint_interval_steps": 500,
    },
}


def settings_of(name: str, agent: str, backbone: str, seed: int) -> AtomRunSettings:
    settings = settings_from_recipe(find(name), agent, {**SHORT[name], "backbone": backbone, "seed": seed})
    assert isinstance(settings, AtomRunSettings)
    return settings


def trained(name: str, agent: str, backbone: str, seed: int, runs: Path) -> None:
    """Go through this run, or what is left of it."""
    out = runs / f"{name}-{agent}-{backbone}-{seed}"
    if (out / "result.json").exists():
        return
    kept = classical(name, runs)
    atom_assessment.ase_calls = lambda kind, *_: kept[kind]  # the starts are the same in all runs: ASE goes once
    begin = time.process_time()
    train(settings_of(name, agent, backbone, seed), out, resume=(out / "checkpoint.safetensors").exists())
    print(f"{out.name}: {time.process_time() - begin:.0f} CPU-seconds", flush=True)


def classical(name: str, runs: Path) -> dict[str, Calls]:
    """ASE's optimizers from the starts that every agent is assessed on."""
    file = runs / f"{name}-classical.json"
    if not file.exists():
        settings = settings_of(name, "td3", "light", 0)
        starts = AtomAssessor(atom_task(settings), settings.training.assessment_starts).starts.structures
        world, engine = settings.environment, potential(settings.atoms.potential)
        fmax, cap = world.force_tolerance_ev_per_angstrom, world.max_force_calls
        found = {kind: ase_calls(kind, starts, engine, fmax, cap) for kind in CLASSICAL}
        rows = {kind: {"force_calls": calls.force_calls, "failures": calls.failures} for kind, calls in found.items()}
        file.write_text(json.dumps(rows))
    kept = json.loads(file.read_text())
    return {kind: Calls(tuple(row["force_calls"]), row["failures"]) for kind, row in kept.items()}


def show(name: str, runs: Path, seed: int) -> None:
    rows = [(kind, calls.mean, calls.median, calls.failures) for kind, calls in classical(name, runs).items()]
    for backbone, word in BACKBONES.items():
        for agent in AGENTS:
            file = runs / f"{name}-{agent}-{backbone}-{seed}" / "result.json"
            if file.exists():
                result = json.loads(file.read_text())
                failures = round((1 - result["final_success_rate"]) * STARTS)
                calls = result["final_force_calls_mean"], result["final_force_calls_median"]
                rows.append((f"**{agent.upper()}, {word}**", *calls, failures))
    print(f"\n### {SETS[name]}\n\n| | mean | median | failures of {STARTS} |\n|---|---|---|---|")
    for label, mean, median, failures in sorted(rows, key=lambda row: row[1]):
        print(f"| {label} | {mean:.1f} | {median:.0f} | {failures} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", choices=list(SETS), help="one set of structures")
    parser.add_argument("--backbone", choices=list(BACKBONES), help="train with this one only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    names = [options.only] if options.only else list(SETS)
    if not options.table:
        for backbone in [options.backbone] if options.backbone else BACKBONES:  # the quick ones first
            for name in names:
                for agent in AGENTS:
                    trained(name, agent, backbone, options.seed, options.runs)
    for name in names:
        show(name, options.runs, options.seed)


if __name__ == "__main__":
    main()
