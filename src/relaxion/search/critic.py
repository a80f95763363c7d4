"""Twin critics: networks that look at a trial structure, not relaxed, and predict how the hop will change its energy.

A network gives every atom a number; their sum in the trial minus their sum in the minimum where the hop begins is the
change in eV. So the change of a hop to nowhere is exactly zero, and what both structures have in common cancels. Atoms
that the hop displaced are marked. Distances enter as invariants, so rotating or mirroring a structure, or numbering its
atoms in another order, changes nothing. `Hops` are what critics learn from: one row per hop, atoms of all hops one
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
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
from relaxion.search.choices import Hop
from relaxion.search.moves import MOVES, SEVERAL
from relaxion.structures import Evaluation, State, Structures
from relaxion.structures.structures import per_structure_sum

KINDS = (*MOVES, SEVERAL)  # files have their numbers


@dataclass(frozen=True, eq=False)
class Hops:
    """Structures of many hops. A hop that ended in no minimum has the change NaN."""

    numbers: np.ndarray  # (n_atoms_of_all,) int16
    before: np.ndarray  # (n_atoms_of_all, 3) Å float32, the minimum where the hop begins
    trials: np.ndarray  # (n_atoms_of_all, 3) Å float32, not relaxed
    counts: np.ndarray  # (n_hops,) int32, atoms
    cells: np.ndarray  # (n_hops, 2, 3, 3) Å float32, of the minimum and of the trial
    periodic: np.ndarray  # (n_hops, 3) bool
    changes: np.ndarray  # (n_hops,) eV float32, energy of the end minus that of the beginning
    above_best: np.ndarray  # (n_hops,) eV float32, energy of the beginning minus the lowest of its walk so far
    calls: np.ndarray  # (n_hops,) int32
    walks: np.ndarray  # (n_hops,) int32, hops of one walk lie together, in order
    accepted: np.ndarray  # (n_hops,) bool
    kinds: np.ndarray  # (n_hops,) str

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def starts(self) -> np.ndarray:
        """(n_hops,) first row of each hop's atoms."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def states(self) -> np.ndarray:
        """(n_hops,) int64: hops with one number begin at the same minimum, because those before were rejected."""
        begins = np.ones(len(self), bool)
        begins[1:] = self.accepted[:-1] | (self.walks[1:] != self.walks[:-1])
        return np.cumsum(begins)

    @classmethod
    def of(cls, walks: Sequence[Sequence[Hop]]) -> Hops:
        """Of whole walks, each with its hops in order."""
        flat = [hop for hops in walks for hop in hops]
        nan = float("nan")
        ends = [nan if hop.energy_after_ev is None else hop.energy_after_ev for hop in flat]
        beginnings = np.array([hop.energy_before_ev for hop in flat])
        return cls(
            numbers=_joined([hop.before.numbers for hop in flat], np.int16),
            before=_joined([hop.before.positions for hop in flat], np.float32),
            trials=_joined([hop.trial.positions for hop in flat], np.float32),
            counts=np.array([len(hop.before) for hop in flat], np.int32),
            cells=np.array([[hop.before.cell.array, hop.trial.cell.array] for hop in flat], np.float32),
            periodic=np.array([hop.before.pbc for hop in flat], bool),
            changes=np.array(np.array(ends) - beginnings, np.float32),
            above_best=np.concatenate([_above_best(hops) for hops in walks]).astype(np.float32),
            calls=np.array([hop.calls for hop in flat], np.int32),
            walks=np.repeat(np.arange(len(walks), dtype=np.int32), [len(hops) for hops in walks]),
            accepted=np.array([hop.accepted for hop in flat], bool),
            kinds=np.array([hop.kind for hop in flat], dtype=str),
        )

    @classmethod
    def joined(cls, parts: Sequence[Hops]) -> Hops:
        """All as one; their walks stay apart."""
        arrays = {part.name: np.concatenate([getattr(own, part.name) for own in parts]) for part in fields(cls)}
        n_walks = np.array([own.walks.max(initial=-1) + 1 for own in parts])
        arrays["walks"] += np.repeat(np.cumsum(n_walks) - n_walks, [len(own) for own in parts]).astype(np.int32)
        return cls(**arrays)

    def tensors(self) -> dict[str, Tensor]:
        """For a file."""
        arrays = {part.name: getattr(self, part.name) for part in fields(self)}
        arrays["kinds"] = np.array([KINDS.index(kind) if kind in KINDS else -1 for kind in self.kinds], np.int16)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Hops:
        """As `tensors` gave them; kinds of the user's own become "several"."""
        arrays = {part.name: tensors[part.name].numpy() for part in fields(cls)}
        arrays["kinds"] = np.array([KINDS[number] for number in arrays["kinds"]], dtype=str)
        return cls(**arrays)

    def structure(self, hop: int, *, trial: bool) -> Atoms:
        """The minimum or the trial of one hop."""
        first = int(self.starts[hop])
        rows = slice(first, first + int(self.counts[hop]))
        positions = self.trials[rows] if trial else self.before[rows]
        cell = self.cells[hop, int(trial)]
        return Atoms(self.numbers[rows], positions, cell=cell, pbc=self.periodic[hop])


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype)


def _above_best(hops: Sequence[Hop]) -> np.ndarray:
    """Of each beginning over the lowest minimum that its walk had seen by then, eV."""
    lowest = np.minimum.accumulate([hop.energy_before_ev for hop in hops]) if hops else np.zeros(0)
    return np.array([hop.energy_before_ev for hop in hops]) - lowest


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
