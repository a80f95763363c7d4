"""What each part is worth: kind of policy, lessons, reinforcement, agent, secants, gate, collective coordinates.

    python benchmarks/relaxation/ablation.py --weights FOLDER --only imitation     # one group of rows, three seeds
    python benchmarks/relaxation/ablation.py --weights FOLDER                      # all that is missing
    python benchmarks/relaxation/ablation.py --table

Small networks, short runs (sizes: `COMMON` and the rows below), EMT, near and far starts mixed, 4–12 atoms, fixed
cell, to 0.05 eV/Å. Trained on structures of seed 0; `validation` starts are those of seed 20, on which settings were
chosen, `final` ones those of seed 9000. Rows that are there are not made again: stop and start it as you like. Results
are written to `results/ablation`, weights of finished runs to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaxion.bench.assessment import CORE, Assessor, under_guard
from relaxion.optimize.choice import new_stepper
from relaxion.optimize.guard import Gate, Knobs, hand_made_gate
from relaxion.optimize.learned import LearnedMetrics
from relaxion.training.loop import read_weights, write_agent
from relaxion.training.relax import RelaxTrainer
from relaxion.training.relax_settings import RelaxRunSettings
from relaxion.training.relax_task import RelaxTask, relax_task

RESULTS = Path(__file__).parent / "results" / "ablation"
SEEDS = (0, 1, 2)
SIDES = {"validation": "validation", "final": "held_apart"}
STARTS, FMAX, CAP = 24, 0.05, 100
METALS = "Al-Cu-Ag-Au-Ni-Pd-Pt"

COMMON: dict[str, Any] = {
    "task": "relax",
    "potential": "emt",
    "structures": f"alloys:{METALS}:4-12 + packings:{METALS}:4-12",  # half near, half far
    "n_pooled": 400,
    "perturbation": "rattle:0.1",
    "held_apart": "seed",
    "force_tolerance_ev_per_angstrom": FMAX,
    "max_force_calls": CAP,
    "max_displacement_angstrom": 0.4,
    "reward": "step:0.3+log_force_decrease:1",
    "discount_factor": 0.95,
    "channels": 16,
    "cutoff_angstrom": 4.0,
    "n_structures": 32,
    "batch_size": 16,
    "warmup_steps": 128,
    "updates_per_round": 8,
    "replay_capacity": 6_000,
    "assessment_starts": STARTS,
}
DIRECT = {"steps": 1_600}
METRIC = {
    "policy": "metric",
    "n_hidden": 24,
    "lessons_per_update": 32,
    "lesson_starts": 32,
    "lesson_gatherings_before": 4,
    "lesson_updates_per_gathering": 30,
}
LESSONS = 240  # updates
REINFORCED = 640  # environment steps
INFORMATION = ["log_largest_force", "log_force_ratio", "alignment", "log_curvature"]
AGENTS: dict[str, dict[str, Any]] = {
    "td3": {"critic_learning_rate": 1e-3},
    "ddpg": {"critic_learning_rate": 1e-3, "target_update_rate": 0.005},
    "d4pg": {
        "critic_learning_rate": 3e-3,
        "target_update_rate": 0.02,
        "n_steps": 3,
        "exploration_noise": 0.1,
        "n_bins": 29,
        "lowest_value": -5.0,
        "highest_value": 3.5,
    },
    "sac": {"critic_learning_rate": 1e-3, "entropy_weight_learning_rate": 3e-4, "initial_entropy_weight": 0.005},
}
EXPERT = {"expert_share": 0.5, "expert_steps": 1_100, "imitation_weight": 1.0}
EXPERT_ONLY = {"expert_share": 0.5, "expert_share_final": 0.5, "expert_steps": 10**9, "imitation_weight": 1e4}
ANCHOR = {"critic_updates_before": 48, "lesson_weight": 1.0, "lesson_weight_final": 0.3, "expert_steps": REINFORCED}
OFTEN, SELDOM = {"policy_learning_rate": 1e-3}, {"policy_learning_rate": 3e-4}  # from nothing; after lessons


@dataclass(frozen=True)
class Row:
    """A run for each seed, and how its policy relaxes."""

    group: str
    words: str
    agent: str = "td3"
    changes: dict[str, Any] = field(default_factory=dict)
    begins_with: str | None = None  # the row whose weights it starts from
    gate: Gate | None = None  # the metric relaxes under guard with this gate; None: the policy alone
    trains: bool = True  # otherwise the weights of `begins_with`, or fresh ones, are judged

    def settings(self, seed: int, side: str = "validation") -> RelaxRunSettings:
        values = {**COMMON, **AGENTS[self.agent], **self.changes, "agent": self.agent, "seed": seed, "assess_on": side}
        read = RelaxRunSettings.read(values)
        assert isinstance(read, RelaxRunSettings)
        return read


def no_secants(observation: Any) -> Knobs:
    """Gate off, and the metric as it is."""
    del observation
    return Knobs(secant_weight=0.0)


def gate_off(observation: Any) -> Knobs:
    """Gate off: two secants correct the metric, the trust radius is the core's."""
    del observation
    return Knobs()


