"""Replay for structures of any size: each state is stored once, transitions are pairs of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from relaxion.errors import SettingsError
from relaxion.files import Stored, joined
from relaxion.structures import Outcome
from relaxion.train.experience.replay import Batch, draw_without_replacement
from relaxion.train.experience.state_store import StateStore
from relaxion.train.experience.transition import Transition

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
            raise SettingsError(f"a replay of {transition_capacity} transitions, {atom_capacity} atoms is none")
        self.capacity, self.n_steps, self.generator = transition_capacity, n_steps, generator
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
        self.states[places], self.next_states[places] = states[kept], next_states[kept]
        self.rewards[places] = transition.reward[kept].double()
        self.discounts[places] = transition.discount[kept].double()
        self.sources[places], self.outcomes[places] = transition.source[kept], transition.outcome[kept]
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
            self._forget(max(1, min(transition.n_structures, len(self))))

    def _forget(self, number: int) -> None:
        self.oldest += number
        if len(self):
            rows = torch.arange(self.oldest, self.newest) % self.capacity
            self.store.forget_before(int(self.states[rows].min()))

    def sample(self, batch_size: int) -> Batch:
        """So many different transitions, each lengthened to n steps as far as its relaxation goes."""
        return self.assemble(self.oldest + draw_without_replacement(len(self), batch_size, self.generator))

    def assemble(self, first: Tensor) -> Batch:
        """The batch of n-step transitions that begin with the transitions numbered `first`, (batch,)."""
        places = first % self.capacity
        rewards, discounts, last = self.rewards[places], self.discounts[places], places
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
