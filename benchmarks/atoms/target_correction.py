"""Should the target policy's move be corrected too? Close Al–Fe packings, where the corrector has much to do.

    python benchmarks/atoms/target_correction.py --runs FOLDER [--steps 4000] [--seeds 0 1 2]

TD3 from scratch, with and without the corrector on a~ = π'(s') + noise. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from relaxion.agents.td3 import TD3
from relaxion.potentials.corrector import correct
from relaxion.structures import Move, State
from relaxion.training import loop as runs
from relaxion.training.relax import RelaxTrainer
from relaxion.training.relax_settings import RelaxRunSettings

SETTINGS = {
    "task": "relax",
    "agent": "td3",
    "potential": "eam",
    "structures": "packings:Al-Fe:2-6",
    "perturbation": "rattle:0.02",
    "held_apart": "composition:0.3",
    "assess_on": "validation",
    "minimum_distance_angstrom": 1.9,  # packings begin at 1.6, bonds are 2.4 and longer
    "max_force_calls": 60,
    "cutoff_angstrom": 3.5,
    "n_structures": 16,
    "updates_per_round": 6,
    "batch_size": 24,
    "warmup_steps": 500,
    "replay_capacity": 4_000,
    "discount_factor": 0.9,
    "assessment_interval_steps": 1_000,
    "assessment_starts": 60,
}


class CorrectedTargets(TD3):
    """a~ is what the corrector would leave of it."""

    minimum_distance: float

    def _smoothed_target_actions(self, next_observations: State) -> Move:
        smoothed = super()._smoothed_target_actions(next_observations)
        structures = next_observations.structures
        return correct(structures, smoothed.allowed(structures), self.minimum_distance).executed


def trained(corrected: bool, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{'corrected' if corrected else 'plain'}-{seed}"
    summary = out / "summary.json"
    if not summary.exists():
        settings = RelaxRunSettings.read({**SETTINGS, "steps": steps, "seed": seed})
        trainer = runs.make_trainer(settings)
        assert isinstance(trainer, RelaxTrainer)
        if corrected:
            trainer.agent.__class__ = CorrectedTargets
            trainer.agent.minimum_distance = settings.environment.minimum_distance_angstrom  # pyright: ignore
        out.mkdir(parents=True, exist_ok=True)
        trainer.prepare(out)
        lines, due = [], settings.training.assessment_interval_steps
        while trainer.step < steps:
            trainer.advance()
            if trainer.step >= due:
                due += settings.training.assessment_interval_steps
                own = trainer.scalars()
                found = trainer.assess()
                lines.append(
                    {
                        "step": trainer.step,
                        **found.scalars(),
                        "back_off": own["diagnosis/back_off"],
                        "q": own["train/q_mean"],
                    }
                )
        final = trainer.result(found, 0.0)
        summary.write_text(json.dumps({"lines": lines, **asdict(final)}, indent=1))
    return json.loads(summary.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| target move | seed | force calls | mean of the last three assessments | success | back-off in training |")
    print("|---|---|---|---|---|---|", flush=True)
    for seed in options.seeds:
        for corrected in (False, True):
            found = trained(corrected, seed, options.steps, options.runs)
            last = found["lines"][-3:]
            mean = sum(line["eval/force_calls_mean"] for line in last) / len(last)
            word = "corrected" if corrected else "as proposed"
            calls, rate = found["final_force_calls_mean"], found["final_success_rate"]
            print(
                f"| {word} | {seed} | {calls:.1f} | {mean:.1f} | {rate:.0%} | {last[-1]['back_off']:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
