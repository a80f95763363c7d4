"""Stable-Baselines3's TD3 relaxes a crystal of Al and Fe, beside BFGS from the same starts."""

import argparse

import gymnasium
import numpy as np
import torch
from stable_baselines3 import TD3
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv

import relaxion.train.gym  # registers the environments
from relaxion.train.judge.assessment import AssessedStarts, Assessor


class Batch(VecEnv):
    """A batch of relaxations as Stable-Baselines3 wants it."""

    def __init__(self, number, **options):
        self.batch = gymnasium.make_vec(
            "relaxion/RelaxPadded-v0", num_envs=number, vectorization_mode="vector_entry_point", **options
        )
        super().__init__(number, self.batch.single_observation_space, self.batch.single_action_space)

    def reset(self):
        return self.batch.reset(seed=self._seeds[0])[0]

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        seen, rewards, terminated, truncated, infos = self.batch.step(self.actions)
        ended = terminated | truncated
        each = [{} for _ in ended]
        for place in np.flatnonzero(ended):
            each[place] = {
                "terminal_observation": infos["final_obs"][place],
                "TimeLimit.truncated": bool(truncated[place]),
            }
        return seen, rewards.astype(np.float32), ended, each

    def close(self):
        self.batch.close()

    def get_attr(self, name, indices=None):  # noqa: ARG002  all alike, here and below
        return [getattr(self.batch, name, None)] * self.num_envs

    def set_attr(self, name, value, indices=None):
        raise NotImplementedError

    def env_method(self, name, *arguments, indices=None, **options):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper, indices=None):  # noqa: ARG002
        return [False] * self.num_envs


def calls(agent, number=100, **options):
    """Mean force calls of the agent and of BFGS, from starts that training never saw."""
    world = relaxion.train.gym.World("padded", side="held_apart", **options)
    state = world.begin(torch.Generator().manual_seed(9000), number)
    assessor = Assessor([AssessedStarts("", world.environment.potential, state.structures)], fmax=0.01)
    needed = np.full(number, world.environment.settings.max_force_calls)
    places = np.arange(number)
    while len(places):
        actions, _ = agent.predict(world.view(state), deterministic=True)
        transition = world.environment.step(state, world.move(actions, state))
        ended, converged = transition.finished, transition.discount == 0
        needed[places[converged.numpy()]] = transition.next_state.calls[converged].numpy()
        places, state = places[~ended.numpy()], transition.next_state.select(~ended)
    return needed.mean(), assessor.measure("BFGS").mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = {"recipe": "alfe-cubic", "n_neighbors": 12, "moves_follow_forces": True}
    environment = Batch(16, **options)
    environment.seed(given.seed)
    size = environment.action_space.shape
    agent = TD3(
        "MlpPolicy", environment, learning_starts=1_000, batch_size=128, gamma=0.5, train_freq=1, gradient_steps=8,
        learning_rate=1e-3, action_noise=NormalActionNoise(np.zeros(size), np.full(size, 0.1)),
        target_policy_noise=0.05, target_noise_clip=0.1, policy_kwargs={"net_arch": [128, 128]}, seed=given.seed,
        device="cpu",
    )  # fmt: skip
    agent.learn(given.steps)
    own, bfgs = calls(agent, given.starts, **options)
    print(f"{own:.2f} force calls after {given.steps} steps, BFGS {bfgs:.2f}")
