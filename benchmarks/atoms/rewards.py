"""Al–Fe: does a reward know which of several moves from the same state is the best?

    python benchmarks/atoms/rewards.py [--rewards log_force_decrease:1 energy:1 …]     # 1 CPU-minute

The untrained stiffness policy makes its move times eight factors from states of training. For each reward: by how much
half again as long a move is better, beside the scatter of that over states (signal to noise); and the force calls from
validation starts of whoever always takes the length that the reward likes best at the next step, the others uncounted.
A reward whose perfect one-step follower is worse than the plain policy cannot teach a policy with a short horizon.
"""

from __future__ import annotations

import argparse
import time

import torch
from step_length import CHANGES, PROBES, STORED, times

from relaxion.structures import Move, State
from relaxion.train.experience.environment import Environment, Reward, rollout
from relaxion.train.tasks.progress import named_generator
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.relax_settings import reward_weights
from relaxion.train.tasks.settings import find, settings_from_recipe

FACTORS = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0], dtype=torch.float64)
REWARDS = ("log_force_decrease:1", "log_gap_decrease:1", "log_gap_decrease:1+log_force_decrease:1")


def rewards(environment: Environment, move: Move, state: State) -> torch.Tensor:
    """Of the move times each factor, (n_factors, n_structures)."""
    return torch.stack([environment.step(state, times(move, float(f), state)).reward for f in FACTORS])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rewards", nargs="+", default=REWARDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = settings_from_recipe(find("al-fe"), "td3", CHANGES).trainer()
    assert isinstance(trainer, RelaxTrainer)
    while len(trainer.replay) < STORED:
        trainer.advance()
    states: State = trainer.replay.sample(PROBES).observations
    environment = trainer.task.environment("validation")
    starts = environment.reset(named_generator(20, "assessment"), 64).structures

    def plain(state: State) -> Move:
        return trainer.agent.act(state).to(torch.float64)

    def calls(policy: object) -> float:
        return float(rollout(environment, policy, environment.begin(starts)).calls.double().mean())  # type: ignore[arg-type]

    print(f"the policy itself: {calls(plain):.1f} force calls")
    for words in options.rewards:
        environment.reward = Reward(reward_weights(words))
        found = rewards(environment, plain(states), states)
        gain = found[5] - found[3]

        def greedy(state: State) -> Move:
            move = plain(state)
            return move.scaled(FACTORS[rewards(environment, move, state).argmax(dim=0)], state.structures)

        print(
            f"{words}: × 1.5 over × 1 {gain.mean():.3f}, signal to noise {gain.mean() / gain.std():.2f}; "
            f"{calls(greedy):.1f} force calls   ({time.process_time():.0f} CPU-seconds)",
            flush=True,
        )


if __name__ == "__main__":
    main()
