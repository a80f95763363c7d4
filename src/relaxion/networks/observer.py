"""From a state, and for critics a move, to the features of every atom: inputs and pairs, then the backbone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from relaxion.networks.atom_inputs import (
    N_MOVE_SCALARS,
    N_MOVE_VECTORS,
    N_STATE_SCALARS,
    N_STATE_VECTORS,
    state_inputs,
    with_move,
)
from relaxion.networks.backbone import BackboneSettings, make_backbone
from relaxion.networks.features import AtomInputs, Features
from relaxion.networks.surroundings import Surroundings, changes_along, pair_inputs, stress_along
from relaxion.structures import Move, State


class AtomNetworkSettings(BackboneSettings):
    """A network for atoms: what it sees, and how far environment information may speak."""

    environment_information: tuple[str, ...] = ()
    """Names of numbers per structure for gate and critics' tail (`environment_information.py`). None: the plain
    network, with no trace of either."""

    n_information_hidden: int = Field(default=16, ge=1)
    """Hidden units of the gate, and width of the projected information in the critics' tail."""

    largest_gate_factor: float = Field(default=10.0, gt=1)
    """The gate's factor lies between this and its inverse."""

    moves_follow_forces: bool = True
    """Proposed moves are measured in F/k, F the root mean square force around an atom: near the minimum the same answer
    gives a smaller step, and none where there is no force. False: in the greatest length allowed."""


@dataclass(frozen=True, eq=False)
class Observed:
    """What an observer answers."""

    features: Features
    inputs: AtomInputs


class Observer(nn.Module):
    """`n_networks` backbones side by side. With `sees_moves` they judge a move, without they see the state only."""

    def __init__(
        self,
        settings: BackboneSettings,
        generator: torch.Generator | None,
        *,
        n_networks: int = 1,
        sees_moves: bool = False,
    ) -> None:
        super().__init__()
        self.cutoff, self.n_radial = settings.cutoff_angstrom, settings.n_radial
        self.stiffness = settings.stiffness_ev_per_angstrom2  # eV/Å²
        self.backbone = make_backbone(
            settings,
            n_scalars=N_STATE_SCALARS + sees_moves * N_MOVE_SCALARS,
            n_vectors=N_STATE_VECTORS + sees_moves * N_MOVE_VECTORS,
            n_pair_extras=1 + sees_moves * 2,  # stress along the pair; what the move does to it
            n_networks=n_networks,
            generator=generator,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters; states are cast to it."""
        return next(self.parameters()).dtype

    def forward(self, state: State, move: Move | None = None, n_networks: int = 1) -> Observed:
        """Features of the first `n_networks` backbones."""
        surroundings = Surroundings.of(state, self.cutoff, self.n_radial, self.dtype)
        inputs = state_inputs(state, surroundings, self.stiffness)
        extras: list[Tensor] = [stress_along(state, surroundings)]
        if move is not None:
            # noise on what may not move must not matter: exploration and smoothing know no atoms
            move = move.to(self.dtype).allowed(state.structures)
            inputs = with_move(inputs, move, self.stiffness)
            extras.append(changes_along(move, surroundings, self.stiffness, inputs.force_scales))
        pairs = pair_inputs(surroundings, torch.cat(extras, dim=1))
        return Observed(self.backbone(inputs, surroundings, pairs, n_networks), inputs)
