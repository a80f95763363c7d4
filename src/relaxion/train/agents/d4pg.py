"""D4PG: Barth-Maron et al., "Distributed Distributional Deterministic Policy Gradients" (2018), with one actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from relaxion.model.roles import ActionDomain, CategoricalCritic, Policy
from relaxion.settings import Settings
from relaxion.train.agents.shared import (
    PolicyPenalty,
    Snapshots,
    adam,
    best_actions,
    descend,
    noisy_actions,
    project_onto_support,
    soft_update,
    target_copy,
)
from relaxion.train.experience.vectors import Batch


class D4PGSettings(Settings):
    """Defaults are the paper's unless said otherwise. Noise is measured in half ranges of the action.

    How many steps of reward come before the bootstrap is a setting of the training, `n_steps`: 5 by
    default, as in the paper; the recipes take 3.
    """

    policy_learning_rate: float = Field(default=1e-4, gt=0)
    """Of Adam."""

    critic_learning_rate: float = Field(default=1e-4, gt=0)
    """Of Adam."""

    target_update_rate: float = Field(default=0.005, gt=0, le=1)
    """τ: share of the online weights that flows into the targets at each update. TD3's; the paper copies the whole
    network every 100 updates."""

    n_bins: int = Field(default=51, ge=2)
    """Bins of the value distribution."""

    lowest_value: float = -150.0
    """Smallest discounted return the critic can express, units of the reward. Acme's; depends on the task: set it."""

    highest_value: float = 150.0
    """Largest discounted return the critic can express, units of the reward. Acme's; depends on the task: set it."""

    exploration_noise: float = Field(default=0.3, ge=0)
    """σ while collecting, half ranges, until a schedule sets `exploration_scale`. Paper, appendix."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lowest_value >= self.highest_value:
            raise ValueError(f"lowest_value {self.lowest_value} must lie below highest_value {self.highest_value}")
        return self


class D4PG(Snapshots):
    """Deterministic policy that climbs the mean of a categorical critic; n-step returns come with the batch."""

    PARTS = (
        "policy", "target_policy", "critic", "target_critic", "policy_optimizer", "critic_optimizer",
        "n_updates",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        critic: CategoricalCritic,
        action_domain: ActionDomain,
        settings: D4PGSettings | None = None,
        policy_penalty: PolicyPenalty | None = None,
        *,
        critic_updates_before: int = 0,
    ) -> None:
        """The first updates, as many as `critic_updates_before`, are the critics' alone: the policy stays."""
        self.settings = settings or D4PGSettings()
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
        self.support = torch.linspace(
            self.settings.lowest_value, self.settings.highest_value, self.settings.n_bins
        )  # (n_bins,) values of the bins

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
        """Target: r + γⁿ (1-d) z, z ~ Z'(s', π'(s')), on the bins; loss -mean Σ target · log_softmax(critic)."""
        with torch.no_grad():
            next_actions = self.target_policy(batch.next_observations)
            next_probabilities = softmax(self.target_critic(batch.next_observations, next_actions), dim=1)
            targets = project_onto_support(batch.rewards, batch.discounts, next_probabilities, self.support)
        log_probabilities = log_softmax(self.critic(batch.observations, batch.actions), dim=1)  # (batch, n_bins)
        loss = -(targets * log_probabilities).sum(dim=1).mean()
        norm = descend(loss, self.critic_optimizer)
        return {
            "train/critic_loss": loss.detach(),
            "train/critic_gradient_norm": norm,
            "train/q_mean": (log_probabilities.detach().exp() @ self.support).mean(),
            "train/target_mean": (targets @ self.support).mean(),
            "train/support_edge_mass": (targets[:, 0] + targets[:, -1]).mean(),
        }

    def _update_policy(self, batch: Batch) -> dict[str, Tensor]:
        """Loss -mean E[Z(s, π(s))], with a fresh action."""
        actions = self.policy(batch.observations)
        probabilities = softmax(self.critic(batch.observations, actions), dim=1)  # (batch, n_bins)
        loss = -(probabilities @ self.support).mean()
        if self.policy_penalty is not None:
            loss = loss + self.policy_penalty(batch, actions).mean()
        moves = int(self.n_updates) > self.critic_updates_before
        norm = descend(loss, self.policy_optimizer, moves=moves)
        return {"train/actor_loss": loss.detach(), "train/policy_gradient_norm": norm}

    def check_returns(self, returns: Tensor) -> str | None:
        """A warning when discounted returns leave the support, where the critic cannot follow; None when all fit."""
        lowest = self.settings.lowest_value
        highest = self.settings.highest_value
        outside = int(((returns < lowest) | (returns > highest)).sum())
        if not outside:
            return None
        smallest = float(returns.min())
        largest = float(returns.max())
        return (
            f"{outside} of {returns.numel()} discounted returns lie outside the support of D4PG's critic: returns "
            f"{smallest:.6g} to {largest:.6g}, support {lowest:g} to {highest:g}. "
            "Widen lowest_value and highest_value, or scale the reward"
        )
