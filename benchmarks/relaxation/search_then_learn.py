"""Search, then learn: does `metals` gain from the cheapest of several relaxations of each start?

    python benchmarks/relaxation/search_then_learn.py                    # 30 minutes; for choices, never for results

The shipped `metals` is taught further by its recipe, at a fourth of the rates: by one relaxation of each start, or by
the cheapest of four (`lesson_tries`). The updates are such that both take about the same processor time, which is
printed. Then all relax the same starts (seed 8200; 60 of each kind), to 0.05 eV/Å. Printed: geometric means of the
calls over those of `metals`, over all starts of all seeds, with a 95 % interval by resampling the starts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from new_kinds import Kind, all_kinds
from own_kinds import metric_calls, metric_of

from relaxion.networks.metric.network import MetricNetwork
from relaxion.optimize.learned import LearnedMetrics
from relaxion.training.metric import MetricRunSettings
from relaxion.training.recipe import find, settings_from_recipe

GENTLY = 0.25
KINDS = ("alloy", "slab", "cluster", "packing")


def taught(tries: int, updates: int, seed: int) -> tuple[MetricNetwork, float, int]:
    """A copy of the network of `metals`; processor seconds and force calls of its lessons."""
    changes = {"seed": seed, "lesson_tries": tries, "lesson_updates": updates, "steps": updates}
    settings = settings_from_recipe(find("metals"), None, changes)
    assert isinstance(settings, MetricRunSettings)
    rates = ("lesson_learning_rate", "lesson_muon_learning_rate")
    slower = {name: GENTLY * getattr(settings.lessons, name) for name in rates}
    settings = settings_from_recipe(find("metals"), None, changes | slower)
    assert isinstance(settings, MetricRunSettings)
    trainer, begin = settings.trainer(), time.process_time()
    trainer.policy.network.load_state_dict(metric_of("metals")[0].state_dict())
    imitation = trainer.imitation
    while not imitation.done:
        imitation.update()
    return trainer.policy.network, time.process_time() - begin, imitation.examples.force_calls


def calls_of(network: MetricNetwork, kinds: list[Kind]) -> dict[str, np.ndarray]:
    return {kind.title: metric_calls(LearnedMetrics(network), kind.begun, kind.potential) for kind in kinds}


def ratio(logs: np.ndarray) -> str:
    """Of starts in columns and seeds in rows."""
    own, random = logs.mean(axis=0), np.random.default_rng(0)
    again = own[random.integers(len(own), size=(2000, len(own)))].mean(axis=1)
    low, high = np.exp(np.quantile(again, (0.025, 0.975)))
    return f"{np.exp(own.mean()):.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--updates", type=int, nargs="+", default=(300, 180), help="of each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--number", type=int, default=60, help="starts of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds = list(all_kinds(given.number, KINDS))
    base = calls_of(metric_of("metals")[0], kinds)
    print(f"| tries | updates | CPU seconds | force calls | {' | '.join(base)} | all |")
    print("|---" * (5 + len(base)) + "|")
    for tries, updates in zip(given.tries, given.updates, strict=True):
        runs = [taught(tries, updates, seed) for seed in range(given.seeds)]
        each = [calls_of(network, kinds) for network, _, _ in runs]
        logs = {name: np.log([own[name] / base[name] for own in each]) for name in base}
        seconds, spent = (np.mean([run[place] for run in runs]) for place in (1, 2))
        cells = [ratio(own) for own in (*logs.values(), np.concatenate(list(logs.values()), axis=1))]
        print(f"| {tries} | {updates} | {seconds:.0f} | {spent:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
