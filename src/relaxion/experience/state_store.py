"""A ring of states of any size: each is stored once, in rows that lie together, under a number that only grows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.experience.state_rows import (
    ATOM_COLUMNS,
    ATOM_WIDTHS,
    STRUCTURE_COLUMNS,
    STRUCTURE_WIDTHS,
    pack_atoms,
    pack_structures,
    unpack,
)
from relaxion.structures import Move, State


class StateStore:
    """States `oldest` … `newest - 1` can be read. Room is made by `forget_before`, never silently.

    Beside each state there is place for the move proposed from it, which has the same atoms.
    """

    def __init__(self, atom_capacity: int, state_capacity: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.atoms = torch.zeros(atom_capacity, sum(ATOM_WIDTHS), dtype=dtype)
        self.structures = torch.zeros(state_capacity, sum(STRUCTURE_WIDTHS), dtype=dtype)
        self.first_rows = torch.zeros(state_capacity, dtype=torch.int64)
        self.counts = torch.zeros(state_capacity, dtype=torch.int64)
        self.oldest, self.newest, self.head = 0, 0, 0

    def room_for(self, counts: Tensor) -> bool:
        """Whether states of so many atoms each can be added without touching a readable one."""
        if self.newest - self.oldest + len(counts) > len(self.structures):
            return False
        if self.newest == self.oldest:
            return int(counts.sum()) <= len(self.atoms)
        tail = int(self.first_rows[self.oldest % len(self.first_rows)])
        needed, end = int(counts.sum()), len(self.atoms)
        if self.head > tail:  # free rows: head … end, and 0 … tail
            return self.head + needed <= end or needed < tail
        return self.head + needed < tail

    def add(self, state: State) -> Tensor:
        """Store the states one after the other; their numbers, (n_structures,)."""
        counts = state.structures.counts
        if not self.room_for(counts):
            raise SettingsError(f"no room for {len(counts)} states of {int(counts.sum())} atoms in the replay")
        needed = int(counts.sum())
        start = self.head if self.head + needed <= len(self.atoms) else 0  # together, or from the beginning
        if self.newest == self.oldest:
            start = 0
        numbers = torch.arange(self.newest, self.newest + len(counts))
        slots = numbers % len(self.structures)
        self.atoms[start : start + needed, :ATOM_COLUMNS] = pack_atoms(state, self.dtype)
        self.structures[slots, :STRUCTURE_COLUMNS] = pack_structures(state, self.dtype)
        self.first_rows[slots] = start + counts.cumsum(0) - counts
        self.counts[slots] = counts
        self.head, self.newest = start + needed, self.newest + len(counts)
        return numbers

    def forget_before(self, number: int) -> None:
        """Make room: states below `number` can no longer be read."""
        self.oldest = max(self.oldest, min(number, self.newest))

    def rows(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of the states, rows of their atoms, and which state each row belongs to."""
        slots = numbers % len(self.structures)
        counts = self.counts.index_select(0, slots)  # quicker than slots in brackets
        offsets = self.first_rows.index_select(0, slots) - counts.cumsum(0) + counts
        index = torch.repeat_interleave(counts)
        rows = torch.arange(len(index)).add_(offsets.index_select(0, index))
        return slots, rows, index

    def set_moves(self, numbers: Tensor, move: Move) -> None:
        """Write the move that was proposed from each state."""
        slots, rows, _ = self.rows(numbers)
        self.atoms[rows, ATOM_COLUMNS:] = move.displacements.detach().to(self.dtype)
        self.structures[slots, STRUCTURE_COLUMNS:] = move.strains.detach().flatten(1).to(self.dtype)

    def read(self, numbers: Tensor) -> State:
        """The states of these numbers."""
        return self.read_with_moves(numbers)[0]

    def read_with_moves(self, numbers: Tensor) -> tuple[State, Move]:
        """The states and the moves proposed from them."""
        slots, rows, index = self.rows(numbers)
        atoms, structures = self.atoms.index_select(0, rows), self.structures.index_select(0, slots)
        return unpack(atoms, structures, index)

    def holds(self, numbers: Tensor, state: State) -> Tensor:
        """Whether these are the stored states, number for number; (n_structures,) bool."""
        counts = state.structures.counts
        same = (numbers >= self.oldest) & (numbers < self.newest)
        same &= self.counts[numbers % len(self.counts)] == counts
        which = same.nonzero().flatten()
        part = state.select(which)
        slots, rows, index = self.rows(numbers[which])
        atoms_equal = (self.atoms[rows, :ATOM_COLUMNS] == pack_atoms(part, self.dtype)).all(dim=1)
        wrong = torch.zeros(len(which), dtype=torch.int64).index_add_(0, index, (~atoms_equal).long())
        structures_equal = (self.structures[slots, :STRUCTURE_COLUMNS] == pack_structures(part, self.dtype)).all(dim=1)
        same[which] = (wrong == 0) & structures_equal
        return same

    def snapshot(self) -> dict[str, Tensor]:
        """Everything, as it lies."""
        counters = torch.tensor([self.oldest, self.newest, self.head])
        return {
            "atoms": self.atoms, "structures": self.structures, "first_rows": self.first_rows,
            "counts": self.counts, "counters": counters,
        }  # fmt: skip

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or ValueError when the tensors are those of another store."""
        for name in ("atoms", "structures", "first_rows", "counts"):
            own: Tensor = getattr(self, name)
            if tensors[name].shape != own.shape or tensors[name].dtype != own.dtype:
                raise ValueError(f"store of {tuple(tensors[name].shape)} {name}, expected {tuple(own.shape)}")
            own.copy_(tensors[name])
        self.oldest, self.newest, self.head = (int(number) for number in tensors["counters"])
