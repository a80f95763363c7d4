"""Add an agent: a critic and no policy. It looks at 64 random actions and takes the one the critic likes best."""

import argparse

import torch

from relaxion.train.agents.shared import (
    Agent,
    adam,
    bellman_target,
    descend,
    restore_snapshot,
    soft_update,
    take_snapshot,
    target_copy,
)
from relaxion.train.agents.vector_networks import BoxActions, VectorCritics
from relaxion.train.experience.vectors import VectorEnvironments, VectorReplay, task
from relaxion.train.tasks.control import assess

N_TRIED, BATCH, WARMUP, DISCOUNT = 64, 64, 200, 0.97


class BestOfMany:
    """y = r + γ(1-d) max_k Q'(s', a_k), a_k drawn at random; loss mean (Q(s, a) - y)²."""

    def __init__(self, critic, domain, generator, learning_rate=1e-3, target_update_rate=0.01):
        self.critic, self.target_critic = critic, target_copy(critic)
        self.critic_optimizer = adam(critic.parameters(), learning_rate)
        self.domain, self.generator, self.target_update_rate = domain, generator, target_update_rate
        self.exploration_scale = 0.1  # half ranges of the action
        self.n_updates = torch.zeros((), dtype=torch.int64)

    def _best(self, critic, observations):
        """The best of many actions for each observation, and what it is worth."""
        repeated = observations.repeat_interleave(N_TRIED, 0)
        tried = self.domain.random(repeated, self.generator)
        values, places = critic.first(repeated, tried).view(-1, N_TRIED).max(dim=1)
        return tried.view(len(observations), N_TRIED, -1)[torch.arange(len(observations)), places], values

    @torch.no_grad()
    def act(self, observations):
        return self._best(self.critic, observations)[0]

    @torch.no_grad()
    def explore(self, observations, generator):
        return self.domain.bound(self.domain.perturb(self.act(observations), self.exploration_scale, generator))

    def update(self, batch):
        with torch.no_grad():
            targets = bellman_target(
                batch.rewards, batch.discounts, self._best(self.target_critic, batch.next_observations)[1]
            )
        values = self.critic.first(batch.observations, batch.actions)
        loss = (values - targets).square().mean()
        norm = descend(loss, self.critic_optimizer)
        soft_update(self.target_critic, self.critic, self.target_update_rate)
        self.n_updates += 1
        return {"train/critic_loss": loss.detach(), "train/critic_gradient_norm": norm}

    def _parts(self):
        names = ("critic", "target_critic", "critic_optimizer", "n_updates", "generator")
        return {name: getattr(self, name) for name in names}

    def snapshot(self):
        return take_snapshot(self._parts())

    def restore(self, tensors):
        restore_snapshot(self._parts(), tensors)


def learn(agent, learned, steps, seed=0):
    """Collect by day, review by night: one step, one update."""
    generator = torch.Generator().manual_seed(seed)
    world = VectorEnvironments(learned.make, 1, generator)
    replay = VectorReplay(
        steps, learned.observation_size, learned.action_size, generator=generator, discount_factor=DISCOUNT
    )
    for step in range(steps):
        seen = world.observations
        actions = agent.domain.random(seen, generator) if step < WARMUP else agent.explore(seen, generator)
        stepped = world.step(actions)
        replay.add(seen, actions, stepped.rewards, stepped.next_observations, stepped.terminated, stepped.truncated)
        world.renew(stepped.ended)
        if step >= WARMUP:
            agent.update(replay.sample(BATCH))
    world.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8_000)
    steps = parser.parse_args().steps
    learned, generator = task("Pendulum-v1"), torch.Generator().manual_seed(0)
    domain = BoxActions(learned.lowest_action, learned.highest_action)
    critic = VectorCritics(learned.observation_size, domain, (64, 64), 1, generator)
    agent = BestOfMany(critic, domain, generator)
    print("it is an agent:", isinstance(agent, Agent))
    print(f"before: mean return of 10 starts {assess(agent.act, learned, 10).mean:.0f}")
    learn(agent, learned, steps)
    print(f"after {steps} steps: {assess(agent.act, learned, 10).mean:.0f}")
