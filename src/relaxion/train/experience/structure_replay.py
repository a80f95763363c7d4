"""Replay for structures of any size: each state is stored once, transitions are pairs of numbers.

States lie in a ring, one row of numbers per atom and one per structure, under a number that only grows. Packing and
unpacking lose nothing but precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from relaxion.errors import SettingsError
from relaxion.files import Stored, joined
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.train.experience.environment import Transition
from relaxion.train.experience.vectors import Batch, draw_without_replacement

# position, force, last displacement, last force, element, movable; proposed displacement
ATOM_WIDTHS = [3, 3, 3, 3, 1, 1, 3]
# cell, stress, last strain, periodic, energy, trust, calls, free; its strain
STRUCTURE_WIDTHS = [9, 9, 9, 3, 1, 1, 1, 1, 9]
ATOM_COLUMNS = sum(ATOM_WIDTHS[:-1])  # of the state; the columns of the proposed move follow
STRUCTURE_COLUMNS = sum(STRUCTURE_WIDTHS[:-1])
STORE_COLUMNS = ("atoms", "structures", "first_rows", "counts")  # of a store, by their names in a checkpoint


def pack_atoms(state: State, dtype: torch.dtype) -> Tensor:
    """(n_atoms, ATOM_COLUMNS)"""
    structures = state.structures
    columns = [
        structures.positions,
        state.evaluation.forces,
        state.last_move.displacements,
        state.last_forces,
        structures.atomic_numbers[:, None],
        structures.movable[:, None],
    ]
    return torch.cat([column.to(dtype) for column in columns], dim=1)


def pack_structures(state: State, dtype: torch.dtype) -> Tensor:
    """(n_structures, STRUCTURE_COLUMNS); stresses nobody asked for are zero."""
    structures = state.structures
    stresses = state.evaluation.stresses
    columns = [
        structures.cells.flatten(1),
        (torch.zeros_like(structures.cells) if stresses is None else stresses).flatten(1),
        state.last_move.strains.flatten(1),
        structures.periodic,
        state.evaluation.energies[:, None],
        state.trust_radii[:, None],
        state.calls[:, None],
        structures.cell_free[:, None],
    ]
    return torch.cat([column.to(dtype) for column in columns], dim=1)


def state_tensors(state: State) -> dict[str, Tensor]:
    """A whole state, without its graph, for a checkpoint; float64 loses nothing."""
    return {
        "atoms": pack_atoms(state, torch.float64),
        "structures": pack_structures(state, torch.float64),
        "counts": state.structures.counts,
    }


def state_from_tensors(tensors: Mapping[str, Tensor]) -> State:
    """The opposite of `state_tensors`; a KeyError or ValueError when the tensors are no state's."""
    counts = tensors["counts"]
    expected = [(int(counts.sum()), ATOM_COLUMNS), (len(counts), STRUCTURE_COLUMNS)]
    rows = [tensors["atoms"], tensors["structures"]]
    if [tuple(row.shape) for row in rows] != expected:
        raise ValueError(f"a state of {[tuple(row.shape) for row in rows]} numbers, expected {expected}")
    padded = [
        torch.cat([row, row.new_zeros(len(row), widths[-1])], dim=1)
        for row, widths in zip(rows, (ATOM_WIDTHS, STRUCTURE_WIDTHS), strict=True)
    ]
    state = unpack(padded[0], padded[1], torch.repeat_interleave(counts))[0]
    return _own_memory(state)


def _own_memory(thing: Any) -> Any:
    """The same with every tensor lying by itself, as a step leaves it: sums over strides may round otherwise."""
    if isinstance(thing, Tensor):
        return thing.clone(memory_format=torch.contiguous_format)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _own_memory(getattr(thing, f.name)) for f in fields(thing)})
    return thing


