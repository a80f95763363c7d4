"""Al–Fe: what critics believe about the length of a move, beside what a move of that length really brings.

    python benchmarks/atoms/step_length.py [--updates 600] [--set discount_factor=0]     # 600: a CPU-minute

3 000 transitions of the untrained stiffness policy, whose moves are made longer or shorter by chance, then updates of
the critics alone. From 300 states of them the policy's move times some factors: the reward of one step with it, and
the first critic's value.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from relaxion.model.layers import with_graph
from relaxion.settings import assigned
from relaxion.structures import Move, State
from relaxion.train.agents.td3 import TD3
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.settings import find, settings_from_recipe

FACTORS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
STORED, PROBES = 2_950, 300
CHANGES = {
    "policy": "stiffness",
    "expert_share": 0.0,
    "imitation_weight": 0.0,
    "environment_information": [],
    "exploration_length_noise": 0.5,
    "warmup_steps": 5_000,  # no update comes by itself
    "critic_updates_before": 1_000_000,  # the policy stays
    "assess_on": "validation",
    "seed": 0,
}


def times(move: Move, factor: float, state: State) -> Move:
    factors = torch.full((state.n_structures,), factor, dtype=move.displacements.dtype)
    return move.scaled(factors, state.structures)


def line(name: str, values: dict[float, Tensor]) -> str:
    each = ", ".join(f"{factor:g} {value.mean():.3f}" for factor, value in values.items())
    return f"{name:>12}: {each}   ({time.process_time():.0f} CPU-seconds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = settings_from_recipe(find("al-fe"), "td3", {**CHANGES, **assigned(options.set)}).trainer()
    assert isinstance(trainer, RelaxTrainer)
    agent = trainer.agent
    assert isinstance(agent, TD3)
    while len(trainer.replay) < STORED:
        trainer.advance()
    states: State = trainer.replay.sample(PROBES).observations
    seen = with_graph(states, trainer.settings.networks.cutoff_angstrom)
    with torch.no_grad():
        move = agent.policy(seen)
        far = move.to(states.structures.dtype)
        print(line("reward", {f: trainer.environment.step(states, times(far, f, states)).reward for f in FACTORS}))
        for number in range(5):
            values = {f: agent.critics(seen, times(move, f, seen))[:, 0] for f in FACTORS}
            print(line(f"{number * options.updates // 4} updates", values), flush=True)
            if number < 4:
                with torch.enable_grad():
                    for _ in range(options.updates // 4):
                        agent.update(trainer._sampled())


if __name__ == "__main__":
    main()
