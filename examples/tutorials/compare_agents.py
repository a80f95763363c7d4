"""Compare the four agents on Pendulum and on atoms: the same settings, the same starts, a table."""

import argparse
import json
from pathlib import Path

from relaxion.train.runs.loop import train
from relaxion.train.tasks.settings import find, settings_from_recipe

AGENTS = ("ddpg", "td3", "d4pg", "sac")
ATOMS = {  # a small cut of the recipe `emt-metals`
    "structures": "alloys:Cu-Au:2-4",
    "held_apart": "seed",  # other random structures of the same kind
    "n_structures": 16,
    "n_pooled": 64,
    "updates_per_round": 8,
    "warmup_steps": 128,
    "expert_steps": 1_000,
}


def trained(recipe, agent, changes, steps, starts):
    """The result of one run, seed 0: trained in its folder, unless it is there already.

    It is assessed at the end, without noise, from starts that are the same for all agents.
    """
    folder = Path("runs") / f"{recipe}-{agent}"
    found = folder / "result.json"
    if not found.exists() or json.loads(found.read_text())["steps"] < steps:
        words = {"steps": steps, "seed": 0, "assessment_starts": starts, "assessment_interval_steps": 0}
        train(settings_from_recipe(find(recipe), agent, {**changes, **words}), folder, force=True)
    return json.loads(found.read_text())


def on_pendulum(steps, starts):
    print(f"Pendulum-v1, {steps} steps: mean and worst return of {starts} starts (0 is perfect, -1200 is hanging)")
    for agent in AGENTS:
        result = trained("pendulum", agent, {}, steps, starts)
        print(f"  {agent:5} {result['final_return_mean']:7.0f} {result['final_return_worst']:7.0f}")


def on_atoms(steps, starts):
    print(f"Cu–Au alloys of 2 to 4 atoms, EMT, {steps} steps: mean force calls per relaxation of {starts} starts")
    for agent in AGENTS:
        result = trained("emt-metals", agent, ATOMS, steps, starts)
        share = 100 * result["final_success_rate"]
        print(f"  {agent:5} {result['final_force_calls_mean']:5.1f}, {share:3.0f} % converged")
    print(f"  BFGS  {result['force_calls_bfgs']:5.1f}\n  FIRE  {result['force_calls_fire']:5.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pendulum-steps", type=int, default=5_000)
    parser.add_argument("--atom-steps", type=int, default=1_600)
    parser.add_argument("--starts", type=int, default=20, help="of each assessment")
    options = parser.parse_args()
    on_pendulum(options.pendulum_steps, options.starts)
    on_atoms(options.atom_steps, options.starts)
