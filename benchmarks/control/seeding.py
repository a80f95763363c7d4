"""What one seed gives the agents on HalfCheetah before anything is learned: ours and Stable-Baselines3's.

    python benchmarks/control/seeding.py                        # 20 CPU-seconds

First weights of the policy, uniform actions of the warm-up, starts of the episodes; what TD3 and SAC share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from half_cheetah import RECIPE, make_sb3
from torch import Tensor

from relaxion.train.tasks.control import Trainer
from relaxion.train.tasks.progress import named_generator
from relaxion.train.tasks.settings import find, settings_from_recipe

STEPS = 1_500  # an episode and a half
SEEDS, AGENTS = range(3), ("td3", "sac")
GENERATORS = ("agent", "exploration", "replay", "starts")


@dataclass(frozen=True)
class Begun:
    """The warm-up so far, and the weights that no update has touched."""

    observations: Tensor  # (STEPS, 17)
    actions: Tensor  # (STEPS, 6)
    hidden: list[Tensor]  # weights and biases of the hidden layers


def ours(agent: str, seed: int) -> Begun:
    trainer = settings_from_recipe(find(RECIPE), agent, {"seed": seed}).trainer()
    assert isinstance(trainer, Trainer)
    hidden = [parameter.detach().clone() for parameter in list(trainer.agent.policy.parameters())[:4]]
    while trainer.step < STEPS:
        trainer.advance()  # no updates yet: the warm-up is longer
    trainer.close()
    return Begun(trainer.replay.observations[:STEPS], trainer.replay.actions[:STEPS], hidden)


def theirs(agent: str, seed: int) -> Begun:
    model: Any = make_sb3(settings_from_recipe(find(RECIPE), agent, {"seed": seed}))
    hidden = [parameter.detach().clone() for parameter in list(model.actor.parameters())[:4]]
    model.learn(STEPS)
    kept = model.replay_buffer
    return Begun(torch.tensor(kept.observations[:STEPS, 0]), torch.tensor(kept.actions[:STEPS, 0]), hidden)


def line(begun: Begun) -> str:
    actions = begun.actions
    following = np.corrcoef(actions[:-1].flatten(), actions[1:].flatten())[0, 1]
    starts = (begun.observations[0, :2].tolist(), begun.observations[1_000, :2].tolist())
    numbers = ", ".join(f"{x:.3f} {y:.3f}" for x, y in starts)
    return f"deviation {actions.std():.3f} (uniform 0.577), with the next {following:.3f}; starts {numbers}"


def main() -> None:
    torch.set_num_threads(1)
    for maker in (ours, theirs):
        for seed in SEEDS:
            begun = {agent: maker(agent, seed) for agent in AGENTS}
            for agent, each in begun.items():
                print(f"{maker.__name__} {agent} {seed}: {line(each)}")
            td3, sac = begun.values()
            weights = all(torch.equal(a, b) for a, b in zip(td3.hidden, sac.hidden, strict=True))
            same = torch.equal(td3.observations, sac.observations) and torch.equal(td3.actions, sac.actions)
            print(f"{maker.__name__} seed {seed}: TD3 and SAC share hidden weights {weights}, transitions {same}")
    for seed in SEEDS:
        draws = torch.stack([torch.rand(10_000, generator=named_generator(seed, name)) for name in GENERATORS])
        largest = np.abs(np.corrcoef(draws)[np.triu_indices(len(GENERATORS), 1)]).max()
        print(f"seed {seed}: largest correlation between two of our generators {largest:.3f}")


if __name__ == "__main__":
    main()