def unpack(atoms: Tensor, structures: Tensor, structure_index: Tensor) -> tuple[State, Move]:
    """The states again, without a graph (edges cost more to store than to find), and the moves proposed from them.

    One `split` per kind of row: a draw of a hundred structures is bound by the number of calls, not by their size.
    """
    positions, forces, displacements, last_forces, numbers, movable, proposed = atoms.split(ATOM_WIDTHS, dim=1)
    cells, stresses, strains, periodic, energies, trust, calls, free, proposed_strains = structures.split(
        STRUCTURE_WIDTHS, dim=1
    )
    square = (len(structures), 3, 3)
    state = State(
        structures=Structures(
            positions=positions,
            cells=cells.view(square),
            periodic=periodic.bool(),
            atomic_numbers=numbers.squeeze(1).long(),
            structure_index=structure_index,
            movable=movable.squeeze(1).bool(),
            cell_free=free.squeeze(1).bool(),
        ),
        evaluation=Evaluation(energies.squeeze(1), forces, stresses.view(square)),
        graph=None,
        last_move=Move(displacements, strains.view(square)),
        last_forces=last_forces,
        trust_radii=trust.squeeze(1),
        calls=calls.squeeze(1).long(),
    )
    return state, Move(proposed, proposed_strains.view(square))


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
        self.oldest = 0
        self.newest = 0
        self.head = 0

    def room_for(self, counts: Tensor) -> bool:
        """Whether states of so many atoms each can be added without touching a readable one."""
        if self.newest - self.oldest + len(counts) > len(self.structures):
            return False
        if self.newest == self.oldest:
            return int(counts.sum()) <= len(self.atoms)
        tail = int(self.first_rows[self.oldest % len(self.first_rows)])
        needed = int(counts.sum())
        end = len(self.atoms)
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
        atoms = self.atoms.index_select(0, rows)
        structures = self.structures.index_select(0, slots)
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
        return {name: getattr(self, name) for name in STORE_COLUMNS} | {"counters": counters}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or ValueError when the tensors are those of another store."""
        for name in STORE_COLUMNS:
            own: Tensor = getattr(self, name)
            if tensors[name].shape != own.shape or tensors[name].dtype != own.dtype:
                raise ValueError(f"store of {tuple(tensors[name].shape)} {name}, expected {tuple(own.shape)}")
            own.copy_(tensors[name])
        self.oldest, self.newest, self.head = (int(number) for number in tensors["counters"])


COLUMNS = ("states", "next_states", "rewards", "discounts", "followers", "sources", "outcomes", "back_offs")
NOBODY = -1


class StructureReplay:
    """The newest transitions replace the oldest, whichever of the two capacities is reached first (R1.3, R8.1).

    `add` takes what `Environment.step` answers. The next state of a running relaxation is the state of its next
    transition, and is stored once. Transitions whose potential failed are left out: they join nothing.
    """

    def __init__(
        self,
        transition_capacity: int,
        atom_capacity: int,
        *,
        generator: Generator,
        n_steps: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if transition_capacity < 1 or atom_capacity < 1 or n_steps < 1:
            raise SettingsError(f"a replay of {transition_capacity} transitions, {atom_capacity} atoms has no room")
        self.capacity = transition_capacity
        self.n_steps = n_steps
        self.generator = generator
        self.store = StateStore(atom_capacity, 2 * transition_capacity, dtype)  # a transition brings two states at most
        self.states = torch.zeros(transition_capacity, dtype=torch.int64)  # numbers in the store
        self.next_states = torch.zeros(transition_capacity, dtype=torch.int64)
        self.rewards = torch.zeros(transition_capacity, dtype=torch.float64)
        self.discounts = torch.zeros(transition_capacity, dtype=torch.float64)
        self.followers = torch.full((transition_capacity,), NOBODY)  # the transition that goes on from the next state
        self.sources = torch.zeros(transition_capacity, dtype=torch.int64)
        self.outcomes = torch.zeros(transition_capacity, dtype=torch.int64)
        self.back_offs = torch.zeros(transition_capacity, dtype=torch.float64)
        self.oldest, self.newest = 0, 0  # numbers of transitions; they only grow
        self.under_way = torch.zeros(0, dtype=torch.int64)  # the newest transition of each relaxation side by side

    def __len__(self) -> int:
        return self.newest - self.oldest

    def add(self, transition: Transition) -> None:
        """One step of all relaxations side by side."""
        self._make_room(transition)
        states, followed = self._state_numbers(transition)
        self.store.set_moves(states, transition.proposed)
        next_states = self.store.add(transition.next_state)
        kept = (transition.outcome != Outcome.NON_FINITE).nonzero().flatten()
        numbers = torch.arange(self.newest, self.newest + len(kept))
        places = numbers % self.capacity
        self.states[places] = states[kept]
        self.next_states[places] = next_states[kept]
        self.rewards[places] = transition.reward[kept].double()
        self.discounts[places] = transition.discount[kept].double()
        self.sources[places] = transition.source[kept]
        self.outcomes[places] = transition.outcome[kept]
        self.back_offs[places] = transition.back_off[kept].double()
        self.followers[places] = NOBODY
        known = followed[kept] != NOBODY
        self.followers[followed[kept][known] % self.capacity] = numbers[known]
        self.newest += len(kept)
        self.under_way = torch.full((transition.n_structures,), NOBODY)
        self.under_way[kept] = numbers

    def _state_numbers(self, transition: Transition) -> tuple[Tensor, Tensor]:
        """Numbers of the states a step began in, stored where they are new, and the transitions that led to them."""
        followed = torch.full((transition.n_structures,), NOBODY)
        if len(self.under_way) == transition.n_structures:
            alive = self.under_way >= self.oldest
            candidates = self.next_states[self.under_way % self.capacity]
            alive &= self.store.holds(candidates, transition.state)
            followed = torch.where(alive, self.under_way, NOBODY)
        new = (followed == NOBODY).nonzero().flatten()
        numbers = self.next_states[followed % self.capacity]
        if len(new):
            numbers[new] = self.store.add(transition.state.select(new))
        return numbers, followed

    def _make_room(self, transition: Transition) -> None:
        """Forget the oldest transitions, a relaxation step at a time, until both capacities suffice."""
        counts = transition.state.structures.counts
        both = torch.cat([counts, counts])  # at worst every state of the step is new
        while len(self) + transition.n_structures > self.capacity or not self.store.room_for(both):
            if len(self) == 0:
                self.store.forget_before(self.store.newest)
                if transition.n_structures <= self.capacity and self.store.room_for(both):
                    return
                raise SettingsError(
                    f"the replay ({self.capacity} transitions, {len(self.store.atoms)} atoms) cannot hold one step of "
                    f"{transition.n_structures} structures with {int(counts.sum())} atoms; give it more room"
                )
            self.oldest += max(1, min(transition.n_structures, len(self)))
            if len(self):
                rows = torch.arange(self.oldest, self.newest) % self.capacity
                self.store.forget_before(int(self.states[rows].min()))

    def sample(self, batch_size: int) -> Batch:
        """So many different transitions, each lengthened to n steps as far as its relaxation goes."""
        return self.assemble(self.oldest + draw_without_replacement(len(self), batch_size, self.generator))

    def assemble(self, first: Tensor) -> Batch:
        """The batch of n-step transitions that begin with the transitions numbered `first`, (batch,)."""
        places = first % self.capacity
        rewards = self.rewards[places]
        discounts = self.discounts[places]
        last = places
        for _ in range(self.n_steps - 1):
            followers = self.followers[last]
            goes_on = followers >= self.oldest
            following = torch.where(goes_on, followers % self.capacity, last)
            rewards = torch.where(goes_on, rewards + discounts * self.rewards[following], rewards)
            discounts = torch.where(goes_on, discounts * self.discounts[following], discounts)
            last = following
        state, proposed = self.store.read_with_moves(self.states[places])
        dtype = self.store.dtype
        next_state = self.store.read(self.next_states[last])
        return Batch(state, proposed, rewards.to(dtype), discounts.to(dtype), next_state, self.sources[places])

    def snapshot(self) -> dict[str, Tensor]:
        """Everything a resume needs; the generator is its owner's to save."""
        own = {name: getattr(self, name) for name in COLUMNS}
        own |= {"counters": torch.tensor([self.oldest, self.newest]), "lanes": self.under_way}
        return own | joined({"store": self.store.snapshot()})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or ValueError when the tensors are those of another replay."""
        for name in COLUMNS:
            own: Tensor = getattr(self, name)
            if tensors[name].shape != own.shape:
                raise ValueError(f"replay of {len(tensors[name])} transitions, expected {len(own)}")
            own.copy_(tensors[name])
        self.oldest, self.newest = (int(number) for number in tensors["counters"])
        self.under_way = tensors["lanes"].clone()
        self.store.restore(Stored(dict(tensors), {}).part("store"))


def capacity_range(mean_atoms: float) -> tuple[int, int]:
    """Transitions that suit systems of this size (R8.1).

    1 000–5 000 suit about 4 atoms: few coordinates, so that old policies' states soon crowd out the new. The range
    grows in proportion to the atoms.
    """
    low, high = (round(bound * max(mean_atoms, 4.0) / 4.0) for bound in (1_000, 5_000))
    return low, high


def capacity_advice(transition_capacity: int, mean_atoms: float) -> str | None:
    """A sentence where the capacity is out of proportion to the systems, beyond ten times either end; else None."""
    low, high = capacity_range(mean_atoms)
    if low / 10 <= transition_capacity <= high * 10:
        return None
    word = "small" if transition_capacity < low else "large"
    return (
        f"a replay of {transition_capacity} transitions is {word} for systems of {math.ceil(mean_atoms)} atoms; "
        f"{low}–{high} would be in proportion"
    )
