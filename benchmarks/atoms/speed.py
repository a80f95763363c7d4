"""How long do 100 000 environment steps of the recipe emt-metals take?

    python benchmarks/atoms/speed.py --out RUN [--agent td3] [--stop-at 11000]

Trains the recipe as it is, checkpoints and assessments included, and prints processor and wall time of every 1 000
steps. With `--stop-at` the run ends there, resumable, and the rest is reckoned from the stretch behind the warm-up.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from relaxion.training.loop import Interrupted, train
from relaxion.training.recipe import find, settings_from_recipe

RECIPE = "emt-metals"
STRETCH = 1_000


class Stopwatch:
    """Processor and wall time at every `STRETCH` steps."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at
        self.readings: list[tuple[int, float, float]] = []  # steps, CPU-seconds, seconds
        self._wall = time.perf_counter()

    def __call__(self, step: int, _: Mapping[str, float]) -> None:
        if not self.readings or step - self.readings[-1][0] >= STRETCH:
            self.readings.append((step, time.process_time(), time.perf_counter() - self._wall))
            print(f"{step} steps: {time.process_time():.1f} CPU-seconds, {self.readings[-1][2]:.0f} s", flush=True)
        if self.stop_at is not None and step >= self.stop_at:
            self.stop_at = None
            os.kill(os.getpid(), signal.SIGTERM)  # as a batch system would: saved, resumable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--agent", default="td3")
    parser.add_argument("--stop-at", type=int, help="end there, resumable")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = settings_from_recipe(find(RECIPE), options.agent, {"seed": 0})
    watch = Stopwatch(options.stop_at)
    try:
        train(settings, options.out, resume=(options.out / "checkpoint.safetensors").exists(), on_progress=watch)
    except Interrupted as stopped:
        print(stopped)
    warm = [reading for reading in watch.readings if reading[0] > settings.training.warmup_steps + STRETCH]
    (first, cpu_first, _), (last, cpu_last, _) = warm[0], warm[-1]
    per_step = (cpu_last - cpu_first) / (last - first)
    minutes = per_step * settings.training.steps / 60
    print(f"steps {first} to {last}: {1000 * per_step:.2f} CPU-ms a step, {minutes:.1f} CPU-minutes for the recipe")


if __name__ == "__main__":
    main()
