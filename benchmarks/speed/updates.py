"""Updates per CPU-second of TD3 and SAC beside Stable-Baselines3, in one process, in turns.

    python benchmarks/speed/updates.py [--rounds 60] [--updates 10] [--check]

Two rows per agent. "with replay": each side draws its batches from its own replay, both filled with the same
transitions. "update alone": both sides get the same prepared tensors (Stable-Baselines3 through a replaced
`replay_buffer.sample`). Networks (256, 256), batch 256, observations and actions as in HalfCheetah (17 and 6), one
torch thread, CPU time of the process. Each round compares neighbours in time, so that other work on the machine weighs
on both alike; the median of the rounds' ratios counts.
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

from relaxion.train.agents import AGENT_SETTINGS, vector_agent
from relaxion.train.agents.vector_networks import BoxActions
from relaxion.train.experience.vectors import Batch, VectorReplay

N_OBSERVATIONS, N_ACTIONS, BATCH, STORED, DISCOUNT = 17, 6, 256, 100_000, 0.99
REQUIRED_RATIO = 1.15


class Spaces(gymnasium.Env[np.ndarray, np.ndarray]):
    """Only spaces: nobody steps while updates are timed."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (N_OBSERVATIONS,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (N_ACTIONS,), np.float32)


def our_replay() -> VectorReplay:
    """Full of random transitions."""
    generator = torch.Generator().manual_seed(0)
    replay = VectorReplay(STORED, N_OBSERVATIONS, N_ACTIONS, generator=generator, discount_factor=DISCOUNT)
    for rows in (replay.observations, replay.next_observations, replay.rewards):
        rows.normal_(generator=generator)
    replay.actions.uniform_(-1, 1, generator=generator)
    replay.total_added = STORED
    return replay


def ours(name: str, source: Callable[[], Batch]) -> Callable[[int], None]:
    actions = BoxActions([-1.0] * N_ACTIONS, [1.0] * N_ACTIONS)
    agent = vector_agent(N_OBSERVATIONS, actions, torch.Generator().manual_seed(0), AGENT_SETTINGS[name]())

    def run(n_updates: int) -> None:
        for _ in range(n_updates):
            agent.update(source())

    return run


def theirs(name: str, replay: VectorReplay, prepared: list[Batch] | None) -> Callable[[int], None]:
    algorithm: Any = {"td3": sb3.TD3, "sac": sb3.SAC}[name]
    model = algorithm(
        "MlpPolicy", Spaces(), batch_size=BATCH, gamma=DISCOUNT, policy_kwargs={"net_arch": [256, 256]},
        buffer_size=STORED, device="cpu",
    )  # fmt: skip
    model.set_logger(Logger(folder=None, output_formats=[]))
    if prepared is None:
        _fill(model.replay_buffer, replay)
    else:
        samples = cycle([_as_samples(batch) for batch in prepared])
        model.replay_buffer.sample = lambda *_arguments, **_keywords: next(samples)
    return lambda n_updates: model.train(gradient_steps=n_updates, batch_size=BATCH)


def _fill(buffer: Any, replay: VectorReplay) -> None:
    buffer.observations[:, 0] = replay.observations.numpy()
    buffer.next_observations[:, 0] = replay.next_observations.numpy()
    buffer.actions[:, 0] = replay.actions.numpy()
    buffer.rewards[:, 0] = replay.rewards.numpy()
    buffer.full = True


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


def compare(name: str, with_replay: bool, rounds: int, n_updates: int) -> tuple[float, float, float]:
    """Medians of our rate, theirs, and of the ratio within each round."""
    replay = our_replay()
    prepared = None if with_replay else [replay.sample(BATCH) for _ in range(16)]
    source = (lambda: replay.sample(BATCH)) if prepared is None else cycle(prepared).__next__
    sides = ours(name, source), theirs(name, replay, prepared)
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
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--updates", type=int, default=10, help="per round and side")
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a ratio is below {REQUIRED_RATIO}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, stable-baselines3 {sb3.__version__}, updates per CPU-second\n")
    print("| agent | measured | relaxion | Stable-Baselines3 | ratio |\n|---|---|---|---|---|")
    too_slow = []
    for name in ("td3", "sac"):
        for with_replay, word in ((True, "with replay"), (False, "update alone")):
            our, their, ratio = compare(name, with_replay, arguments.rounds, arguments.updates)
            print(f"| {name.upper()} | {word} | {our:.0f} | {their:.0f} | {ratio:.2f} |", flush=True)
            too_slow += [f"{name} {word}"] if ratio < REQUIRED_RATIO else []
    if arguments.check and too_slow:
        print(f"below {REQUIRED_RATIO}: {', '.join(too_slow)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
