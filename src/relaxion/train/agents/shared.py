"""What every agent looks like, and what agents share: targets, exploration, a step down a loss, snapshots."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Adam

from relaxion.errors import RestartError, SettingsError
from relaxion.model.roles import ActionDomain, Policy
from relaxion.settings import Settings
from relaxion.train.experience.vectors import Batch

Network = TypeVar("Network", bound=nn.Module)
Part: TypeAlias = nn.Module | Adam | Tensor | Generator
"""Something of an agent that changes while it learns."""
PolicyPenalty: TypeAlias = Callable[[Batch, Any], Tensor]
"""An extra term of the policy's loss: batch and the policy's fresh actions -> (batch,) or (), differentiable."""


@runtime_checkable
class Agent(Protocol):
    """Acts, explores and learns. Updates touch a batch only, never an environment (R1.4)."""

    def act(self, observations: Any) -> Any:
        """The best known action, inside the bounds. No exploration, no gradient."""

    def explore(self, observations: Any, generator: torch.Generator) -> Any:
        """What to try while collecting, inside the bounds. No gradient."""

    def update(self, batch: Batch) -> Mapping[str, Tensor]:
        """Learn from one batch; scalars for the log as tensors without gradient, so that nobody waits for `.item()`."""
        ...

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all that changes while learning: networks, targets, Adam's moments, counter, own generator."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; raises RestartError on missing, left-over or misshapen tensors."""


class TwinSettings(Settings):
    """Of an agent with several critics."""

    younger = ("n_critics",)

    n_critics: int = Field(default=2, ge=2)
    """Critics side by side; the smallest of their answers counts. 2 in the papers of TD3 and SAC."""


class LearningAgent(Agent, Protocol):
    """An agent with the parts that every one here has."""

    policy: Any
    policy_optimizer: Adam
    critic_optimizer: Adam
    action_domain: Any


@torch.no_grad()
def best_actions(policy: Policy, domain: ActionDomain, observations: Any) -> Any:
    """π(s), kept inside the bounds."""
    return domain.bound(policy(observations))


@torch.no_grad()
def noisy_actions(
    policy: Policy,
    domain: ActionDomain,
    observations: Any,
    scale: float,
    generator: Generator,
    clip: float | None = None,
) -> Any:
    """π(s) + clip(N(0, σ), -c, c), kept inside the bounds (R1.1)."""
    return domain.bound(domain.perturb(policy(observations), scale, generator, clip, observations))


