"""Critics for atoms: a state and a move in, values per structure out, pooled over the atoms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from relaxion.model.actions import check_names, environment_information
from relaxion.model.backbone import N_INFORMATION_HIDDEN, AtomNetworkSettings, Features, Observer
from relaxion.model.layers import Generator, StackedLinear, StackedMLP, structure_mean, tamed
from relaxion.model.roles import CategoricalCritic, Critics
from relaxion.structures import Move, State, Structures


class PooledValue(nn.Module):
    """Each atom's opinion, averaged over the structure.

    The mean, not a sum: reward and return are those of a structure, whatever its size, and a repeated cell must be
    worth the same.
    """

    def __init__(self, channels: int, n_answers: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.hidden = StackedLinear(2 * channels, channels, n_networks, generator)
        self.answer = StackedLinear(channels, n_answers, n_networks, generator)

    def forward(self, features: Features, structures: Structures) -> tuple[Tensor, Tensor]:
        """Pooled features (n_networks, n_structures, channels) and answers (n_networks, n_structures, n_answers)."""
        sizes = torch.sqrt(features.vectors.square().sum(dim=3) + 1e-6)  # vectors speak too, by their lengths
        opinions = silu(self.hidden(tamed(torch.cat([features.scalars, sizes], dim=2))))
        pooled = structure_mean(opinions.transpose(0, 1), structures).transpose(0, 1)
        return pooled, self.answer(pooled)


class LateFusion(nn.Module):
    """Pooled graph features and pooled answer beside projected environment information, through a tail (R6.3)."""

    def __init__(self, settings: AtomNetworkSettings, n_answers: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.names = settings.environment_information
        check_names(self.names)
        width = N_INFORMATION_HIDDEN
        channels = settings.channels
        self.project = StackedLinear(len(self.names), width, n_networks, generator)
        self.tail = StackedMLP(channels + n_answers + width, channels, n_answers, n_networks, generator)

    def forward(self, state: State, pooled: Tensor, answers: Tensor) -> Tensor:
        information = environment_information(state, self.names, pooled.dtype)
        projected = silu(self.project(information.expand(len(pooled), -1, -1)))
        return self.tail(torch.cat([pooled, answers, projected], dim=2))


class _ValueNetworks(nn.Module):
    """`n_networks` separate networks of state and move, run side by side; without information there is no tail."""

    def __init__(self, settings: AtomNetworkSettings, n_answers: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.n_networks = n_networks
        self.observer = Observer(settings, generator, n_networks=n_networks, sees_moves=True)
        self.pooled = PooledValue(settings.channels, n_answers, n_networks, generator)
        # last, so that it takes no draws from the others
        self.fusion = (
            LateFusion(settings, n_answers, n_networks, generator) if settings.environment_information else None
        )

    def forward(self, state: State, move: Move, n_networks: int) -> Tensor:
        """Answers of the first `n_networks`, (n_networks, n_structures, n_answers)."""
        features, _ = self.observer(state, move, n_networks)
        pooled, answers = self.pooled(features, state.structures)
        return answers if self.fusion is None else self.fusion(state, pooled, answers)


class AtomCritics(Critics):
    """`n_critics` values of state and move: separate parameters, one pass over the pairs."""

    def __init__(
        self, settings: AtomNetworkSettings | None = None, n_critics: int = 2, generator: Generator = None
    ) -> None:
        super().__init__()
        self.settings = settings or AtomNetworkSettings()
        self.networks = _ValueNetworks(self.settings, 1, n_critics, generator)

    def forward(self, observations: State, actions: Move) -> Tensor:
        return self.networks(observations, actions, self.networks.n_networks)[:, :, 0].T  # (n_structures, n_critics)

    def first(self, observations: State, actions: Move) -> Tensor:
        return self.networks(observations, actions, 1)[0, :, 0]  # (n_structures,)


class AtomCategoricalCritic(CategoricalCritic):
    """Logits of `n_bins` value bins for state and move."""

    def __init__(
        self, settings: AtomNetworkSettings | None = None, n_bins: int = 51, generator: Generator = None
    ) -> None:
        super().__init__()
        self.settings = settings or AtomNetworkSettings()
        self.networks = _ValueNetworks(self.settings, n_bins, 1, generator)

    def forward(self, observations: State, actions: Move) -> Tensor:
        return self.networks(observations, actions, 1)[0]  # (n_structures, n_bins)
