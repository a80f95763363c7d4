"""What to turn first: each setting that is advised for learning on atoms, switched on and off, three seeds.

    python benchmarks/atoms/tuning_guide.py --runs FOLDER [--system alfe|emt|al-fe] [--row NAME ...] [--seeds 20 21 22]
    python benchmarks/atoms/tuning_guide.py --table     # what was found, as Markdown; trains nothing

Short runs beside the base of their system, which all else equals. Assessments are on validation starts, so that
nothing is chosen on starts of the results. Resumable; each run is kept as one entry of
results/learning/tuning-guide.json: force calls of the assessed policy by environment steps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaxion.files import json_of, write_json
from relaxion.settings import assigned
from relaxion.train.runs.loop import train
from relaxion.train.runs.recipe import find, settings_from_recipe

KEPT = Path(__file__).parent / "results" / "learning" / "tuning-guide.json"
SEEDS = (20, 21, 22)  # no other run has them
ENVIRONMENT = '["log_largest_force", "log_force_ratio", "alignment", "log_curvature"]'


@dataclass(frozen=True)
class System:
    """What is learned, for how long, and what the classical optimizer needs on its validation starts."""

    title: str
    recipe: str
    base: Mapping[str, str]
    steps: int
    interval: int

    def command(self, changes: Mapping[str, str], seed: int) -> str:
        values = {**self.base, **changes}
        agent = values.pop("agent", "td3")
        words = [f"--set {shlex.quote(f'{name}={value}')}" for name, value in values.items()]
        return " ".join(
            [f"relaxion train {self.recipe} --agent {agent} --seed {seed} --steps {self.steps}",
             f"--set assess_on=validation --set assessment_interval_steps={self.interval}", *words]
        )  # fmt: skip


SYSTEMS = {
    "alfe": System("cubic AlFe, direct policy", "alfe-cubic", {"backbone": "light"}, 4_000, 500),
    "emt": System(
        "EMT metals, direct policy", "emt-metals", {"expert_share": "0", "imitation_weight": "0"}, 10_000, 1_250
    ),
    "al-fe": System("Al–Fe, stiffness policy", "al-fe-stiffness", {}, 7_500, 1_250),
}
EXPERT = {"expert_share": "0.5", "expert_steps": "2000"}
ROWS: dict[str, dict[str, str]] = {
    "base": {},
    "environment information, gate and tail": {"environment_information": ENVIRONMENT},
    "no deviation penalty": {"deviation_penalty_per_angstrom2": "0"},
    "deviation penalty of 10": {"deviation_penalty_per_angstrom2": "10"},
    "back-off costs nothing": {"back_off": "0"},
    "replay of 1 000": {"replay_capacity": "1000", "warmup_steps": "512"},
    "replay of 5 000": {"replay_capacity": "5000"},
    "replay of 20 000": {"replay_capacity": "20000"},
    "replay of 100 000": {"replay_capacity": "100000"},
    "expert that fades": EXPERT,
    "expert that fades, imitation": {**EXPERT, "imitation_weight": "1"},
    "expert that leaves at once": {**EXPERT, "expert_leaves": "at once"},
    "five critics": {"n_critics": "5"},
    "batches of 128": {"batch_size": "128"},
    "horizon of 0.9": {"discount_factor": "0.9"},
    "SAC": {"agent": "sac"},
    "SAC, action penalty of 0.01": {"agent": "sac", "action_penalty": "0.01"},
}
SWITCHED_OFF = {"environment information, gate and tail": "emt"}  # the base has it
SKIPPED = {("alfe", "replay of 5 000"), ("emt", "replay of 20 000"), ("al-fe", "replay of 20 000")}  # are the base


def changes_of(system: str, row: str) -> dict[str, str]:
    changes = dict(ROWS[row])
    if SWITCHED_OFF.get(row) == system:
        changes = {"environment_information": "[]"}
    if (price := changes.pop("back_off", None)) is not None:
        own = "log_gap_decrease:1+log_force_decrease:1" if system == "al-fe" else "log_force_decrease:1"
        changes["reward"] = f"{own}+back_off:{price}"
    return changes


class Leaving:
    """A schedule that stays at its first value and then is 0, for the expert that leaves at once."""

    def __init__(self, first: float, steps: int) -> None:
        self.first = first
        self.steps = steps

    def __call__(self, step: int) -> float:
        return self.first if step < self.steps else 0.0


def run(system: str, row: str, seed: int, runs: Path) -> dict[str, Any]:
    """Train, or go on; what came of it."""
    own = SYSTEMS[system]
    values = {**own.base, **changes_of(system, row)}
    leaves = values.pop("expert_leaves", None)
    agent = values.pop("agent", "td3")
    given = assigned([f"{name}={value}" for name, value in values.items()])
    given |= {"seed": seed, "steps": own.steps, "assess_on": "validation", "assessment_interval_steps": own.interval}
    settings = settings_from_recipe(find(own.recipe), agent, given)

    def make(settings: Any) -> Any:
        trainer = settings.trainer()
        if leaves is not None:  # half of its time, so that as many steps are shown as by one that fades
            trainer.collector.expert_share = Leaving(settings.atoms.expert_share, settings.atoms.expert_steps // 2)
        return trainer

    out = runs / f"{system}-{row}-{seed}".replace(" ", "_").replace(",", "")
    before = json_of(out / "cpu.json")["seconds"] if (out / "cpu.json").exists() else 0.0
    began = time.process_time()
    resume = (out / "checkpoint.safetensors").exists()
    if not (out / "result.json").exists():
        train(settings, out, resume=resume, make=make)
    seconds = before + time.process_time() - began
    write_json(out / "cpu.json", {"seconds": seconds})
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    curve = [[line["time/total_timesteps"], line["eval/force_calls_mean"]] for line in lines
             if "eval/force_calls_mean" in line]  # fmt: skip
    command = own.command({**changes_of(system, row)}, seed)
    return {"system": system, "row": row, "seed": seed, "command": command, "cpu_seconds": round(seconds),
            "curve": curve}  # fmt: skip


def kept() -> list[dict[str, Any]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def cell(found: list[dict[str, Any]]) -> str:
    """Best of each seed, and how much worse the worst later assessment is."""
    best, later = [], []
    for one in sorted(found, key=lambda one: one["seed"]):
        calls = np.array(one["curve"])[:, 1]
        best.append(calls.min())
        later.append(calls[calls.argmin() :].max() / calls.min())
    return f"{np.mean(best):.1f} ({', '.join(f'{calls:.1f}' for calls in best)}), {max(later):.2f}"


def table() -> str:
    found = kept()
    lines = ["| turned | " + " | ".join(own.title for own in SYSTEMS.values()) + " |", "|---|---|---|---|"]
    for row in ROWS:
        cells = []
        for system in SYSTEMS:
            own = [one for one in found if (one["system"], one["row"]) == (system, row)]
            cells.append(cell(own) if own else "")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    parser.add_argument("--system", choices=list(SYSTEMS), nargs="+", default=list(SYSTEMS))
    parser.add_argument("--row", choices=list(ROWS), nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    if options.runs is None:
        parser.error("--runs FOLDER, or --table")
    torch.set_num_threads(1)
    for seed in options.seeds:
        for row in options.row:
            for system in options.system:
                done = kept()
                key = (system, row, seed)
                if (system, row) in SKIPPED or any((one["system"], one["row"], one["seed"]) == key for one in done):
                    continue
                found = run(*key, options.runs)
                write_json(KEPT, [*kept(), found])  # read again: another process may have added to it
                print(*key, [round(calls, 1) for _, calls in found["curve"]], found["cpu_seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
