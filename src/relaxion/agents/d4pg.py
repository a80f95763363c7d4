"""D4PG: Barth-Maron et al., "Distributed Distributional Deterministic Policy Gradients" (2018), with one actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from relaxion.agents.adam import Adam
from relaxion.agents.agent import ActionDomain, PolicyPenalty
from relaxion.agents.snapshots import Part, restore_snapshot, take_snapshot
from relaxion.agents.targets import descend, project_onto_support, soft_update, target_copy
from relaxion.experience.batch import Batch
from relaxion.networks.roles import CategoricalCritic, Policy
from relaxion.settings import Settings


class D4PGSettings(Settings):
    """Defaults are the paper's unless said otherwise. Noise is measured in half ranges of the action.

    How many steps of reward come before the bootstrap is a setting of the training, `n_steps`: 1 by default (the paper
    takes 5, the recipe `pendulum` 3).
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


class D4PG:
    """Deterministic policy that climbs the mean of a categorical critic; n-step returns come with the batch."""

    def __init__(
        self,
        policy: Policy,
        critic: CategoricalCritic,
        action_domain: ActionDomain,
        settings: D4PGSettings | None = None,
        policy_penalty: PolicyPenalty | None = None,
    ) -> None:
        self.settings = settings or D4PGSettings()
        self.policy, self.target_policy = policy, target_copy(policy)
        self.critic, self.target_critic = critic, target_copy(critic)
        self.policy_optimizer = Adam(policy.parameters(), self.settings.policy_learning_rate)
        self.critic_optimizer = Adam(critic.parameters(), self.settings.critic_learning_rate)
        self.action_domain = action_domain
        self.policy_penalty = policy_penalty
        self.exploration_scale = self.settings.exploration_noise
        self.n_updates = torch.zeros((), dtype=torch.int64)
        self.support = torch.linspace(
            self.settings.lowest_value, self.settings.highest_value, self.settings.n_bins
        )  # (n_bins,) values of the bins

    @torch.no_grad()
    def act(self, observations: Any) -> Any:
        return self.action_domain.bound(self.policy(observations))

    @torch.no_grad()
    def explore(self, observations: Any, generator: torch.Generator) -> Any:
        """π(s) + N(0, σ), kept inside the bounds (R1.1)."""
        noisy = self.action_domain.perturb(
            self.policy(observations), self.exploration_scale, generator, observations=observations
        )
        return self.action_domain.bound(noisy)

    def update(self, batch: Batch) -> Mapping[str, Tensor]:
        """Critic, policy, targets: once each."""
        self.n_updates += 1
        metrics = {"train/n_updates": self.n_updates.clone()}
        metrics |= self._update_critic(batch)
        metrics |= self._update_policy(batch)
        soft_update(self.target_critic, self.critic, self.settings.target_update_rate)
        soft_update(self.target_policy, self.policy, self.settings.target_update_rate)
        return metrics

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
        norm = descend(loss, self.policy_optimizer)
        return {"train/actor_loss": loss.detach(), "train/policy_gradient_norm": norm}

    def check_returns(self, returns: Tensor) -> str | None:
        """A warning when discounted returns leave the support, where the critic cannot follow; None when all fit."""
        lowest, highest = self.settings.lowest_value, self.settings.highest_value
        outside = int(((returns < lowest) | (returns > highest)).sum())
        if not outside:
            return None
        smallest, largest = float(returns.min()), float(returns.max())
        return (
            f"{outside} of {returns.numel()} discounted returns lie outside the support of D4PG's critic: returns "
            f"{smallest:.6g} to {largest:.6g}, support {lowest:g} to {highest:g}. "
            "Widen lowest_value and highest_value, or scale the reward"
        )

    def snapshot(self) -> dict[str, Tensor]:
        return take_snapshot(self._parts())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        restore_snapshot(self._parts(), tensors)

    def _parts(self) -> dict[str, Part]:
        return {
            "policy": self.policy,
            "target_policy": self.target_policy,
            "critic": self.critic,
            "target_critic": self.target_critic,
            "policy_optimizer": self.policy_optimizer,
            "critic_optimizer": self.critic_optimizer,
            "n_updates": self.n_updates,
        }
