"""The critic chooses: many candidates are drawn, one is taken by softmax over what the critic expects of each.

With `learn` a copy goes on learning from the hops of this search. Before it learns from a hop, the error of the critic
as it came and the error of the copy are taken; the one with the smaller error over the last hops chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from relaxion.search.choices import Draw, Hop, PossibleHop, Walker, softmax_pick
from relaxion.search.critic import Critic, batch_of_hops
from relaxion.search.fitting import HIGHEST_EV, LOWEST_EV, loss_of, targets
from relaxion.search.hops import Hops

MEMORY = 0.95  # of the running errors: about the last 20 hops count
FIRST_LESSON = 24  # hops before the copy begins to learn
BATCH = 16  # hops in each of its updates
RATE = 3e-4


class CriticChoice:
    """Softmax over candidates; two critics where it learns."""

    def __init__(
        self, critic: Critic, *, candidates: int = 16, temperature_ev: float = 0.03, learn: bool = True
    ) -> None:
        """candidates: trials to choose from. temperature_ev: small values take the best. learn: see the module."""
        self.candidates, self.temperature_ev, self.learns = candidates, temperature_ev, learn
        self.given = critic
        self.own = copy.deepcopy(critic) if learn else critic
        self.errors = {"given": 0.0, "own": 0.0}  # running means, eV
        self.hops: list[Hop] = []
        self._random = np.random.default_rng(0)
        self._parameters = torch.optim.Adam(self.own.parameters(), lr=RATE) if learn else None

    @property
    def trusted(self) -> Critic:
        """The one that has been nearer to the truth of late."""
        return self.own if self.errors["own"] < self.errors["given"] else self.given

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        return choose_together([(self, walkers, draw)])[0]

    def draw(self, walkers: Sequence[Walker], draw: Draw) -> list[list[PossibleHop]]:
        """Candidates of each walker, no two alike."""
        return [draw.several(walker, self.candidates) for walker in walkers]

    def learn(self, hop: Hop) -> None:
        if not self.learns or self._parameters is None:
            return
        self._compare(hop)
        self.hops.append(hop)
        if len(self.hops) < FIRST_LESSON:
            return
        chosen = self._random.integers(len(self.hops), size=BATCH)
        batch = Hops.of([[self.hops[number]] for number in chosen])
        loss = loss_of(self.own(batch_of_hops(batch, np.arange(BATCH))), targets(batch))
        self._parameters.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own.parameters(), 1.0)
        self._parameters.step()

    def _compare(self, hop: Hop) -> None:
        """Both said it before the hop was learned from."""
        if hop.energy_after_ev is None:
            return
        truth = float(np.clip(hop.energy_after_ev - hop.energy_before_ev, LOWEST_EV, HIGHEST_EV))
        for name, critic in (("given", self.given), ("own", self.own)):
            said = float(critic.changes([hop.before], [hop.trial], [0]).mean())
            self.errors[name] = MEMORY * self.errors[name] + (1 - MEMORY) * abs(said - truth)

    def state(self) -> dict[str, Any]:
        return {"errors": dict(self.errors), "random": self._random.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.errors = dict(state["errors"])
        self._random.bit_generator.state = state["random"]

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments of the copy, for the state file."""
        if self._parameters is None:
            return {}
        found = {f"weights.{name}": value for name, value in self.own.state_dict().items()}
        for number, parameter in enumerate(self.own.parameters()):
            for name, value in self._parameters.state.get(parameter, {}).items():
                found[f"moments.{number}.{name}"] = torch.as_tensor(value)
        return found

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if self._parameters is None:
            return
        weights = {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}
        self.own.load_state_dict(weights)
        for number, parameter in enumerate(self.own.parameters()):
            prefix = f"moments.{number}."
            own = {n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)}
            if own:
                self._parameters.state[parameter] = own


def choose_together(
    asked: Sequence[tuple[CriticChoice, Sequence[Walker], Draw]],
) -> list[list[PossibleHop | None]]:
    """For the walkers of several searches; those that trust the same critic ask it once, in one batch."""
    drawn = [chooser.draw(walkers, draw) for chooser, walkers, draw in asked]
    minima: dict[int, list[Atoms]] = {}
    trials: dict[int, list[Atoms]] = {}
    origins: dict[int, list[int]] = {}
    critics: dict[int, Critic] = {}
    for (chooser, walkers, _), own in zip(asked, drawn, strict=True):
        name = id(chooser.trusted)
        critics[name] = chooser.trusted
        for walker, candidates in zip(walkers, own, strict=True):
            minima.setdefault(name, []).append(walker.atoms)
            trials.setdefault(name, []).extend(candidate.trial for candidate in candidates)
            origins.setdefault(name, []).extend([len(minima[name]) - 1] * len(candidates))
    # the mean, not the more cautious of the twins: here both signs of an error cost the same
    expected = {
        name: iter(critic.changes(minima[name], trials[name], origins[name]).mean(axis=0) if trials[name] else ())
        for name, critic in critics.items()
    }
    chosen = []
    for (chooser, walkers, _), own in zip(asked, drawn, strict=True):
        said = expected[id(chooser.trusted)]
        picked: list[PossibleHop | None] = []
        for walker, candidates in zip(walkers, own, strict=True):
            scores = np.array([next(said) for _ in candidates])
            picked.append(
                candidates[softmax_pick(scores, chooser.temperature_ev, walker.random)] if candidates else None
            )
        chosen.append(picked)
    return chosen
