"""TD3 in one file, in the manner of CleanRL: 16 relaxations of a crystal of Al and Fe as one vector environment."""

import argparse
import copy

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import relaxion.train.gym  # noqa: F401  registers the environments

WORLD = {"recipe": "alfe-cubic", "n_neighbors": 12, "moves_follow_forces": True}
GAMMA, TAU, BATCH, WARMUP, NOISE, TARGET_NOISE, CLIP = 0.5, 0.005, 128, 1_000, 0.1, 0.05, 0.1


def layers(n_in, n_out, *last):
    return nn.Sequential(nn.Linear(n_in, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, n_out), *last)


class Replay:
    def __init__(self, capacity, n_seen, n_action):
        self.columns = [torch.zeros(capacity, width) for width in (n_seen, n_action, 1, n_seen, 1)]
        self.capacity, self.count = capacity, 0

    def add(self, *rows):
        places = (self.count + np.arange(len(rows[0]))) % self.capacity
        for column, row in zip(self.columns, rows, strict=True):
            column[places] = torch.as_tensor(row, dtype=torch.float32).reshape(len(places), -1)
        self.count += len(places)

    def sample(self):
        places = torch.randint(min(self.count, self.capacity), (BATCH,))
        return [column[places] for column in self.columns]


def update(networks, targets, optimizers, replay, number):
    (actor, *critics), (slow_actor, *slow_critics) = networks, targets
    seen, actions, rewards, later, terminated = replay.sample()
    with torch.no_grad():
        noise = (TARGET_NOISE * torch.randn_like(actions)).clamp(-CLIP, CLIP)
        pair = torch.cat([later, (slow_actor(later) + noise).clamp(-1, 1)], dim=1)
        wanted = rewards + GAMMA * (1 - terminated) * torch.minimum(*(critic(pair) for critic in slow_critics))
    loss = sum(mse_loss(critic(torch.cat([seen, actions], dim=1)), wanted) for critic in critics)
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    if number % 2:
        return
    optimizers[0].zero_grad()
    (-critics[0](torch.cat([seen, actor(seen)], dim=1)).mean()).backward()
    optimizers[0].step()
    with torch.no_grad():
        for fast, slow in zip(networks, targets, strict=True):
            for new, old in zip(fast.parameters(), slow.parameters(), strict=True):
                old.lerp_(new, TAU)


def calls(actor, number=100):
    """Mean force calls without noise from other starts; those that do not converge count as the most allowed."""
    world = gymnasium.make_vec(
        "relaxion/RelaxPadded-v0", num_envs=number, vectorization_mode="vector_entry_point", side="held_apart", **WORLD
    )
    seen, _ = world.reset(seed=1)
    needed, first = np.full(number, float(world.unwrapped.environment.settings.max_force_calls)), np.ones(number, bool)
    while first.any():
        with torch.no_grad():
            seen, _, terminated, truncated, infos = world.step(actor(torch.as_tensor(seen)).numpy())
        needed[first & terminated] = infos["force_calls"][first & terminated]
        first &= ~(terminated | truncated)
    return needed.mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    world = gymnasium.make_vec("relaxion/RelaxPadded-v0", num_envs=16, vectorization_mode="vector_entry_point", **WORLD)
    n_seen, n_action = world.single_observation_space.shape[0], world.single_action_space.shape[0]
    networks = [layers(n_seen, n_action, nn.Tanh()), *(layers(n_seen + n_action, 1) for _ in range(2))]
    targets = copy.deepcopy(networks)
    optimizers = [torch.optim.Adam(networks[0].parameters(), 1e-3)]
    optimizers += [torch.optim.Adam([*networks[1].parameters(), *networks[2].parameters()], 1e-3)]
    replay, (seen, _), number = Replay(given.steps, n_seen, n_action), world.reset(seed=given.seed), 0
    for step in range(0, given.steps, 16):
        with torch.no_grad():
            actions = networks[0](torch.as_tensor(seen))
        actions = (actions + NOISE * torch.randn_like(actions)).clamp(-1, 1).numpy()
        if step < WARMUP:
            actions = world.action_space.sample()
        after, rewards, terminated, truncated, infos = world.step(actions)
        later = after.copy()
        for place in np.flatnonzero(terminated | truncated):
            later[place] = infos["final_obs"][place]
        replay.add(seen, actions, rewards, later, terminated)
        seen = after
        if step >= WARMUP:
            for _ in range(8):
                number += 1
                update(networks, targets, optimizers, replay, number)
    print(f"{calls(networks[0]):.2f} force calls after {given.steps} steps")
