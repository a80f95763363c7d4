"""Train a policy on a potential of your own, make a file of it, relax with that."""

import argparse
import sys
from pathlib import Path

from ase.build import bulk

from relaxion import Relaxer, potential
from relaxion.train.runs.loop import train
from relaxion.train.runs.packaging import bundle_from_run
from relaxion.train.tasks.settings import find, settings_from_recipe

sys.path.append(str(Path(__file__).parent))  # my_potential.py lies here; the working directory is searched anyway
RUN, POLICY = Path("run"), Path("my-copper.safetensors")


def settings(steps, starts):
    """The recipe `emt-metals` on other atoms and another potential, made small: it ends within a minute."""
    changes = {
        "potential": "my_potential:make",
        "structures": "alloys:Cu:2-4",
        "held_apart": "seed",  # assessed on structures that training never sees
        "perturbation": "rattle:0.1",
        "steps": steps,
        "n_structures": 8,
        "n_pooled": 32,
        "updates_per_round": 4,
        "batch_size": 16,
        "warmup_steps": 64,
        "expert_steps": 2_000,
        "assessment_starts": starts,
        "assessment_interval_steps": 0,
    }
    return settings_from_recipe(find("emt-metals"), "td3", changes)


def relax_with(policy):
    """A cell of copper, shaken, under the potential that was trained on."""
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=7)
    atoms.calc = potential("my_potential:make").as_calculator()
    opt = Relaxer(atoms, policy=policy, logfile=None)
    opt.run(fmax=0.05, steps=100)
    print(f"relaxed by {opt.policy_used}: {opt.outcome.label}, {opt.force_calls} force calls")
    return opt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4_000, help="environment steps; each is one force call")
    parser.add_argument("--starts", type=int, default=16, help="of the assessment at the end")
    options = parser.parse_args()
    result = train(settings(options.steps, options.starts), RUN, force=True)
    print(f"force calls per relaxation: {result.final_force_calls_mean:.1f} by the policy alone,", end=" ")
    print(f"{result.force_calls_bfgs:.1f} by BFGS, {result.force_calls_fire:.1f} by FIRE")
    bundle_from_run(RUN, "my-copper").write(POLICY)
    relax_with(POLICY)
    relax_with(None)
