"""The metric policy alone, no guard and no core behind it, on the starts of `agents.py`.

    python benchmarks/atoms/metric.py --only al-fe [--side validation] [--policy metals] [--trust 0.3]

`--policy` is the name of a policy or a bundle's file (`relaxion package RUN NAME --out FILE`), `--trust` the longest
move in Å. With and without the damping by the last secant (`networks/metric/policies.py`).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from agents import SETS, STARTS, settings_of

from relaxion.bench.assessment import Assessed
from relaxion.errors import RelaxionWarning
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.optimize.choice import load
from relaxion.training.relax_task import relax_task

RESULTS = Path(__file__).parent / "results"


def assessed(name: str, side: str, policy: MetricPolicy, trust: float) -> Assessed:
    settings = settings_of(name, "td3", "light", 0)
    atoms = settings.atoms.model_copy(update={"assess_on": side})
    world = settings.environment.model_copy(update={"max_displacement_angstrom": trust})
    task = relax_task(replace(settings, atoms=atoms, environment=world))
    with torch.no_grad():
        return task.assessor()(task.following(policy))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(SETS), required=True)
    parser.add_argument("--side", choices=("held_apart", "validation"), default="held_apart")
    parser.add_argument("--policy", default="metals")
    parser.add_argument("--trust", type=float, default=0.3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RelaxionWarning)
    policy = load(options.policy).policy
    assert isinstance(policy, MetricPolicy), f"{options.policy} is no metric policy"
    found = {}
    for damped in (True, False):
        policy.settings = policy.settings.model_copy(update={"damped": damped})
        begin = time.process_time()
        calls = assessed(options.only, options.side, policy, options.trust)
        failures, numbers = calls.calls.failures, calls.force_calls
        found["damped" if damped else "plain"] = {"force_calls": calls.force_calls.tolist(), "failures": failures}
        print(
            f"{options.only}, {options.side}, {options.policy}, damped {damped}: mean {numbers.mean():.1f}, median "
            f"{np.median(numbers):.0f}, failures {failures} of {STARTS} ({time.process_time() - begin:.0f} CPU-s)",
            flush=True,
        )
    if options.side == "held_apart":
        name = Path(options.policy).stem
        (RESULTS / f"{options.only}-metric-{name}.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
