"""SAC: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with the learned entropy weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from relaxion.model.roles import ActionDomain, Critics, StochasticPolicy
from relaxion.train.agents.shared import (
    PolicyPenalty,
    Snapshots,
    TwinSettings,
    adam,
    bellman_target,
    best_actions,
    descend,
    soft_update,
    target_copy,
)
from relaxion.train.experience.vectors import Batch


class SACSettings(TwinSettings):
    """Defaults are the paper's (table 1) unless said otherwise."""

    policy_learning_rate: float = Field(default=3e-4, gt=0)
    """Of Adam."""

    critic_learning_rate: float = Field(default=3e-4, gt=0)
    """Of Adam, for all critics together."""

    entropy_weight_learning_rate: float = Field(default=3e-4, gt=0)
    """Of Adam, for log α."""

    initial_entropy_weight: float = Field(default=1.0, gt=0)
    """α before the first update; it falls quickly by itself. 1 in the authors' code."""

    target_entropy_per_dimension: float = -1.0
    """H_target of each dimension of an action, in the units the policy acts in: half ranges of vectors, F/k of moves
    that follow the forces. -1 is a deviation of 0.09 of that unit."""

    action_penalty: float = Field(default=0.0, ge=0)
    """Weight of the penalty that the policy returns with each draw (R3.5): the mean square of its proposal before tanh,
    which keeps it from the bounds. 0, as in the paper."""

    target_update_rate: float = Field(default=0.005, gt=0, le=1)
    """τ: share of the online weights that flows into the target critics at each update."""


class SAC(Snapshots):
    """Stochastic policy that climbs the smallest critic while keeping its entropy near minus the dimensions."""

    PARTS = (
        "policy", "critics", "target_critics", "log_entropy_weight", "policy_optimizer", "critic_optimizer",
        "entropy_optimizer", "n_updates", "generator",
    )  # fmt: skip

    def __init__(
        self,
        policy: StochasticPolicy,
        critics: Critics,
        action_domain: ActionDomain,
        generator: torch.Generator,
        settings: SACSettings | None = None,
        policy_penalty: PolicyPenalty | None = None,
        *,
        critic_updates_before: int = 0,
    ) -> None:
        """The first updates, as many as `critic_updates_before`, are the critics' alone: the policy stays."""
        self.settings = settings or SACSettings()
        self.policy = policy
        self.critics = critics
        self.target_critics = target_copy(critics)
        self.log_entropy_weight = nn.Parameter(torch.tensor(math.log(self.settings.initial_entropy_weight)))
        self.policy_optimizer = adam(policy.parameters(), self.settings.policy_learning_rate)
        self.critic_optimizer = adam(critics.parameters(), self.settings.critic_learning_rate)
        self.entropy_optimizer = adam([self.log_entropy_weight], self.settings.entropy_weight_learning_rate)
        self.action_domain = action_domain
        self.generator = generator  # of the actions drawn inside an update
        self.policy_penalty = policy_penalty
        self.critic_updates_before = critic_updates_before
        self.n_updates = torch.zeros((), dtype=torch.int64)

    def act(self, observations: Any) -> Any:
        """The middle of the distribution."""
        return best_actions(self.policy, self.action_domain, observations)

    @torch.no_grad()
    def explore(self, observations: Any, generator: torch.Generator) -> Any:
        """A draw from the policy: it explores by itself."""
        actions, _, _ = self.policy.sample(observations, generator)
        return self.action_domain.bound(actions)

    def update(self, batch: Batch) -> Mapping[str, Tensor]:
        """Critics, policy, entropy weight, target critics: once each, all with the α from before."""
        self.n_updates += 1
        entropy_weight = self.log_entropy_weight.detach().exp()  # α, ()
        scalars = {"train/n_updates": self.n_updates.clone(), "train/ent_coef": entropy_weight}
        scalars |= self._update_critics(batch, entropy_weight)
        log_densities, policy_scalars = self._update_policy(batch, entropy_weight)
        scalars |= policy_scalars
        scalars |= self._update_entropy_weight(batch, log_densities)
        soft_update(self.target_critics, self.critics, self.settings.target_update_rate)
        return scalars

    def _update_critics(self, batch: Batch, entropy_weight: Tensor) -> dict[str, Tensor]:
        """y = r + γ (1-d) [min_i Q_i'(s', a') - α log π(a'|s')], a' ~ π; loss ½ Σ_i mean (Q_i(s, a) - y)²."""
        with torch.no_grad():
            next_actions, log_densities, _ = self.policy.sample(batch.next_observations, self.generator)
            next_values = self.target_critics(batch.next_observations, next_actions).amin(dim=1)
            soft_values = next_values - entropy_weight * log_densities
            targets = bellman_target(batch.rewards, batch.discounts, soft_values)  # (batch,)
        values = self.critics(batch.observations, batch.actions)  # (batch, n_critics)
        loss = 0.5 * (values - targets[:, None]).square().mean(dim=0).sum()
        norm = descend(loss, self.critic_optimizer)
        return {
            "train/critic_loss": loss.detach(),
            "train/critic_gradient_norm": norm,
            "train/q_mean": values.detach().mean(),
            "train/target_mean": targets.mean(),
        }

    def _update_policy(self, batch: Batch, entropy_weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss mean (α log π(a|s) - min_i Q_i(s, a) + penalty), a ~ π anew."""
        actions, log_densities, penalties = self.policy.sample(batch.observations, self.generator)
        values = self.critics(batch.observations, actions).amin(dim=1)
        loss = (entropy_weight * log_densities - values + penalties).mean()
        if self.policy_penalty is not None:
            loss = loss + self.policy_penalty(batch, actions).mean()
        moves = int(self.n_updates) > self.critic_updates_before
        norm = descend(loss, self.policy_optimizer, moves=moves)
        log_densities = log_densities.detach()  # (batch,)
        scalars = {
            "train/actor_loss": loss.detach(),
            "train/policy_gradient_norm": norm,
            "train/entropy": -log_densities.mean(),
        }
        return log_densities, scalars

    def _update_entropy_weight(self, batch: Batch, log_densities: Tensor) -> dict[str, Tensor]:
        """Loss mean (-log α · (log π + H_target)), H_target = -dimensions of each single action by default."""
        per_dimension = self.settings.target_entropy_per_dimension
        dimensions = self.action_domain.dimensions
        target_entropy = per_dimension * dimensions(batch.observations)  # (batch,)
        loss = -self.log_entropy_weight * (log_densities + target_entropy).mean()
        descend(loss, self.entropy_optimizer)
        return {"train/ent_coef_loss": loss.detach(), "train/target_entropy": target_entropy.mean()}
