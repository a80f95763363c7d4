"""Measure the results on the cards of shipped policies again, after guard or core have changed; weights stay.

    python tools/measure_cards.py metals            # a minute; the card inside the bundle and the one beside it

The starts are those of the run that made the policy. ASE's optimizers are read from its folder in
benchmarks/relaxation, the core is measured. The command is written anew: recipes may have changed since.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from relaxion import __version__
from relaxion.apps.cli.installed import write_bundle
from relaxion.files import Stored, json_of, write_json
from relaxion.model.policy_file import PolicyFile
from relaxion.policies import find_file, find_policy
from relaxion.train.judge.assessment import CORE
from relaxion.train.runs.packaging import training_command, with_results
from relaxion.train.runs.run_folder import RunFolder
from relaxion.train.tasks.settings import read_settings

RUNS = Path(__file__).parents[1] / "benchmarks" / "relaxation"


def measured(name: str) -> PolicyFile:
    bundle, folder = find_policy(name), RunFolder(RUNS / f"{name}_run")
    weights = {f"stiffness.{key}": tensor for key, tensor in bundle.policy.weights.items()}
    settings = read_settings(bundle.card.training_settings)
    packed = settings.packed(Stored(weights, {}))
    assert packed is not None, f"{name} relaxes no atoms"
    baselines = json_of(folder.baselines) | {CORE: packed.assessor.measure(CORE).as_plain()}
    write_json(folder.baselines, baselines)
    made = {
        "training_command": training_command(settings, folder),
        "relaxion_version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    return replace(bundle, card=with_results(bundle, packed, folder).model_copy(update=made))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        bundle = measured(name)
        write_bundle(bundle, find_file(name))
        print(f"{name}: " + ", ".join(f"{row.optimizer} {row.mean_force_calls:.1f}" for row in bundle.card.results))


if __name__ == "__main__":
    main()
