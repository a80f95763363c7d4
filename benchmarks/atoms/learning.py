"""Learning curves of agents on atoms, seed by seed: docs/results/learning.md and its pictures.

    python benchmarks/atoms/learning.py --runs FOLDER [--only al-fe-td3 [--seeds 1 2]]  # what is missing; resumable
    python benchmarks/atoms/learning.py --runs FOLDER --draw            # trains nothing; collects, draws
    python tools/fill_pages.py                                          # writes the tables into the page

Each row is a command of `ROWS` with a seed. What a run found is kept as one small JSON file in `results/learning`:
force calls at every assessment, of the starts held out and of the validation starts, the kept policy, processor time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import torch

from relaxion.files import json_of, write_json
from relaxion.settings import assigned
from relaxion.train.judge.assessment import CORE
from relaxion.train.runs.loop import train
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import relax_task
from relaxion.train.tasks.settings import find, settings_from_recipe

HERE = Path(__file__).parent
NAMES = {"core": "classical optimizer"}  # in pictures
KEPT, PICTURES = HERE / "results" / "learning", HERE.parents[1] / "docs" / "pictures"
CLASSICAL = ("BFGS", "BFGSLineSearch", CORE)
CPU = "cpu_seconds.json"  # in a run's folder


@dataclass(frozen=True)
class Row:
    """One command, several seeds."""

    label: str
    recipe: str
    agent: str
    changes: str
    seeds: tuple[int, ...]
    group: str  # rows of one picture

    @property
    def command(self) -> str:
        return f"relaxion train {self.recipe} --agent {self.agent} {self.changes}".strip()

    def settings(self, seed: int) -> RelaxRunSettings:
        words = shlex.split(self.changes)
        given = assigned([value for flag, value in zip(words[::2], words[1::2], strict=True) if flag == "--set"])
        given |= {flag[2:]: int(value) for flag, value in zip(words[::2], words[1::2], strict=True) if flag != "--set"}
        settings = settings_from_recipe(find(self.recipe), self.agent, {**given, "seed": seed})
        assert isinstance(settings, RelaxRunSettings)
        return settings


FROM_SCRATCH = "--set expert_share=0 --set imitation_weight=0"
EXPERT = (
    "--set expert_share=0.8 --set expert_steps=20000 --set imitation_weight=2 --set assessment_interval_steps=10000"
)
LESSONS = "--set fit_updates=3000 --steps 3000 --set averaged_policy=false --set assessment_interval_steps=300"
LIGHT = "--set backbone=light"
STIFFNESS = f"--set policy=stiffness {FROM_SCRATCH} --set environment_information=[]"
PATIENT = "--set critic_updates_before=2000 --set exploration_length_noise=0.5 --set assessment_interval_steps=5000"
PAPER = (
    "--set policy_delay=2 --set target_update_rate=0.005 --set discount_factor=0.99 --set n_steps=1 "
    "--set critic_learning_rate=1e-3 --set target_noise=0.2 --set target_noise_clip=0.5 "
    "--set learning_rate_final_share=1 --steps 12000 --set assessment_interval_steps=4000"
)
SHORT = "--steps 10000 --set assessment_interval_steps=5000"
FORCES = (
    "--set reward=log_force_decrease:1 --set discount_factor=0.5"  # the recipe al-fe before its reward had the energy
)
AT_ONCE = "--set critic_updates_before=0 --set exploration_length_noise=0"
LONG = "--steps 100000"
ROWS = {
    "emt-stiffness-td3": Row("TD3, stiffness policy", "emt-stiffness", "td3", "", (0, 1, 2, 3, 4), "emt"),
    "emt-stiffness-paper": Row(
        "TD3 as in its paper, stiffness policy", "emt-stiffness", "td3", PAPER, (0, 1, 2), "emt"
    ),
    "emt-metals-td3": Row("TD3, direct policy", "emt-metals", "td3", FROM_SCRATCH, (0, 1, 2), "emt"),
    "emt-metals-sac": Row("SAC, direct policy", "emt-metals", "sac", FROM_SCRATCH, (0, 1, 2), "emt"),
    "emt-metals-ddpg": Row("DDPG, direct policy", "emt-metals", "ddpg", FROM_SCRATCH, (0,), "emt"),
    "emt-metals-d4pg": Row("D4PG, direct policy", "emt-metals", "d4pg", FROM_SCRATCH, (0,), "emt"),
    "emt-metals-expert": Row("TD3, direct policy, expert at first", "emt-metals", "td3", "", (0,), "emt"),
    "emt-stiffness-lessons": Row("lessons, stiffness policy", "emt-stiffness", "td3", LESSONS, (0, 1, 2), "lessons"),
    "al-fe-td3": Row("TD3, direct policy", "al-fe", "td3", "", (0, 1, 2), "al-fe"),
    "al-fe-stiffness-td3": Row("TD3, stiffness policy", "al-fe-stiffness", "td3", "", (0, 1, 2, 3, 4), "al-fe"),
    "al-fe-stiffness-sac": Row("SAC, stiffness policy", "al-fe-stiffness", "sac", SHORT, (0, 1, 2), "agents"),
    "al-fe-stiffness-d4pg": Row("D4PG, stiffness policy", "al-fe-stiffness", "d4pg", SHORT, (0, 1, 2), "agents"),
    "al-fe-stiffness-ddpg": Row("DDPG, stiffness policy", "al-fe-stiffness", "ddpg", SHORT, (0, 1, 2), "agents"),
    "al-fe-stiffness-forces": Row(
        "TD3, stiffness policy, rewarded for forces",
        "al-fe",
        "td3",
        f"{STIFFNESS} {FORCES} {PATIENT} {LONG}",
        (0, 1, 2),
        "al-fe",
    ),
    "al-fe-expert": Row(
        "TD3, direct policy, expert at first", "al-fe", "td3", f"{FORCES} {AT_ONCE} {EXPERT} {LONG}", (0,), "al-fe"
    ),
    "al-fe-stiffness-lessons": Row(
        "lessons, stiffness policy, Al–Fe",
        "al-fe",
        "td3",
        f"{STIFFNESS} {FORCES} {AT_ONCE} {LESSONS}",
        (0, 1, 2),
        "lessons",
    ),
    "alfe-light-td3": Row("TD3, light", "alfe-cubic", "td3", LIGHT, (0, 1, 2), "alfe"),
    "alfe-light-sac": Row("SAC, light", "alfe-cubic", "sac", LIGHT, (0, 1, 2), "alfe"),
    "alfe-light-ddpg": Row("DDPG, light", "alfe-cubic", "ddpg", LIGHT, (0, 1, 2), "alfe"),
    "alfe-light-d4pg": Row("D4PG, light", "alfe-cubic", "d4pg", LIGHT, (0, 1, 2), "alfe"),
    "alfe-e3nn-td3": Row("TD3, e3nn", "alfe-cubic", "td3", "", (0, 1, 2), "alfe"),
    "alfe-quick-td3": Row("TD3, e3nn", "alfe-quick", "td3", "", (0,), "quick"),
}
TITLES = {
    "emt": "EMT metals, 2–16 atoms",
    "al-fe": "Al–Fe, 2–20 atoms",
    "alfe": "Cubic AlFe",
    "quick": "Cubic AlFe, e3nn: alfe-quick",
}


def with_baselines(trainer: Any, measured: Path) -> Any:
    """BFGS and FIRE are measured once for all runs with the same assessed starts."""
    prepare = trainer.prepare

    def prepared(folder: Path) -> None:
        if measured.exists():
            copy(measured, folder / measured.name)
        prepare(folder)
        measured.parent.mkdir(parents=True, exist_ok=True)
        copy(folder / measured.name, measured)

    trainer.prepare = prepared
    return trainer


def trained(name: str, seed: int, runs: Path) -> None:
    """Go through this run, or what is left of it."""
    out = runs / f"{name}-{seed}"
    if (out / "result.json").exists():
        return
    before = json_of(out / CPU)["seconds"] if (out / CPU).exists() else 0.0
    begin = time.process_time()
    measured = runs / ROWS[name].recipe / "baselines.json"

    def make(settings: Any) -> Any:
        return with_baselines(settings.trainer(), measured)

    try:
        train(ROWS[name].settings(seed), out, resume=(out / "checkpoint.safetensors").exists(), make=make)
    finally:
        write_json(out / CPU, {"seconds": before + time.process_time() - begin})


def collected(name: str, seed: int, runs: Path) -> None:
    """What a finished run found, as a small file."""
    out = runs / f"{name}-{seed}"
    if not (out / "result.json").exists():
        return
    result, lines = json_of(out / "result.json"), (out / "metrics.jsonl").read_text().splitlines()
    assessed = [line for line in map(json.loads, lines) if "eval/force_calls_mean" in line]
    keys = ("force_calls_mean", "validation_force_calls_mean", "force_calls_p95", "success_rate")
    curve = [[line["time/total_timesteps"], *(round(line[f"eval/{key}"], 4) for key in keys)] for line in assessed]
    own = {key: value for key, value in result.items() if key.startswith(("kept_", "final_", "force_calls_"))}
    facts = {
        "command": f"{ROWS[name].command} --seed {seed}",
        "steps": result["steps"],
        "training_force_calls": result["training_force_calls"],
        "cpu_seconds": round(json_of(out / CPU)["seconds"]),
        "columns": ["step", *keys],
        "curve": curve,
    }
    write_json(KEPT / f"{name}-{seed}.json", facts | own)


def classical(recipe: str) -> dict[str, float]:
    """Mean force calls of ASE's optimizers and of our classical one from the starts of the results."""
    file = KEPT / f"{recipe}-classical.json"
    if not file.exists():
        settings = settings_from_recipe(find(recipe), "td3", {})
        assert isinstance(settings, RelaxRunSettings)
        assessor = relax_task(settings).assessor()
        write_json(file, {kind: assessor.measure(kind).as_plain() for kind in CLASSICAL})
    return {kind: row["mean_force_calls"] for kind, row in json_of(file).items()}


