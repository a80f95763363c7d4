"""TD3: Fujimoto, van Hoof, Meger, "Addressing Function Approximation Error in Actor-Critic Methods" (2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from relaxion.model.roles import ActionDomain, Critics, Policy
from relaxion.train.agents.shared import (
    PolicyPenalty,
    Snapshots,
    TwinSettings,
    adam,
    bellman_target,
    best_actions,
    descend,
    noisy_actions,
    soft_update,
    target_copy,
)
from relaxion.train.experience.vectors import Batch


class TD3Settings(TwinSettings):
    """Defaults are the paper's. Noise is measured in half ranges of the action."""

    policy_learning_rate: float = Field(default=1e-3, gt=0)
    """Of Adam. Paper, section 6.1; the authors' later code takes 3e-4."""

    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """Of Adam, for both critics together. Paper, section 6.1."""

    target_update_rate: float = Field(default=0.005, gt=0, le=1)
    """τ: share of the online weights that flows into the targets at each delayed update. Paper, section 6.1."""

    policy_delay: int = Field(default=2, ge=1)
    """Critic updates per policy update: the policy waits for better values. Paper, section 5.2."""

    target_noise: float = Field(default=0.2, ge=0)
    """σ~ of the target policy smoothing, half ranges. Paper, section 6.1."""

    target_noise_clip: float = Field(default=0.5, ge=0)
    """c: the smoothing noise reaches no farther, half ranges. Paper, section 6.1."""

    exploration_noise: float = Field(default=0.1, ge=0)
    """σ while collecting, half ranges, until a schedule sets `exploration_scale`. Paper, section 6.1."""


class TD3(Snapshots):
    """Deterministic policy, the smaller of two critics, delayed policy updates, smoothed targets."""

    PARTS = (
        "policy", "target_policy", "critics", "target_critics", "policy_optimizer", "critic_optimizer",
        "n_updates", "generator",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        critics: Critics,
        action_domain: ActionDomain,
        generator: torch.Generator,
        settings: TD3Settings | None = None,
        policy_penalty: PolicyPenalty | None = None,
        *,
        critic_updates_before: int = 0,
    ) -> None:
        """The first updates, as many as `critic_updates_before`, are the critics' alone: the policy stays."""
        self.settings = settings or TD3Settings()
        self.policy = policy
        self.target_policy = target_copy(policy)
        self.critics = critics
        self.target_critics = target_copy(critics)
        self.policy_optimizer = adam(policy.parameters(), self.settings.policy_learning_rate)
        self.critic_optimizer = adam(critics.parameters(), self.settings.critic_learning_rate)
        self.action_domain = action_domain
        self.generator = generator  # of the smoothing noise
        self.policy_penalty = policy_penalty
        self.critic_updates_before = critic_updates_before
        self.exploration_scale = self.settings.exploration_noise
        self.n_updates = torch.zeros((), dtype=torch.int64)

    def act(self, observations: Any) -> Any:
        return best_actions(self.policy, self.action_domain, observations)

    def explore(self, observations: Any, generator: torch.Generator) -> Any:
        return noisy_actions(self.policy, self.action_domain, observations, self.exploration_scale, generator)

    def update(self, batch: Batch) -> Mapping[str, Tensor]:
        """One update of the critics; every `policy_delay`-th also of the policy and of all targets."""
        self.n_updates += 1
        scalars = {"train/n_updates": self.n_updates.clone()}
        scalars |= self._update_critics(batch)
        if int(self.n_updates) % self.settings.policy_delay == 0:
            scalars |= self._update_policy(batch)
            soft_update(self.target_critics, self.critics, self.settings.target_update_rate)
            soft_update(self.target_policy, self.policy, self.settings.target_update_rate)
        return scalars

    def _update_critics(self, batch: Batch) -> dict[str, Tensor]:
        """y = r + γ (1-d) min_i Q_i'(s', a~); loss Σ_i mean (Q_i(s, a) - y)²."""
        with torch.no_grad():
            targets = batch.rewards
            if batch.discounts.any():  # else nobody looks ahead
                next_actions = self._smoothed_target_actions(batch.next_observations)
                next_values = self.target_critics(batch.next_observations, next_actions).amin(dim=1)
                targets = bellman_target(batch.rewards, batch.discounts, next_values)  # (batch,)
        values = self.critics(batch.observations, batch.actions)  # (batch, n_critics)
        loss = (values - targets[:, None]).square().mean(dim=0).sum()
        norm = descend(loss, self.critic_optimizer)
        return {
            "train/critic_loss": loss.detach(),
            "train/critic_gradient_norm": norm,
            "train/q_mean": values.detach().mean(),
            "train/target_mean": targets.mean(),
        }

    def _smoothed_target_actions(self, next_observations: Any) -> Any:
        """a~ = π'(s') + clip(N(0, σ~), -c, c), kept inside the bounds."""
        noise = self.settings.target_noise
        clip = self.settings.target_noise_clip
        return noisy_actions(self.target_policy, self.action_domain, next_observations, noise, self.generator, clip)

    def _update_policy(self, batch: Batch) -> dict[str, Tensor]:
        """Loss -mean Q_1(s, π(s)): a fresh action, and only the first critic guides it."""
        actions = self.policy(batch.observations)
        loss = -self.critics.first(batch.observations, actions).mean()
        if self.policy_penalty is not None:
            loss = loss + self.policy_penalty(batch, actions).mean()
        moves = int(self.n_updates) > self.critic_updates_before
        norm = descend(loss, self.policy_optimizer, moves=moves)
        return {"train/actor_loss": loss.detach(), "train/policy_gradient_norm": norm}
