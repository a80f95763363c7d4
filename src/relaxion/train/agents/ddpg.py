"""DDPG: Lillicrap et al., "Continuous control with deep reinforcement learning" (2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from relaxion.model.roles import ActionDomain, Critics, Policy
from relaxion.settings import Settings
from relaxion.train.agents.shared import (
    PolicyPenalty,
    Snapshots,
    adam,
    bellman_target,
    best_actions,
    descend,
    noisy_actions,
    soft_update,
    target_copy,
)
from relaxion.train.experience.vectors import Batch


class DDPGSettings(Settings):
    """Defaults are the paper's (section 7) unless said otherwise. Noise is measured in half ranges of the action."""

    policy_learning_rate: float = Field(default=1e-4, gt=0)
    """Of Adam."""

    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """Of Adam; ten times the policy's, so that values are learned before they are climbed."""

    target_update_rate: float = Field(default=1e-3, gt=0, le=1)
    """τ: share of the online weights that flows into the targets at each update."""

    exploration_noise: float = Field(default=0.1, ge=0)
    """σ while collecting, half ranges, until a schedule sets `exploration_scale`. TD3's; plain Gaussian noise
    does as well as the paper's Ornstein-Uhlenbeck process (Fujimoto et al. 2018)."""


class DDPG(Snapshots):
    """Deterministic policy that climbs one critic; both have slow copies for the targets."""

    PARTS = (
        "policy", "target_policy", "critic", "target_critic", "policy_optimizer", "critic_optimizer",
        "n_updates",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        critic: Critics,
        action_domain: ActionDomain,
        settings: DDPGSettings | None = None,
        policy_penalty: PolicyPenalty | None = None,
        *,
        critic_updates_before: int = 0,
    ) -> None:
        """The first updates, as many as `critic_updates_before`, are the critics' alone: the policy stays."""
        self.settings = settings or DDPGSettings()
        self.policy = policy
        self.target_policy = target_copy(policy)
        self.critic = critic
        self.target_critic = target_copy(critic)
        self.policy_optimizer = adam(policy.parameters(), self.settings.policy_learning_rate)
        self.critic_optimizer = adam(critic.parameters(), self.settings.critic_learning_rate)
        self.action_domain = action_domain
        self.policy_penalty = policy_penalty
        self.critic_updates_before = critic_updates_before
        self.exploration_scale = self.settings.exploration_noise
        self.n_updates = torch.zeros((), dtype=torch.int64)

    def act(self, observations: Any) -> Any:
        return best_actions(self.policy, self.action_domain, observations)

    def explore(self, observations: Any, generator: torch.Generator) -> Any:
        return noisy_actions(self.policy, self.action_domain, observations, self.exploration_scale, generator)

    def update(self, batch: Batch) -> Mapping[str, Tensor]:
        """Critic, policy, targets: once each."""
        self.n_updates += 1
        scalars = {"train/n_updates": self.n_updates.clone()}
        scalars |= self._update_critic(batch)
        scalars |= self._update_policy(batch)
        soft_update(self.target_critic, self.critic, self.settings.target_update_rate)
        soft_update(self.target_policy, self.policy, self.settings.target_update_rate)
        return scalars

    def _update_critic(self, batch: Batch) -> dict[str, Tensor]:
        """y = r + γ (1-d) Q'(s', π'(s')); loss mean (Q(s, a) - y)²."""
        with torch.no_grad():
            next_actions = self.target_policy(batch.next_observations)
            next_values = self.target_critic.first(batch.next_observations, next_actions)
            targets = bellman_target(batch.rewards, batch.discounts, next_values)  # (batch,)
        values = self.critic.first(batch.observations, batch.actions)  # (batch,)
        loss = (values - targets).square().mean()
        norm = descend(loss, self.critic_optimizer)
        return {
            "train/critic_loss": loss.detach(),
            "train/critic_gradient_norm": norm,
            "train/q_mean": values.detach().mean(),
            "train/target_mean": targets.mean(),
        }

    def _update_policy(self, batch: Batch) -> dict[str, Tensor]:
        """Loss -mean Q(s, π(s)), with a fresh action."""
        actions = self.policy(batch.observations)
        loss = -self.critic.first(batch.observations, actions).mean()
        if self.policy_penalty is not None:
            loss = loss + self.policy_penalty(batch, actions).mean()
        moves = int(self.n_updates) > self.critic_updates_before
        norm = descend(loss, self.policy_optimizer, moves=moves)
        return {"train/actor_loss": loss.detach(), "train/policy_gradient_norm": norm}
