"""The critic plans hops, and learns from them.

Many moves of the minimum are drawn, a softmax over what the critic expects takes one of the trials, moves of that trial
are drawn, and so on; at last one of all trials is taken and relaxed. So a hop may join several moves, which only the
critic has judged in between. Learning is off-policy: whoever chose a hop, the target is what it changed. With `learn` a
copy goes on learning from the hops of this search. Before it learns from a hop, the error of the critic as it came and
the error of the copy are taken; the one with the smaller error over the last hops chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaxion.search.choices import SOFTMAX_EV, Draw, Hop, PossibleHop, Walker, softmax_pick
from relaxion.search.critic import Critic, Hops, batch_of_hops
from relaxion.search.moves import SEVERAL, alike

LOWEST_EV = -2.0
HIGHEST_EV = 1.0  # targets above are cut: how bad a bad hop is does not matter


def targets(hops: Hops) -> np.ndarray:
    """(n_hops,) eV; hops that ended in no minimum count as the worst."""
    changes = np.where(np.isnan(hops.changes), HIGHEST_EV, hops.changes).astype(np.float64)
    return np.clip(changes, LOWEST_EV, HIGHEST_EV)


def loss_of(predicted: Tensor, wanted: np.ndarray) -> Tensor:
    """Huber's, both twins on the same hops."""
    aims = torch.from_numpy(wanted).to(predicted.dtype)
    return torch.nn.functional.huber_loss(predicted, aims.expand_as(predicted), delta=0.2)


@torch.no_grad()
def quality(critic: Critic, hops: Hops, batch: int = 128) -> dict[str, float]:
    """On hops that were not trained on: R² of the change of each kind, the rank correlation over all, and the gain.

    Gain: of minima with four tried hops or more, how far the hop that the critic puts first went down, as a share of
    how far the best one went.
    """
    from scipy.stats import spearmanr

    wanted = targets(hops)
    parts = [np.arange(first, min(first + batch, len(hops))) for first in range(0, len(hops), batch)]
    predicted = np.concatenate([critic(batch_of_hops(hops, part)).mean(dim=0).numpy() for part in parts])
    found = {"spearman": float(np.asarray(spearmanr(predicted, wanted))[0])}
    drops = np.maximum(-np.nan_to_num(hops.changes), 0)
    first = 0.0
    best = 0.0
    for own in np.split(np.arange(len(hops)), np.flatnonzero(np.diff(hops.states)) + 1):
        if len(own) >= 4:
            first += drops[own[np.argmin(predicted[own])]]
            best += drops[own].max()
    found["gain"] = float(first / max(best, 1e-12))
    for kind in sorted(set(hops.kinds.tolist())):
        own = hops.kinds == kind
        spread = float(((wanted[own] - wanted[own].mean()) ** 2).mean())
        found[f"r2 {kind}"] = 1 - float(((wanted[own] - predicted[own]) ** 2).mean()) / max(spread, 1e-12)
    return found


MEMORY = 0.95  # of the running errors: about the last 20 hops count
FIRST_LESSON = 24  # hops before the copy begins to learn
BATCH = 16  # hops in each of its updates
RATE = 3e-4