def bellman_target(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """y = r + γ (1 - d) V(s'); `discounts` already holds γ (1 - d), or γⁿ (1 - d) for n steps. (batch,)"""
    return torch.addcmul(rewards, discounts, next_values)


def project_onto_support(rewards: Tensor, discounts: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """The distribution of r + γ z, z ~ `probabilities`, moved onto evenly spaced bins (R5.3). (batch, n_bins)

    Bin i takes Σ_j p_j · max(0, 1 - |b_j - i|), b_j the place of r + γ z_j counted in bins and kept within the ends.
    Places, not values: differences of neighbouring places are exact in float32, so no mass is lost or made, on
    grid points and beyond the ends too (the usual floor and ceil give both neighbours nothing there).
    """
    n_bins = len(support)
    if probabilities.shape[1] != n_bins:
        raise SettingsError(f"the critic has {probabilities.shape[1]} bins, the support {n_bins}: make n_bins agree")
    spacing = (support[-1] - support[0]) / (n_bins - 1)
    moved = rewards[:, None] + discounts[:, None] * support  # (batch, n_bins) values
    places = ((moved - support[0]) / spacing).clamp(0, n_bins - 1)  # (batch, n_bins)
    numbers = torch.arange(n_bins, dtype=places.dtype, device=places.device)
    shares = (1 - (places[:, None, :] - numbers[:, None]).abs()).clamp_min(0)  # (batch, to bin, from bin)
    return torch.bmm(shares, probabilities[:, :, None])[:, :, 0]


def target_copy(network: Network) -> Network:
    """A copy that follows by `soft_update` only."""
    return copy.deepcopy(network).requires_grad_(False)


@torch.no_grad()
def soft_update(target: nn.Module, online: nn.Module, rate: float) -> None:
    """θ' ← τ θ + (1 - τ) θ'."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, rate)


def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> Adam:
    """torch's Adam, with its memory there from the beginning: a snapshot may be taken before the first step."""
    optimizer = Adam(parameters, lr=learning_rate, fused=True)
    for parameter in parameters_of(optimizer):
        mean = torch.zeros_like(parameter)
        square = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": mean, "exp_avg_sq": square}
    return optimizer


def scale_learning_rates(optimizers: Iterable[Adam], share: float) -> None:
    """A share of the rates that they were made with."""
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = share * optimizer.defaults["lr"]


def parameters_of(optimizer: Adam) -> list[nn.Parameter]:
    """What it steps."""
    return optimizer.param_groups[0]["params"]


def backward(loss: Tensor, optimizer: Adam) -> list[Tensor]:
    """Gradients of the optimizer's own parameters, left in their `grad` for its step; zero where the loss has none.

    Gradients exist only for the parameters that step: the critics stay untouched by the policy's loss (R2.5), no
    leftovers can meet the policy's own (R4.2), and the work for all others is saved. They are laid out in memory as the
    parameters are, by which the fused kernel pairs them; those of `torch.autograd.grad` need not be.
    """
    parameters = parameters_of(optimizer)
    forget_gradients(parameters)
    loss.backward(inputs=parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """As `optimizer.zero_grad()` does, which takes ten times longer: 1 % of a TD3 update on vectors."""
    for parameter in parameters:
        parameter.grad = None


def descend(loss: Tensor, optimizer: Adam, *, moves: bool = True) -> Tensor:
    """One step down the loss for the optimizer's own parameters; the norm of the gradient, ().

    With `moves=False` the parameters stay where they are; only Adam's moments change.
    """
    norm = get_total_norm(backward(loss, optimizer))
    group = optimizer.param_groups[0]
    learning_rate = group["lr"]
    group["lr"] = learning_rate if moves else 0.0
    optimizer.step()
    group["lr"] = learning_rate
    forget_gradients(group["params"])
    return norm


def take_snapshot(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Copies of all tensors in the parts, named `part.tensor`. No pickle anywhere."""
    return {name: tensor.detach().clone() for name, tensor in _named_tensors(parts).items()}


@torch.no_grad()
def restore_snapshot(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors back into the parts, exact to the bit. Nothing is written unless everything fits."""
    present = _named_tensors(parts)
    _check(present, tensors)
    for name, tensor in present.items():
        tensor.copy_(tensors[name])
    for name, part in parts.items():
        if isinstance(part, Generator):  # its tensor is only a copy
            part.set_state(present[name])
        elif isinstance(part, Adam):  # torch counts for each parameter, snapshots once for all
            for memory in part.state.values():
                memory["step"].copy_(present[f"{name}.n_steps"])


class Snapshots:
    """Of an agent that names the parts of it that change while it learns."""

    PARTS: ClassVar[tuple[str, ...]]

    def snapshot(self) -> dict[str, Tensor]:
        return take_snapshot({name: getattr(self, name) for name in self.PARTS})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        restore_snapshot({name: getattr(self, name) for name in self.PARTS}, tensors)


def _named_tensors(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, part in parts.items():
        match part:
            case nn.Module():
                named |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
            case Adam():
                named |= {f"{name}.{key}": tensor for key, tensor in _memory(part).items()}
            case Generator():
                named[name] = part.get_state()
            case Tensor():
                named[name] = part
    return named


def _memory(optimizer: Adam) -> dict[str, Tensor]:
    """What Adam remembers, under the names that checkpoints have for it."""
    memories = [optimizer.state[parameter] for parameter in parameters_of(optimizer)]
    named = {"n_steps": memories[0]["step"]}
    for number, memory in enumerate(memories):
        named |= {f"means.{number}": memory["exp_avg"], f"squares.{number}": memory["exp_avg_sq"]}
    return named


def _check(present: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    complaints = [f"'{name}' is missing" for name in present if name not in tensors]
    complaints += [f"'{name}' belongs to no part of this agent" for name in tensors if name not in present]
    for name, expected in present.items():
        got = tensors.get(name, expected)
        if expected.shape != got.shape or expected.dtype != got.dtype:
            complaints.append(
                f"'{name}' is {tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
            )
    if complaints:
        more = f" and {len(complaints) - 5} more" if len(complaints) > 5 else ""
        raise RestartError(
            f"the snapshot does not fit the agent: {'; '.join(complaints[:5])}{more}. "
            "Was it made by another algorithm or with other network sizes?"
        )


# ---- what to try while collecting: random actions first, then the policy's with noise that a schedule turns down


@runtime_checkable
class NoisyExplorer(Protocol):
    """An agent whose noise can be set, in half ranges of the action."""

    exploration_scale: float

    def explore(self, observations: Any, generator: Generator) -> Any: ...


@dataclass(frozen=True)
class LinearSchedule:
    """From `start` to `end` within `steps`, then `end` for good. Constant where both are the same."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        share = min(max(step / self.steps, 0.0), 1.0)
        return (1 - share) * self.start + share * self.end  # this form ends at `end` exactly


class Exploration:
    """Uniform actions until `warmup_steps` transitions are stored, then the agent's own exploration.

    With `random_warmup=False` the agent explores from the first step on: for policies that are of use untrained.
    Where the agent adds Gaussian noise, its size follows `noise`. It is a function of the step alone, so a resumed
    run needs no memory of it.
    """

    def __init__(
        self,
        agent: Any,
        domain: Any,
        generator: Generator,
        *,
        warmup_steps: int,
        noise: LinearSchedule | None,
        random_warmup: bool = True,
    ) -> None:
        self.agent = agent
        self.domain = domain
        self.generator = generator
        self.warmup_steps = warmup_steps
        self.noise = noise
        self.random_warmup = random_warmup

    def warming_up(self, n_stored: int) -> bool:
        """While true, collect only (R1.2)."""
        return n_stored < self.warmup_steps

    def at_random(self, n_stored: int) -> bool:
        """While true, actions are chance's and not the agent's."""
        return self.random_warmup and self.warming_up(n_stored)

    def __call__(self, observations: Any, n_stored: int, step: int) -> Any:
        """Actions within the bounds, in the environment's units."""
        if self.at_random(n_stored):
            return self.domain.random(observations, self.generator)
        if self.noise is not None and isinstance(self.agent, NoisyExplorer):
            self.agent.exploration_scale = self.noise(step)
        return self.agent.explore(observations, self.generator)
