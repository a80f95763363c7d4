"""Hops as arrays: what critics learn from. One row per hop, atoms of all hops one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from ase import Atoms

from relaxion.errors import FileError
from relaxion.files import replacing
from relaxion.search.choices import Hop


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

    def save(self, path: Path) -> None:
        """In one go: whoever is killed meanwhile leaves no half file."""
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **{part.name: getattr(self, part.name) for part in fields(self)})

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Hops:
        """All files as one."""
        parts = []
        walks = 0
        for path in paths:
            try:
                with np.load(path, allow_pickle=False) as file:
                    part = {field.name: file[field.name] for field in fields(cls)}
            except (OSError, ValueError, KeyError) as error:
                raise FileError(f"{path} holds no hops ({error}); make it again, or leave it out") from error
            part["walks"] = part["walks"] + walks
            walks = int(part["walks"].max(initial=walks - 1)) + 1
            parts.append(part)
        if not parts:
            raise FileError("no file of hops was given")
        return cls(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

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
