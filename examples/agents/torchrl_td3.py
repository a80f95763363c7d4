"""TorchRL's TD3 relaxes a crystal of Al and Fe: 16 relaxations as one of TorchRL's environments."""

import argparse

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, LazyTensorStorage, TensorDictReplayBuffer, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import MLP, AdditiveGaussianModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

import relaxion.train.gym  # noqa: F401  registers the environments

WORLD = {"recipe": "alfe-cubic", "n_neighbors": 12, "moves_follow_forces": True}


class Batch(EnvBase):
    """A batch of relaxations as TorchRL wants it."""

    def __init__(self, number, **options):
        super().__init__(batch_size=[number])
        self.batch = gymnasium.make_vec(
            "relaxion/RelaxPadded-v0", num_envs=number, vectorization_mode="vector_entry_point", **options
        )
        n_seen = self.batch.single_observation_space.shape[0]
        n_action = self.batch.single_action_space.shape[0]
        seen = {"observation": Unbounded((number, n_seen)), "force_calls": Unbounded((number,), dtype=torch.int64)}
        self.observation_spec = Composite(seen, shape=[number])
        self.action_spec = Bounded(-1, 1, (number, n_action))
        self.reward_spec = Unbounded((number, 1))

    def _reset(self, tensordict=None):
        # Gymnasium's batch begins anew by itself; TorchRL asks for it, and then gets what `_step` put aside
        if tensordict is None or "_reset" not in tensordict:
            self.begun = self._seen(*self.batch.reset())
        return TensorDict(self.begun, self.batch_size)

    def _step(self, tensordict):
        seen, rewards, terminated, truncated, infos = self.batch.step(tensordict["action"].numpy())
        self.begun = self._seen(seen, infos)
        after = {name: values.clone() for name, values in self.begun.items()}
        for place in (terminated | truncated).nonzero()[0]:
            after["observation"][place] = torch.as_tensor(infos["final_obs"][place])
        after["force_calls"] = torch.as_tensor(infos.get("final_info", infos)["force_calls"])
        after["reward"] = torch.as_tensor(rewards, dtype=torch.float32)[:, None]
        after["terminated"] = torch.as_tensor(terminated)[:, None]
        after["truncated"] = torch.as_tensor(truncated)[:, None]
        after["done"] = after["terminated"] | after["truncated"]
        return TensorDict(after, self.batch_size)

    def _seen(self, seen, infos):
        return {"observation": torch.as_tensor(seen), "force_calls": torch.as_tensor(infos["force_calls"])}

    def _set_seed(self, seed):
        self.batch.reset(seed=seed)


def calls(policy, number=100):
    """Mean force calls without noise from other starts; those that do not converge count as the most allowed."""
    world = Batch(number, side="held_apart", **WORLD)
    world.set_seed(1)
    most = world.batch.unwrapped.environment.settings.max_force_calls
    with torch.no_grad():
        after = world.rollout(most, policy, break_when_any_done=False)["next"]
    first = after["done"].squeeze(-1).int().argmax(dim=1)
    each = torch.arange(number)
    converged = after["terminated"].squeeze(-1)[each, first]
    return torch.where(converged, after["force_calls"][each, first], most).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    world = Batch(16, **WORLD)
    world.set_seed(given.seed)
    n_action = world.action_spec.shape[-1]
    policy = TensorDictModule(
        nn.Sequential(MLP(out_features=n_action, num_cells=[128, 128], activation_class=nn.ReLU), nn.Tanh()),
        in_keys=["observation"],
        out_keys=["action"],
    )
    critic = ValueOperator(
        MLP(out_features=1, num_cells=[128, 128], activation_class=nn.ReLU), in_keys=["observation", "action"]
    )
    critic(policy(world.reset()))  # sizes of the first layers
    loss = TD3Loss(policy, critic, action_spec=world.action_spec_unbatched, policy_noise=0.05, noise_clip=0.1)
    loss.make_value_estimator(gamma=0.5)
    targets = SoftUpdate(loss, eps=0.995)
    policy_optimizer = torch.optim.Adam(loss.actor_network_params.flatten_keys().values(), 1e-3)
    critic_optimizer = torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values(), 1e-3)
    noise = AdditiveGaussianModule(world.action_spec, sigma_init=0.1, sigma_end=0.1)
    collector = Collector(
        world, TensorDictSequential(policy, noise), frames_per_batch=16, total_frames=given.steps,
        init_random_frames=1_008, auto_register_policy_transforms=True,
    )  # fmt: skip
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(given.steps), batch_size=128)
    number = 0
    for collected in collector:
        replay.extend(collected.reshape(-1))
        for _ in range(8 if len(replay) > 1_000 else 0):
            number += 1
            losses = loss(replay.sample())
            critic_optimizer.zero_grad()
            losses["loss_qvalue"].backward()
            critic_optimizer.step()
            if number % 2 == 0:
                policy_optimizer.zero_grad()
                loss(replay.sample())["loss_actor"].backward()
                policy_optimizer.step()
                targets.step()
    print(f"{calls(policy):.2f} force calls after {given.steps} steps")
