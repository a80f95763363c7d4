"""Updates per CPU-second of TD3 and SAC beside Stable-Baselines3, in one process, in turns.

    python benchmarks/speed/updates.py [--rounds 12] [--updates 100] [--check]

Both sides get the same prepared tensors (Stable-Baselines3 through a replaced `replay_buffer.sample`), so that only the
update itself is measured: sampling is a matter of the replay, and ours is faster as well. Same networks (256, 256), batch
256, observations and actions as in HalfCheetah (17 and 6), one torch thread, CPU time of the process. The ratio of
each round compares neighbours in time, so that other work on the machine weighs on both alike; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from relaxion.agents import AGENT_SETTINGS, vector_agent
from relaxion.experience.batch import Batch
from relaxion.networks.vector_actions import BoxActions

N_OBSERVATIONS, N_ACTIONS, BATCH, DISCOUNT = 17, 6, 256, 0.99
REQUIRED_RATIO = 1.2


class Spaces(gymnasium.Env[np.ndarray, np.ndarray]):
    """Only spaces: nobody steps while updates are timed."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (N_OBSERVATIONS,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (N_ACTIONS,), np.float32)


def make_batches(count: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        Batch(
            observations=draw(BATCH, N_OBSERVATIONS),
            actions=draw(BATCH, N_ACTIONS).tanh(),
            rewards=draw(BATCH),
            discounts=torch.full((BATCH,), DISCOUNT),
            next_observations=draw(BATCH, N_OBSERVATIONS),
        )
        for _ in range(count)
    ]


def ours(name: str, batches: list[Batch]) -> Callable[[int], None]:
    actions = BoxActions(Spaces.action_space.low, Spaces.action_space.high)
    agent = vector_agent(N_OBSERVATIONS, actions, torch.Generator().manual_seed(0), AGENT_SETTINGS[name]())
    source = cycle(batches)

    def run(n_updates: int) -> None:
        for _ in range(n_updates):
            agent.update(next(source))

    return run


def theirs(name: str, batches: list[Batch]) -> Callable[[int], None]:
    algorithm: Any = {"td3": sb3.TD3, "sac": sb3.SAC}[name]
    model = algorithm(
        "MlpPolicy", Spaces(), batch_size=BATCH, policy_kwargs={"net_arch": [256, 256]}, buffer_size=1, device="cpu"
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    source = cycle([_as_samples(batch) for batch in batches])
    model.replay_buffer.sample = lambda *_arguments, **_keywords: next(source)
    return lambda n_updates: model.train(gradient_steps=n_updates, batch_size=BATCH)


def _as_samples(batch: Batch) -> ReplayBufferSamples:
    return ReplayBufferSamples(
        observations=batch.observations,
        actions=batch.actions,
        next_observations=batch.next_observations,
        dones=torch.zeros(BATCH, 1),
        rewards=batch.rewards[:, None],
    )


def rate(run: Callable[[int], None], n_updates: int) -> float:
    """Updates per second of CPU time."""
    began = time.process_time()
    run(n_updates)
    return n_updates / (time.process_time() - began)


def compare(name: str, rounds: int, n_updates: int) -> tuple[float, float, float]:
    """Medians of our rate, theirs, and of the ratio within each round."""
    batches = make_batches()
    sides = ours(name, batches), theirs(name, batches)
    for side in sides:
        side(20)
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)  # who goes first alternates
        rates = {side: rate(sides[side], n_updates) for side in order}
        pairs.append((rates[0], rates[1]))
    return (
        statistics.median(our for our, _ in pairs),
        statistics.median(their for _, their in pairs),
        statistics.median(our / their for our, their in pairs),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--updates", type=int, default=100, help="per round and side")
    parser.add_argument("--check", action="store_true", help=f"exit 1 where the ratio is below {REQUIRED_RATIO}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, stable-baselines3 {sb3.__version__}, updates per CPU-second\n")
    print("| agent | relaxion | Stable-Baselines3 | ratio |\n|---|---|---|---|")
    too_slow = []
    for name in ("td3", "sac"):
        our, their, ratio = compare(name, arguments.rounds, arguments.updates)
        print(f"| {name.upper()} | {our:.0f} | {their:.0f} | {ratio:.2f} |", flush=True)
        too_slow += [name] if ratio < REQUIRED_RATIO else []
    if arguments.check and too_slow:
        print(f"below {REQUIRED_RATIO}: {', '.join(too_slow)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
