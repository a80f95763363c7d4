"""What to turn first: each setting that is advised for learning on atoms, switched on and off, three seeds.

    python benchmarks/atoms/tuning_guide.py --runs FOLDER [--system alfe|emt|al-fe] [--row NAME ...] [--seeds 20 21 22]
    python tools/fill_pages.py                          # writes the table into docs/training.md

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

import torch

from learning import with_baselines
from relaxion.files import json_of, write_json
from relaxion.settings import assigned
from relaxion.train.judge.assessment import CORE
from relaxion.train.runs.loop import train
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import relax_task
from relaxion.train.tasks.settings import find, settings_from_recipe

KEPT = Path(__file__).parent / "results" / "learning" / "tuning-guide.json"
CLASSICAL = KEPT.with_stem("tuning-guide-classical")
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
             f"--set assess_on=validation --set assessment_interval_steps={self.interval}",
             "--set log_interval_steps=1000", *words]
        )  # fmt: skip


SYSTEMS = {
    "alfe": System("cubic AlFe, direct policy", "alfe-cubic", {"backbone": "light"}, 3_000, 750),
    "emt": System(
        "EMT metals, direct policy", "emt-metals", {"expert_share": "0", "imitation_weight": "0"}, 7_500, 2_500
    ),
    "al-fe": System("Al–Fe, stiffness policy", "al-fe-stiffness", {}, 7_500, 2_500),
}


@dataclass(frozen=True)
class Row:
    """What is turned, and where: elsewhere it is the base, has no meaning or was too dear."""

    changes: Mapping[str, str]
    systems: tuple[str, ...] = tuple(SYSTEMS)


EXPERT = {"expert_share": "0.5"}  # for a quarter of the steps
PAPER = {  # of TD3; critics of al-fe-stiffness and emt-metals learn three times as fast
    "policy_delay": "2", "target_update_rate": "0.005", "target_noise": "0.2", "target_noise_clip": "0.5",
    "critic_learning_rate": "1e-3", "policy_learning_rate": "1e-3", "discount_factor": "0.99", "n_steps": "1",
}  # fmt: skip
GAP = "log_gap_decrease:1+log_force_decrease:1"  # the reward of al-fe-stiffness
ROWS = {
    "base": Row({}),
    "rewarded for forces only": Row({"reward": "log_force_decrease:1"}, ("al-fe",)),
    "rewarded for energy too": Row({"reward": GAP}, ("alfe", "emt")),
    "no discounted future": Row({"discount_factor": "0"}, ("alfe", "emt")),
    "discount 0.9, three steps of reward": Row({"discount_factor": "0.9", "n_steps": "3"}),
    "TD3 as in its paper": Row(PAPER),
    "policy learns from the first update": Row({"critic_updates_before": "0"}, ("al-fe",)),
    "policy waits 500 updates": Row({"critic_updates_before": "500"}, ("alfe", "emt")),
    "moves of varied length": Row({"exploration_length_noise": "0.5"}, ("alfe", "emt")),
    "no moves of varied length": Row({"exploration_length_noise": "0"}, ("al-fe",)),
    "replay of 1 000": Row({"replay_capacity": "1000", "warmup_steps": "512"}),
    "replay of 5 000": Row({"replay_capacity": "5000"}, ("al-fe",)),
    "information and gate": Row({"environment_information": ENVIRONMENT}),
    "expert that fades": Row(EXPERT),
    "expert that leaves at once": Row({**EXPERT, "expert_leaves": "at once"}),
    "expert that fades, imitation": Row({**EXPERT, "imitation_weight": "1"}),
    "no deviation penalty": Row({"deviation_penalty_per_angstrom2": "0"}),
    "back-off costs nothing": Row({"back_off": "0"}),
    "SAC": Row({"agent": "sac"}, ("alfe", "emt")),  # on Al–Fe: learning.py
    "SAC, action penalty of 0.01": Row({"agent": "sac", "action_penalty": "0.01"}, ("alfe", "emt")),
    "five critics": Row({"n_critics": "5"}, ("alfe", "al-fe")),
    "batches of 128": Row({"batch_size": "128"}, ("alfe",)),
    "-1 per call, discount 0.99": Row({"reward": "step:1", "discount_factor": "0.99"}, ("alfe", "al-fe")),
}


def changes_of(system: str, row: str) -> dict[str, str]:
    changes = dict(ROWS[row].changes)
    if (price := changes.pop("back_off", None)) is not None:
        own = GAP if system == "al-fe" else "log_force_decrease:1"
        changes["reward"] = f"{own}+back_off:{price}"
    if "expert_share" in changes:
        changes["expert_steps"] = str(SYSTEMS[system].steps // 4)
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
    given["log_interval_steps"] = 1_000
    settings = settings_from_recipe(find(own.recipe), agent, given)
    measured = runs / system / "baselines.json"

    def make(settings: Any) -> Any:
        trainer = with_baselines(settings.trainer(), measured)
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


def equals_base(one: dict[str, Any], done: list[dict[str, Any]]) -> bool:
    """Whether what was turned never came to act: other seeds need not be run."""
    own = (one["system"], "base", one["seed"])
    curves = [other["curve"] for other in done if (other["system"], other["row"], other["seed"]) == own]
    return one["row"] != "base" and curves == [one["curve"]]


def classical(system: str) -> None:
    """Mean force calls of the classical optimizer from the validation starts, once."""
    known = json_of(CLASSICAL) if CLASSICAL.exists() else {}
    if system not in known:
        settings = settings_from_recipe(find(SYSTEMS[system].recipe), "td3", {"assess_on": "validation"})
        assert isinstance(settings, RelaxRunSettings)
        write_json(CLASSICAL, known | {system: relax_task(settings).assessor().measure(CORE).mean})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--system", choices=list(SYSTEMS), nargs="+", default=list(SYSTEMS))
    parser.add_argument("--row", choices=list(ROWS), nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for system in options.system:
        classical(system)
    for seed in options.seeds:
        for row in options.row:
            for system in options.system:
                done = kept()
                key = (system, row, seed)
                if system not in ROWS[row].systems or any(
                    (one["system"], one["row"], one["seed"]) == key or equals_base(one, done)
                    for one in done
                    if (one["system"], one["row"]) == key[:2]
                ):
                    continue
                found = run(*key, options.runs)
                write_json(KEPT, [*kept(), found])  # read again: another process may have added to it
                print(*key, [round(calls, 1) for _, calls in found["curve"]], found["cpu_seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