class CriticChoice:
    """Softmax over candidates; two critics where it learns."""

    def __init__(
        self,
        critic: Critic,
        *,
        candidates: int = 16,
        temperature_ev: float = SOFTMAX_EV,
        learn: bool = True,
        depth: int = 4,
    ) -> None:
        """candidates: moves that are drawn from each structure. temperature_ev: small values take the best. learn: see
        the module. depth: most moves of a hop."""
        self.candidates = candidates
        self.depth = depth
        self.temperature_ev = temperature_ev
        self.learns = learn
        self.given = critic
        self.own = copy.deepcopy(critic) if learn else critic
        self.errors = {"given": 0.0, "own": 0.0}  # running means, eV
        self.hops: Hops | None = None  # of this search
        self._random = np.random.default_rng(0)
        self._parameters = torch.optim.Adam(self.own.parameters(), lr=RATE) if learn else None

    @property
    def trusted(self) -> Critic:
        """The one that has been nearer to the truth of late."""
        return self.own if self.errors["own"] < self.errors["given"] else self.given

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        return choose_together([(self, walkers, draw)])[0]

    def learn(self, hop: Hop) -> None:
        if not self.learns or self._parameters is None:
            return
        self._compare(hop)
        new = Hops.of([[hop]])
        self.hops = new if self.hops is None else Hops.joined([self.hops, new])
        if len(self.hops) < FIRST_LESSON:
            return
        chosen = self._random.integers(len(self.hops), size=BATCH)
        loss = loss_of(self.own(batch_of_hops(self.hops, chosen)), targets(self.hops)[chosen])
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
        """Weights and moments of the copy, and its hops, for the state file."""
        if self._parameters is None:
            return {}
        hops = {} if self.hops is None else self.hops.tensors()
        found: dict[str, Tensor] = {f"hops.{name}": tensor for name, tensor in hops.items()}
        found |= {f"weights.{name}": value for name, value in self.own.state_dict().items()}
        for number, parameter in enumerate(self.own.parameters()):
            for name, value in self._parameters.state.get(parameter, {}).items():
                found[f"moments.{number}.{name}"] = torch.as_tensor(value)
        return found

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if self._parameters is None:
            return
        hops = {n.removeprefix("hops."): t for n, t in tensors.items() if n.startswith("hops.")}
        self.hops = Hops.of_tensors(hops) if hops else None
        weights = {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}
        self.own.load_state_dict(weights)
        for number, parameter in enumerate(self.own.parameters()):
            prefix = f"moments.{number}."
            own = {n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)}
            if own:
                self._parameters.state[parameter] = own


@dataclass(eq=False)
class Plan:
    """What one walker may do next: trials, and what the critic expects of each."""

    chooser: CriticChoice
    walker: Walker
    draw: Draw
    found: list[PossibleHop] = field(default_factory=list)
    expected_ev: list[float] = field(default_factory=list)

    def trials(self) -> list[PossibleHop]:
        """New ones: moves of the minimum, later moves of a trial that the softmax took."""
        base = self.pick()
        if base is None:
            return self.draw.several(self.walker, self.chooser.candidates)
        moved = self.draw.several(replace(self.walker, atoms=base.trial), self.chooser.candidates)
        known = [self.draw.look(self.walker.atoms), *(hop.look for hop in self.found)]
        new = [hop for hop in moved if not alike(hop.look, known)]
        return [replace(hop, kind=hop.kind if hop.kind == base.kind else SEVERAL) for hop in new]

    def pick(self) -> PossibleHop | None:
        """By softmax over all trials so far."""
        if not self.found:
            return None
        return self.found[softmax_pick(np.array(self.expected_ev), self.chooser.temperature_ev, self.walker.random)]


def choose_together(
    asked: Sequence[tuple[CriticChoice, Sequence[Walker], Draw]],
) -> list[list[PossibleHop | None]]:
    """For the walkers of several searches; those that trust the same critic ask it together."""
    plans = [[Plan(chooser, walker, draw) for walker in walkers] for chooser, walkers, draw in asked]
    of_critics: dict[int, list[Plan]] = {}
    for plan in (plan for own in plans for plan in own):
        of_critics.setdefault(id(plan.chooser.trusted), []).append(plan)
    for own in of_critics.values():
        for number in range(max(plan.chooser.depth for plan in own)):
            _extend([plan for plan in own if number < plan.chooser.depth])
    return [[plan.pick() for plan in own] for own in plans]


def _extend(plans: Sequence[Plan]) -> None:
    """By one more move; all plans have one critic."""
    drawn = [plan.trials() for plan in plans]
    trials = [hop.trial for hops in drawn for hop in hops]
    origins = [number for number, hops in enumerate(drawn) for _ in hops]
    if not trials:
        return
    minima = [plan.walker.atoms for plan in plans]
    # the mean, not the more cautious of the twins: here both signs of an error cost the same
    expected = iter(plans[0].chooser.trusted.changes(minima, trials, origins).mean(axis=0).tolist())
    for plan, hops in zip(plans, drawn, strict=True):
        plan.found += hops
        plan.expected_ev += [next(expected) for _ in hops]
