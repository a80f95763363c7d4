"""Who teaches the metric of an agent's policy: finished relaxations before the agent learns, replay while it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from relaxion.errors import CheckpointError
from relaxion.experience.environment import Environment
from relaxion.experience.structure_replay import StructureReplay
from relaxion.files import Stored
from relaxion.networks.metric.network import MetricSettings
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.training.checkpoint import stored_settings
from relaxion.training.metric_anchor import ReplaySecants, secant_errors
from relaxion.training.metric_imitation import MetricImitation, Source
from relaxion.training.metric_settings import LessonSettings
from relaxion.training.policy_penalties import Anchor

GATE = ("environment_information", "n_information_hidden", "largest_gate_factor")  # of no meaning for a metric alone
NETWORK = "network."  # of a MetricPolicy's own names


class MetricTeacher:
    """`while not teacher.done: teacher.update()`; then `anchor` goes into the policy's loss."""

    def __init__(
        self, policy: MetricPolicy, environment: Environment, settings: LessonSettings, generator: Generator
    ) -> None:
        self.policy, self.settings = policy, settings
        source = Source(environment.potential, environment.starts)
        self.imitation = MetricImitation(policy, [source], settings.imitation, generator)

    @property
    def n_updates(self) -> int:
        return self.imitation.n_updates

    @property
    def done(self) -> bool:
        return self.imitation.done

    def update(self) -> dict[str, float]:
        """One update of the metric, after a gathering where one is due; and what it showed."""
        metrics = self.imitation.update()
        if self.done:
            self.imitation.rounds = []  # nobody learns from them any more
        return metrics

    def anchor(self, replay: StructureReplay, generator: Generator) -> Anchor:
        """() -> the mean error on what replay says now; 0 where it says nothing."""
        settings = self.settings
        secants = ReplaySecants(replay, settings.lessons_per_update, settings.lesson_farthest_angstrom, generator)

        def error() -> Tensor:
            drawn = secants.sample()
            errors = torch.zeros(0) if drawn is None else secant_errors(self.policy.network, drawn)
            return errors.mean() if len(errors) else torch.zeros(())

        return error

    def snapshot(self) -> dict[str, Tensor]:
        return self.imitation.snapshot()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.imitation.restore(tensors)


def metric_in(stored: Stored, settings: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Weights of the metric in a run of another kind (agent, gate, task); None for one alike: it is taken over whole.

    `settings` are the flat ones of the new run. A CheckpointError where the old metric is of another shape.
    """
    old = stored_settings(stored)
    same = ("task", "agent", "policy", *GATE)
    if all(name in old and old[name] == settings[name] for name in same):
        return None
    prefix = f"metric.{NETWORK}" if old.get("task") == "metals" else f"agent.policy.{NETWORK}"
    found = {key.removeprefix(prefix): tensor for key, tensor in stored.tensors.items() if key.startswith(prefix)}
    if not found:
        raise CheckpointError("the old run has no metric to begin with; it must be one with policy = metric, or metals")
    names = [name for name in MetricSettings.model_fields if name not in (*GATE, "damped")]
    changes = [f"{n} (was {old[n]!r}, now {settings[n]!r})" for n in names if n in old and old[n] != settings[n]]
    if changes:
        raise CheckpointError(f"the old metric is another one, because these differ: {', '.join(changes)}")
    return found


def take_over(policy: MetricPolicy, target: nn.Module | None, metric: Mapping[str, Tensor]) -> None:
    """The metric into the policy and, where there is one, into its target."""
    policy.network.load_state_dict(dict(metric))
    follow(policy, target)


@torch.no_grad()
def follow(policy: nn.Module, target: nn.Module | None) -> None:
    """The target becomes what the policy is: it was copied before the lessons."""
    if target is not None:
        target.load_state_dict(policy.state_dict())
