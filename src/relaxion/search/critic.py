"""Twin critics: networks that look at a trial structure, not relaxed, and say how its energy will change by the hop.

A network gives every atom a number; their sum in the trial minus their sum in the minimum where the hop begins is the
change in eV. So the change of a hop to nowhere is exactly zero, and what both structures have in common cancels. Atoms
that the hop displaced are marked. Distances enter as invariants, so rotating or mirroring a structure, or numbering its
atoms in another order, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor, nn

from relaxion.errors import PolicyError
from relaxion.files import Format
from relaxion.model.backbone import AtomInputs, BackboneSettings, LightBackbone
from relaxion.model.layers import N_DESCRIPTORS, StackedMLP, Surroundings, descriptors
from relaxion.search.hops import Hops
from relaxion.structures import Evaluation, State, Structures
from relaxion.structures.structures import per_structure_sum

KIND = "search critic"
FORMAT = Format(1, PolicyError, advice="train it again, or use the one that ships")
N_TWINS = 2
CUTOFF_ANGSTROM = 4.5
N_RADIAL = 12
DISPLACED_ANGSTROM = 0.01  # an atom farther from its place than this is marked


@dataclass(frozen=True)
class CriticSettings:
    """Size of each of the twins."""

    channels: int = 16
    n_layers: int = 2


@dataclass(frozen=True, eq=False)
class HopBatch:
    """Minima and trials of some hops: first all minima, then all trials, in one set of structures."""

    structures: Structures
    displaced: Tensor  # (n_atoms,) bool, atoms of trials that the hop moved
    origins: Tensor  # (n_trials,) int64, which minimum a trial comes from
    n_minima: int


class Critic(nn.Module):
    """Two networks of equal shape with parameters of their own."""

    def __init__(self, settings: CriticSettings, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.settings = settings
        backbone = BackboneSettings(
            channels=settings.channels,
            n_layers=settings.n_layers,
            cutoff_angstrom=CUTOFF_ANGSTROM,
            n_radial=N_RADIAL,
        )
        self.backbone = LightBackbone(backbone, N_DESCRIPTORS + 1, 1, 0, N_TWINS, generator)
        self.answer = StackedMLP(settings.channels, settings.channels, 1, N_TWINS, generator)

    def forward(self, batch: HopBatch) -> Tensor:
        """(2, n_trials) eV, what each of the twins expects."""
        structures = batch.structures
        dtype = torch.float32
        state = State.without_past(structures, _no_forces(structures), 1.0)
        around = Surroundings.of(state, CUTOFF_ANGSTROM, N_RADIAL, dtype)
        elements = descriptors(structures.atomic_numbers, dtype)
        inputs = AtomInputs(
            scalars=torch.cat([elements, batch.displaced[:, None].to(dtype)], dim=1),
            vectors=elements.new_zeros((len(elements), 1, 3)),
            force_scales=elements.new_ones(len(elements)),
        )
        features = self.backbone(inputs, around, around.radial, N_TWINS)
        of_atoms = self.answer(features.scalars)[:, :, 0]  # (2, n_atoms) eV
        sums = per_structure_sum(of_atoms.T, structures.structure_index, structures.n_structures).T
        return sums[:, batch.n_minima :] - sums[:, batch.origins]

    @torch.no_grad()
    def changes(self, minima: Sequence[Atoms], trials: Sequence[Atoms], origins: Sequence[int]) -> np.ndarray:
        """(2, n_trials) eV; `origins`: from which of the minima each trial comes."""
        return self(batch_of_atoms(minima, trials, origins)).double().numpy()


def _no_forces(structures: Structures) -> Evaluation:
    """A state wants an evaluation; critics look before any force call."""
    return Evaluation(
        energies=structures.positions.new_zeros(structures.n_structures),
        forces=torch.zeros_like(structures.positions),
        stresses=None,
    )


def batch_of_atoms(minima: Sequence[Atoms], trials: Sequence[Atoms], origins: Sequence[int]) -> HopBatch:
    everything = [*minima, *trials]
    moves = [
        np.abs(trial.positions - minima[origin].positions).max(axis=1) > DISPLACED_ANGSTROM
        for trial, origin in zip(trials, origins, strict=True)
    ]
    still = [np.zeros(len(atoms), bool) for atoms in minima]
    structures = _packed(
        np.concatenate([atoms.numbers for atoms in everything]),
        np.concatenate([atoms.positions for atoms in everything]),
        np.array([atoms.cell.array for atoms in everything]),
        np.array([atoms.pbc for atoms in everything]),
        np.array([len(atoms) for atoms in everything]),
    )
    displaced = torch.from_numpy(np.concatenate([*still, *moves]))
    return HopBatch(structures, displaced, torch.tensor(list(origins), dtype=torch.int64), len(minima))


def batch_of_hops(hops: Hops, chosen: np.ndarray) -> HopBatch:
    """Of the hops with these numbers; a minimum from which several of them begin comes once."""
    _, firsts, origins = np.unique(hops.states[chosen], return_index=True, return_inverse=True)
    minima = chosen[firsts]
    rows = _rows(hops, chosen)
    of_minima = _rows(hops, minima)
    moved = np.abs(hops.trials[rows] - hops.before[rows]).max(axis=1) > DISPLACED_ANGSTROM
    structures = _packed(
        hops.numbers[np.concatenate([of_minima, rows])],
        np.concatenate([hops.before[of_minima], hops.trials[rows]]).astype(np.float64),
        np.concatenate([hops.cells[minima, 0], hops.cells[chosen, 1]]).astype(np.float64),
        hops.periodic[np.concatenate([minima, chosen])],
        hops.counts[np.concatenate([minima, chosen])],
    )
    displaced = torch.from_numpy(np.concatenate([np.zeros(len(of_minima), bool), moved]))
    return HopBatch(structures, displaced, torch.from_numpy(origins), len(minima))


def _rows(hops: Hops, chosen: np.ndarray) -> np.ndarray:
    """Of the atoms of these hops."""
    counts = hops.counts[chosen]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(hops.starts[chosen], counts) + offsets


def _packed(
    numbers: np.ndarray, positions: np.ndarray, cells: np.ndarray, periodic: np.ndarray, counts: np.ndarray
) -> Structures:
    return Structures(
        positions=torch.from_numpy(positions),
        cells=torch.from_numpy(cells),
        periodic=torch.from_numpy(periodic),
        atomic_numbers=torch.from_numpy(numbers.astype(np.int64)),
        structure_index=torch.repeat_interleave(torch.arange(len(counts)), torch.from_numpy(counts)),
        movable=torch.ones(len(numbers), dtype=torch.bool),
        cell_free=torch.zeros(len(counts), dtype=torch.bool),
    )


def save_critic(critic: Critic, path: Path, card: Mapping[str, Any]) -> None:
    """`card`: plain values; `elements` (atomic numbers it was trained on) decides where it is used by itself."""
    FORMAT.write(path, KIND, critic.state_dict(), {"settings": asdict(critic.settings), "card": dict(card)})


def load_critic(path: Path) -> Critic:
    """Ready for use."""
    stored = FORMAT.read(path, KIND)
    try:
        known = {field.name for field in fields(CriticSettings)}
        # older files name a reach and a number of radial functions, always these
        settings = {name: value for name, value in stored.values["settings"].items() if name in known}
        critic = Critic(CriticSettings(**settings))
        critic.load_state_dict(stored.tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"{path} is no critic that this relaxion can use ({error}); {FORMAT.advice}") from error
    return critic


def card_of(path: Path) -> dict[str, Any]:
    """What the critic's file says of itself."""
    return FORMAT.read(path, KIND).values.get("card", {})
