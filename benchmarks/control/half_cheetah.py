"""HalfCheetah-v5: our TD3 and SAC beside Stable-Baselines3's, same settings, same assessment.

    pip install 'gymnasium[mujoco]' stable-baselines3
    python benchmarks/control/half_cheetah.py                   # hours: 12 runs of 100 000 steps, two at a time
    python benchmarks/control/half_cheetah.py --steps 1500 --warmup 500 --seeds 0 --out /tmp/try   # a short look

Runs that have a result are not run again and ours are resumed where they were cut, so the script may be killed at will.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RECIPE, TASK = "half-cheetah", "HalfCheetah-v5"
MAKERS = {"ours": "Relaxion", "sb3": "Stable-Baselines3"}


def main() -> None:
    options = arguments()
    if options.only_sb3 is not None:
        agent, seed, out = options.only_sb3
        run_sb3(agent, int(seed), Path(out), options)
        return
    jobs = list(product(options.agents, MAKERS, options.seeds))
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(jobs, pool.map(lambda job: result_of(*job, options), jobs), strict=True))
    print("\n".join(table(results)))


def result_of(agent: str, maker: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Of an earlier run, or of one made now."""
    out = options.out / f"{maker}-{agent}-{seed}"
    if not (out / "result.json").exists():
        words = ours(agent, seed, out, options) if maker == "ours" else theirs(agent, seed, out, options)
        subprocess.run(["nice", *words], check=True, stdout=sys.stderr)
    return json.loads((out / "result.json").read_text())


def ours(agent: str, seed: int, out: Path, options: argparse.Namespace) -> list[str]:
    words = ["relaxion", "train", RECIPE, "--agent", agent, "--seed", str(seed), "--out", str(out), "--quiet"]
    words += ["--steps", str(options.steps), "--set", f"warmup_steps={options.warmup}"]
    return words + (["--resume"] if (out / "checkpoint.safetensors").exists() else [])


def theirs(agent: str, seed: int, out: Path, options: argparse.Namespace) -> list[str]:
    words = [sys.executable, __file__, "--only-sb3", agent, str(seed), str(out)]
    return [*words, "--steps", str(options.steps), "--warmup", str(options.warmup)]


def run_sb3(agent: str, seed: int, out: Path, options: argparse.Namespace) -> None:
    """One run of Stable-Baselines3 with the settings of our recipe, assessed on our starts."""
    import torch

    from relaxion.train.experience.vectors import task
    from relaxion.train.tasks.control import assess
    from relaxion.train.tasks.settings import find, settings_from_recipe

    torch.set_num_threads(1)
    settings = settings_from_recipe(find(RECIPE), agent, {"warmup_steps": options.warmup, "seed": seed})
    model, began = make_sb3(settings), time.perf_counter()
    model.learn(options.steps)
    seconds = time.perf_counter() - began

    def act(observations: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(model.predict(observations.numpy(), deterministic=True)[0])

    final = assess(act, task(TASK), settings.training.assessment_starts)
    result = {"agent": agent, "task": TASK, "seed": seed, "steps": options.steps, "wall_time_seconds": seconds}
    result |= {"final_return_mean": final.mean, "final_return_worst": final.worst}
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def make_sb3(settings: Any) -> Any:
    import numpy as np
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.noise import NormalActionNoise

    training, agent = settings.training, settings.agent
    common = {
        "learning_rate": agent.policy_learning_rate,
        "buffer_size": training.replay_capacity,
        "learning_starts": training.warmup_steps,
        "batch_size": training.batch_size,
        "tau": agent.target_update_rate,
        "gamma": training.discount_factor,
        "train_freq": 1,
        "gradient_steps": 1,
        "policy_kwargs": {"net_arch": list(settings.networks.widths)},
        "seed": training.seed,
        "device": "cpu",
    }
    if settings.agent_name == "sac":
        return SAC("MlpPolicy", TASK, **common)
    noise = NormalActionNoise(np.zeros(6), np.full(6, agent.exploration_noise))  # the bounds are ±1: one half range
    smoothing = {"target_policy_noise": agent.target_noise, "target_noise_clip": agent.target_noise_clip}
    return TD3("MlpPolicy", TASK, action_noise=noise, policy_delay=agent.policy_delay, **smoothing, **common)


def table(results: dict[tuple[str, str, int], dict[str, Any]]) -> Iterator[str]:
    yield "| agent | by | steps | return of each seed | mean | spread (standard deviation) | seconds per run |"
    yield "|---|---|---|---|---|---|---|"
    for agent, maker in dict.fromkeys((agent, maker) for agent, maker, _ in results):
        runs = [result for (a, m, _), result in results.items() if (a, m) == (agent, maker)]
        returns = [run["final_return_mean"] for run in runs]
        spread = f"{stdev(returns):.0f}" if len(returns) > 1 else "–"
        seconds = mean(run["wall_time_seconds"] for run in runs)
        each = ", ".join(f"{value:.0f}" for value in returns)
        numbers = f"{runs[0]['steps']:,} | {each} | {mean(returns):.0f} | {spread} | {seconds:.0f}"
        yield f"| {agent.upper()} | {MAKERS[maker]} | {numbers} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", default=("td3", "sac"), choices=("td3", "sac"))
    parser.add_argument("--seeds", nargs="+", type=int, default=range(3))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--warmup", type=int, default=10_000, help="steps of random actions before the first update")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-half-cheetah"))
    parser.add_argument("--only-sb3", nargs=3, metavar=("AGENT", "SEED", "OUT"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