def rows() -> dict[str, Row]:
    taught = METRIC | {"lesson_updates": LESSONS, "steps": LESSONS}
    alone = METRIC | OFTEN | {"steps": REINFORCED}
    both = METRIC | SELDOM | ANCHOR | {"steps": REINFORCED}
    plain = {"damped": False}
    found = {
        "direct-scratch": Row("direct", "direct, untrained", changes=DIRECT, trains=False),
        "direct-imitation": Row("direct", "direct, the expert's steps only", changes=DIRECT | OFTEN | EXPERT_ONLY),
        "direct-rl": Row("direct", "direct, TD3 only", changes=DIRECT | OFTEN),
        "direct-both": Row("direct", "direct, expert and TD3", changes=DIRECT | OFTEN | EXPERT),
        "metric-scratch": Row("imitation", "metric, untrained", changes=METRIC, trains=False),
        "metric-imitation": Row("imitation", "metric, lessons only", changes=taught),
        "metric-scratch-undamped": Row(
            "imitation", "metric, untrained, without secant", changes=METRIC | plain, trains=False
        ),
        "metric-imitation-undamped": Row(
            "imitation",
            "metric, lessons only, without secant",
            changes=taught | plain,
            begins_with="metric-imitation",
            trains=False,
        ),
        "metric-no-coordinates": Row(
            "coordinates", "metric, lessons only, no collective coordinates", changes=taught | {"n_coordinates": 0}
        ),
    }
    for agent in AGENTS:
        words = agent.upper()
        found[f"metric-rl-{agent}"] = Row("rl", f"metric, {words} only", agent, alone)
    for agent in AGENTS:
        words = agent.upper()
        found[f"metric-both-{agent}"] = Row(
            "both", f"metric, lessons, then {words} (anchored)", agent, both, "metric-imitation"
        )
    free = both | {"lesson_weight": 0.0, "lesson_weight_final": 0.0}
    found["metric-unanchored"] = Row("anchor", "metric, lessons, then TD3, no anchor", "td3", free, "metric-imitation")
    gate = METRIC | OFTEN | {"steps": REINFORCED, "environment_information": INFORMATION, "reinforced": "gate"}
    found["metric-gate"] = Row("gate", "metric, lessons, then TD3 for its gate only", "td3", gate, "metric-imitation")
    guarded = {
        "no-secants": ("gate off, no secants", no_secants),
        "secants": ("gate off, secants", gate_off),
        "hand": ("hand rule (trust doubled, no secants)", hand_made_gate),
    }
    for name, (words, rule) in guarded.items():
        found[f"guard-{name}"] = Row(
            "guard", f"metric, lessons, under guard: {words}", "td3", taught, "metric-imitation", rule, trains=False
        )
    under = Row("guard", "", "td3", taught, None, hand_made_gate, trains=False)
    found["guard-scratch"] = replace(under, words="metric, untrained, under guard: hand rule", changes=METRIC)
    found["guard-no-coordinates"] = replace(
        under,
        words="metric, lessons, no collective coordinates, under guard: hand rule",
        changes=taught | {"n_coordinates": 0},
        begins_with="metric-no-coordinates",
    )
    found["guard-both-td3"] = replace(
        under, words="metric, lessons, then TD3 (anchored), under guard: hand rule", begins_with="metric-both-td3"
    )
    return found


ORDER = ("imitation", "guard", "both", "rl", "direct", "gate", "coordinates", "anchor")  # dearest last
ROWS = dict(sorted(rows().items(), key=lambda item: ORDER.index(item[1].group)))