def found(name: str) -> list[dict[str, Any]]:
    files = [KEPT / f"{name}-{seed}.json" for seed in ROWS[name].seeds]
    return [json_of(file) for file in files if file.exists()]


def draw(group: str) -> None:
    """Mean and range over the seeds against environment steps."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = group  # the same runs, the same file
    names = [name for name, row in ROWS.items() if row.group == group and found(name)]
    if not names:
        return
    figure = Figure(figsize=(7, 4.9), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        curves = [np.array(run["curve"]) for run in found(name)]
        length = min(map(len, curves))
        calls = np.stack([curve[:length, 1] for curve in curves])
        steps, colour = curves[0][:length, 0], f"C{number}"
        label = f"{ROWS[name].label}, {len(curves)} seed{'s' if len(curves) > 1 else ''}"
        axes.plot(steps, calls.mean(axis=0), "o-", color=colour, markersize=3, label=label)
        axes.fill_between(steps, calls.min(axis=0), calls.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    for (kind, calls), style in zip(classical(ROWS[names[0]].recipe).items(), ("--", ":", "-."), strict=True):
        axes.axhline(calls, color="0.3", linestyle=style, linewidth=1, label=f"{NAMES.get(kind, kind)} {calls:.1f}")
    axes.set(xlabel="environment steps", ylabel="force calls per relaxation", yscale="log", title=TITLES[group])
    low, high = axes.get_ylim()
    ticks = [tick for tick in (2, 3, 4, 6, 10, 20, 40, 60, 100, 200) if low <= tick <= high]  # others would widen it
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)  # inside it hides the lowest curves
    figure.savefig(PICTURES / f"learning-{group}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", choices=list(ROWS), help="one row")
    parser.add_argument("--seeds", type=int, nargs="+", help="these of its seeds")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else ROWS:
        for seed in options.seeds or ROWS[name].seeds:
            if not options.draw:
                trained(name, seed, options.runs)
            collected(name, seed, options.runs)
    for group in TITLES:
        draw(group)


if __name__ == "__main__":
    main()