class Ablation:
    """All rows, with their weights in one folder and their results in another."""

    def __init__(self, weights: Path) -> None:
        self.weights = weights
        weights.mkdir(parents=True, exist_ok=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        self.task = relax_task(ROWS["direct-rl"].settings(0))  # pools are the same for all rows and seeds

    def row(self, name: str, seed: int) -> None:
        file = RESULTS / f"{name}.json"
        kept = json.loads(file.read_text()) if file.exists() else {"words": ROWS[name].words, "seeds": {}}
        if str(seed) not in kept["seeds"]:
            kept["seeds"][str(seed)] = self.one(name, seed)
            file.write_text(json.dumps(kept) + "\n")

    def one(self, name: str, seed: int) -> dict[str, Any]:
        """Train where the row trains, then relax both sides' starts."""
        row = ROWS[name]
        if row.begins_with is not None and not self._file(row.begins_with, seed).exists():
            self._trained(row.begins_with, seed)
        begin = time.process_time()
        trainer = self._trained(name, seed) if row.trains else self._begun(name, seed)
        seconds = time.process_time() - begin if row.trains else 0.0
        found = {side: self.calls(row, trainer, side) for side in SIDES}
        print(f"{name} {seed}: {seconds:.0f} CPU-s, {_mean(found['validation']):.1f}", flush=True)
        return {**found, "training_force_calls": trainer.force_calls, "training_cpu_seconds": round(seconds, 1)}

    def _file(self, name: str, seed: int) -> Path:
        return self.weights / f"{name}-{seed}.safetensors"

    def _begun(self, name: str, seed: int) -> RelaxTrainer:
        row = ROWS[name]
        settings = row.settings(seed)
        trainer = RelaxTrainer(settings, replace(self.task, settings=settings))
        if row.begins_with is not None:
            trainer.start_from(read_weights(self._file(row.begins_with, seed)))
        return trainer

    def _trained(self, name: str, seed: int) -> RelaxTrainer:
        trainer = self._begun(name, seed)
        while trainer.step < trainer.settings.training.steps:
            trainer.advance()
        write_agent(self._file(name, seed), trainer)
        return trainer

    def calls(self, row: Row, trainer: RelaxTrainer, side: str) -> list[int]:
        """Force calls from each start of a side; failures are charged the cap."""
        task = self.side(side)
        if row.gate is None:
            return task.assessor()(task.following(trainer.act)).force_calls.tolist()
        policy: Any = trainer.agent.policy
        policy.requires_grad_(False)
        metrics, gate = LearnedMetrics(policy.network), row.gate
        relax = under_guard(lambda: new_stepper(metrics=metrics, gate=gate), FMAX, CAP)
        return task.assessor()(relax).force_calls.tolist()

    def side(self, side: str) -> RelaxTask:
        return RelaxTask(ROWS["direct-rl"].settings(0, SIDES[side]), self.task.potential, self.task.pools)

    def classical(self) -> None:
        """The core and ASE's optimizers, which need no seed."""
        file = RESULTS / "classical.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        assessors: dict[str, Assessor] = {side: self.side(side).assessor() for side in SIDES}
        for name in (CORE, "BFGSLineSearch", "BFGS", "FIRE"):
            if name not in kept:
                kept[name] = {side: list(one.measure(name).force_calls) for side, one in assessors.items()}
                file.write_text(json.dumps(kept) + "\n")


def _mean(calls: list[int]) -> float:
    return float(np.mean(calls))


def interval(values: list[float]) -> str:
    """Mean, and 95 % of Student's t over the seeds."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.1f}"
    factor = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}[len(values)]
    return f"{mean:.1f} ± {factor * float(np.std(values, ddof=1)) / math.sqrt(len(values)):.1f}"


def show() -> None:
    """The table of README.md."""
    print("| | seeds | validation | **final** | final, each seed | p95 | failures | training force calls | CPU-s |")
    print("|---|---|---|---|---|---|---|---|---|")
    if (file := RESULTS / "classical.json").exists():
        for name, sides in json.loads(file.read_text()).items():
            final = np.array(sides["final"])
            tail = f"{np.quantile(final, 0.95):.0f} | {100 * np.mean(final >= CAP):.0f} % | – | – |"
            print(f"| {name} | – | {_mean(sides['validation']):.1f} | {final.mean():.1f} | – | {tail}")
    for name, row in ROWS.items():
        if not (file := RESULTS / f"{name}.json").exists():
            continue
        seeds = list(json.loads(file.read_text())["seeds"].values())
        finals = [_mean(seed["final"]) for seed in seeds]
        every = np.concatenate([seed["final"] for seed in seeds])
        cells = [
            str(len(seeds)),
            interval([_mean(seed["validation"]) for seed in seeds]),
            f"**{interval(finals)}**",
            ", ".join(f"{mean:.1f}" for mean in finals),
            f"{np.quantile(every, 0.95):.0f}",
            f"{100 * np.mean(every >= CAP):.0f} %",
            f"{np.mean([seed['training_force_calls'] for seed in seeds]):.0f}" if row.trains else "–",
            f"{np.mean([seed['training_cpu_seconds'] for seed in seeds]):.0f}" if row.trains else "–",
        ]
        print(f"| {row.words} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    groups = list(dict.fromkeys(row.group for row in ROWS.values()))
    parser.add_argument("--only", choices=[*ROWS, *groups, "classical"], help="a row, or a group of rows")
    parser.add_argument("--weights", type=Path, help="folder for the weights of finished runs")
    parser.add_argument("--table", action="store_true", help="train nothing, show what is there")
    options = parser.parse_args()
    if not options.table:
        if options.weights is None:
            parser.error("--weights FOLDER is where finished runs are kept; or --table")
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # advice on replay sizes
        ablation = Ablation(options.weights)
        for seed in SEEDS:  # the whole table once before any row twice
            for name, row in ROWS.items():
                if options.only in (None, name, row.group):
                    ablation.row(name, seed)
        if options.only in (None, "classical"):
            ablation.classical()
    show()


if __name__ == "__main__":
    main()
