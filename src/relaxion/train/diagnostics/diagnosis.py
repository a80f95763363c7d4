"""The diagnosis of a run on structures: numbers for every line of the log, and what is wrong with them in words.

First what builds up: sums between two lines, averages that outlive them, relaxations under way (R9.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax

from relaxion.errors import StructureError
from relaxion.files import Stored, joined
from relaxion.model.backbone import LARGEST_GATE_FACTOR, UNIT_STIFFNESS
from relaxion.model.roles import CategoricalCritic, Critics
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.structures.state import Pairs
from relaxion.train.diagnostics.rules import LIMITS, PREFIX, Alarms, Event, Seen
from relaxion.train.experience.environment import Environment, Source, Transition, largest_force
from relaxion.train.experience.structure_replay import StructureReplay

COLUMNS = ("values", "returns", "discounts", "bonus_discounts", "steps")
SLOW = 5  # the slow average remembers so many times longer: what "before" means when something is said to rise


@dataclass(frozen=True)
class Mean:
    """A mean and how many numbers it is of."""

    value: float
    count: float


class Tally:
    """Means, totals and minima since the last line."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}  # sum.NAME: sum and count; total.NAME and lowest.NAME: a number

    def mean(self, name: str, values: Tensor) -> None:
        """Numbers to be averaged; none is no number."""
        total, count = self._kept.get(f"sum.{name}", (0.0, 0.0))
        self._kept[f"sum.{name}"] = (total + float(values.double().sum()), count + values.numel())

    def total(self, name: str, value: float) -> None:
        self._kept[f"total.{name}"] = self._kept.get(f"total.{name}", 0.0) + value

    def lowest(self, name: str, values: Tensor) -> None:
        self._kept[f"lowest.{name}"] = min(self._kept.get(f"lowest.{name}", math.inf), float(values.min()))

    def take(self) -> tuple[dict[str, Mean], dict[str, float]]:
        """Means with their counts; totals and minima. Then everything begins anew."""
        kept = {tuple(key.split(".", 1)): value for key, value in self._kept.items()}
        self._kept = {}
        sums = {name: value for (kind, name), value in kept.items() if kind == "sum"}
        means = {name: Mean(total / count, count) for name, (total, count) in sums.items() if count}
        return means, {name: value for (kind, name), value in kept.items() if kind != "sum"}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: _exact(value) for name, value in self._kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._kept = {name: tensor.tolist() for name, tensor in tensors.items()}


class Averages:
    """Averages that forget: fast ones to judge by, slow ones to compare with. Counted in numbers, not in lines, so
    that the same run with another log interval is judged alike."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, float, float, float]] = {}  # fast sum, fast weight, slow sum, slow weight

    def add(self, name: str, mean: Mean, memory: float) -> None:
        """`memory`: how many of these numbers it takes to forget most of the old ones."""
        fast_sum, fast_weight, slow_sum, slow_weight = self._kept.get(name, (0.0, 0.0, 0.0, 0.0))
        kept = math.exp(-mean.count / memory)
        kept_slowly = math.exp(-mean.count / (SLOW * memory))
        self._kept[name] = (
            kept * fast_sum + (1 - kept) * mean.value,
            kept * fast_weight + (1 - kept),
            kept_slowly * slow_sum + (1 - kept_slowly) * mean.value,
            kept_slowly * slow_weight + (1 - kept_slowly),
        )

    def now(self) -> dict[str, float]:
        """Fast averages of what has been seen long enough, one memory at least, to be judged by."""
        enough = 1 - math.exp(-1) - 1e-9
        return {name: kept[0] / kept[1] for name, kept in self._kept.items() if kept[1] >= enough}

    def before(self) -> dict[str, float]:
        """Slow averages of all."""
        return {name: kept[2] / kept[3] for name, kept in self._kept.items()}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: _exact(kept) for name, kept in self._kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._kept = {name: tuple(tensor.tolist()) for name, tensor in tensors.items()}


def _exact(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Finished:
    """Relaxations that have ended, one number each."""

    values: Tensor  # the critic's expectation at the start; NaN where it was not asked
    returns: Tensor  # discounted, really obtained
    bonus_discounts: Tensor  # Σ γ^k over the steps after the first: what an entropy of 1 per step would have added


class RelaxationsUnderWay:
    """One place per structure of the environment."""

    def __init__(self) -> None:
        self._set_up(0)

    def _set_up(self, number: int) -> None:
        self.values = torch.full((number,), torch.nan).double()
        self.returns = torch.zeros(number).double()
        self.discounts = torch.ones(number).double()
        self.bonus_discounts = torch.zeros(number).double()
        self.steps = torch.zeros(number, dtype=torch.int64)

    def fresh(self, number: int) -> Tensor:
        """Places whose relaxation makes its first step now."""
        if len(self.steps) != number:
            self._set_up(number)
        return (self.steps == 0).nonzero().flatten()

    def begin(self, places: Tensor, values: Tensor | None) -> None:
        """What the critic expects of relaxations at their first step; None: it was not asked."""
        self.values[places] = torch.nan if values is None else values.double()

    def add(self, rewards: Tensor, discounts: Tensor, finished: Tensor) -> Finished:
        """One step of each; those that ended with it, whose places are free again."""
        self.bonus_discounts += torch.where(self.steps > 0, self.discounts, 0.0)
        self.returns += self.discounts * rewards.double()
        self.discounts *= discounts.double()
        self.steps += 1
        which = finished.nonzero().flatten()
        ended = Finished(self.values[which], self.returns[which], self.bonus_discounts[which])
        self.returns[which] = 0.0
        self.discounts[which] = 1.0
        self.bonus_discounts[which] = 0.0
        self.steps[which] = 0
        return ended

    def snapshot(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in COLUMNS}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in COLUMNS:
            setattr(self, name, tensors[name].clone())


# What is rarer than steps is remembered for fewer of its kind.
RELAXATIONS_PER_STEP = 1 / 40
DRIVEN_PER_STEP = 1 / 10
FEWEST_RELAXATIONS = 20.0  # to judge by, however short the memory
OF_RELAXATIONS = (
    "q_at_start", "return_from_start", "squared_return", "bonus_discount", "entropy_bonus", "returns_outside_support",
    "force_calls_per_relaxation",
)  # fmt: skip
PAIR_SEARCH_ANGSTROM = 4.0  # beyond any bond; a structure without a nearer pair counts as this much
PARTS = ("tally", "averages", "relaxations", "alarms")  # that change, by their names in a checkpoint
INTERNAL = ("squared_return", "bonus_discount", "atoms_per_structure", "replay_forgets")


@dataclass(frozen=True)
class Facts:
    """What does not change in a run and what numbers are measured against."""

    force_tolerance_ev_per_angstrom: float
    minimum_distance_angstrom: float
    max_displacement_angstrom: float
    memory_steps: int = 2000
    """Environment steps that alarms are judged by, at least."""


class Diagnosis:
    """`add` every step, `scalars` at every line; everything that changes is in `snapshot` (R10)."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.tally = Tally()
        self.averages = Averages()
        self.relaxations = RelaxationsUnderWay()
        self.alarms = Alarms()
        self.steps = 0  # since the last line
        self.trained_steps = 0  # since the warm-up
        self.calls_beside_bfgs: float | None = None  # of the newest assessment
        self.calls_beside_best: float | None = None  # likewise, from validation starts
        self.lengths: dict[str, float] = {}  # of the newest assessment (`lengths`)

    def add(self, transition: Transition, agent: Any | None) -> None:
        """One step of all structures. No agent: warm-up, whose critic has learned nothing yet."""
        self.steps += transition.n_structures
        fresh = self.relaxations.fresh(transition.n_structures)
        if len(fresh):
            first = transition if len(fresh) == transition.n_structures else transition.select(fresh)
            values = None if agent is None else critic_values(agent, first.state, first.proposed)
            self.relaxations.begin(fresh, values)
        self._add_moves(transition)
        self._add_structures(transition)
        if agent is not None:
            self.trained_steps += transition.n_structures
        self.tally.mean("expert_share", transition.source == Source.EXPERT)
        finished = self.relaxations.add(transition.reward, transition.discount, transition.finished)
        self._add_ends(transition, finished, agent)

    def _add_moves(self, transition: Transition) -> None:
        structures = transition.state.structures
        self.tally.mean("proposed_move_angstrom", transition.proposed.largest_displacements(structures))
        self.tally.mean("executed_move_angstrom", transition.executed.largest_displacements(structures))
        self.tally.mean("back_off", transition.back_off)
        self.tally.mean("reward_size", transition.reward.abs())
        driven = self._driven(transition.state) & (transition.source == Source.POLICY)
        self.tally.mean("blocked_share", transition.back_off[driven] >= LIMITS["undone"])

    def _add_structures(self, transition: Transition) -> None:
        after = transition.next_state
        minimum = self.facts.minimum_distance_angstrom
        closest = closest_pairs(after.structures)
        self.tally.lowest("closest_pair_angstrom", closest)
        self.tally.mean("crowded_share", closest <= (1 + LIMITS["crowded"]) * minimum)
        forces = largest_force(after.structures, after.evaluation).clamp_min(1e-12)
        self.tally.mean("log_force", torch.log10(forces))
        self.tally.mean("atoms_per_structure", after.structures.counts)

    def _driven(self, state: State) -> Tensor:
        """Structures that have every reason to move."""
        force = largest_force(state.structures, state.evaluation)
        return force > LIMITS["large_force"] * self.facts.force_tolerance_ev_per_angstrom

    def _add_ends(self, transition: Transition, finished: Finished, agent: Any | None) -> None:
        ended = transition.finished
        for outcome in set(Outcome) - {Outcome.RUNNING}:
            self.tally.total(f"outcome_{outcome.name.lower()}", float((transition.outcome == outcome).sum()))
        if not ended.any():
            return
        self.tally.mean("force_calls_per_relaxation", transition.next_state.calls[ended])
        for outcome in (Outcome.CONVERGED, Outcome.BLOCKED, Outcome.NON_FINITE):
            if agent is not None:
                self.tally.mean(f"share_{outcome.name.lower()}", transition.outcome[ended] == outcome)
        valued = ~finished.values.isnan()
        returns = finished.returns[valued]
        self.tally.mean("q_at_start", finished.values[valued])
        self.tally.mean("return_from_start", returns)
        self.tally.mean("squared_return", returns.square())
        self.tally.mean("bonus_discount", finished.bonus_discounts[valued])
        support = getattr(agent, "support", None)
        if support is not None:
            self.tally.mean("returns_outside_support", (returns < support[0]) | (returns > support[-1]))

    def scalars(
        self, step: int, state: State, agent: Any | None, replay: StructureReplay, others: Mapping[str, float]
    ) -> dict[str, float]:
        """One line: what has built up since the last, what agent and replay show now, and the alarms.

        `others` are numbers of the trainer: `imitation_weight` as scheduled, and the agent's own scalars, of which
        SAC's entropy is needed. No agent: warm-up, which is logged and not judged.
        """
        means, line = self.tally.take()
        means |= self._looked_at(state, agent) | self._entropy(means, others) | _replay_ages(replay, self.steps)
        line |= {name: others[name] for name in ("imitation_weight",) if name in others}
        if agent is not None:
            for name, mean in means.items():
                self.averages.add(name, mean, self._memory(name))
            now = self.averages.now()
            self.alarms.judge(step, Seen(now | self._known(agent), self.averages.before()))
        self.steps = 0
        line |= {name: mean.value for name, mean in means.items()}
        line |= self._assessments()
        return _public(line) | self.alarms.scalars()

    def assessed(self, beside_bfgs: float | None, beside_best: float | None, lengths: Mapping[str, float]) -> None:
        """Mean force calls of an assessment, beside BFGS and beside the best of the run; moves of several lengths."""
        self.calls_beside_bfgs = beside_bfgs
        self.calls_beside_best = beside_best
        self.lengths = dict(lengths)

    def _assessments(self) -> dict[str, float]:
        known = {"bfgs": self.calls_beside_bfgs, "best": self.calls_beside_best}
        beside = {f"assessed_calls_beside_{name}": ratio for name, ratio in known.items() if ratio is not None}
        return beside | {name: number for name, number in self.lengths.items() if math.isfinite(number)}

    def take_events(self) -> list[Event]:
        return self.alarms.take_events()

    def _looked_at(self, state: State, agent: Any | None) -> dict[str, Mean]:
        """How far the policy moves without noise, and how far its gate is open, just now."""
        if agent is None:
            return {}
        weight = float(max(self.steps, 1))  # stands for all steps since the last line
        logs = gate_factors(agent, state).log()
        seen = {"gate_factor": Mean(float(logs.mean().exp()), weight)}
        driven = self._driven(state)
        if driven.any():
            part = state.select(driven)
            lengths = agent.act(part).largest_displacements(part.structures)
            seen["policy_move_angstrom"] = Mean(float(lengths.double().mean()), weight)
            # how far the atom with the largest force would move on a spring, F/k, within what is allowed; (n,) Å
            springs = largest_force(part.structures, part.evaluation).double() / UNIT_STIFFNESS
            shares = lengths.double() / springs.clamp_max(self.facts.max_displacement_angstrom)
            seen["policy_move_beside_springs"] = Mean(float(shares.mean()), weight)
        return seen

    def _entropy(self, means: Mapping[str, Mean], others: Mapping[str, float]) -> dict[str, Mean]:
        """Of SAC: its weight, how far it is below its target, and what it adds to a return."""
        if "train/entropy" not in others:
            return {}
        weight, entropy, target = (others[f"train/{name}"] for name in ("ent_coef", "entropy", "target_entropy"))
        steps = float(max(self.steps, 1))
        gap = (target - entropy) / max(abs(target), 1.0)
        found = {"entropy_weight": Mean(weight, steps), "entropy_gap": Mean(gap, steps)}
        if "bonus_discount" in means:
            discounts = means["bonus_discount"]
            found["entropy_bonus"] = Mean(weight * entropy * discounts.value, discounts.count)
        return found

    def _memory(self, name: str) -> float:
        """How many numbers of this name an average is of."""
        if name in OF_RELAXATIONS or name.startswith("share_"):
            return max(FEWEST_RELAXATIONS, self.facts.memory_steps * RELAXATIONS_PER_STEP)
        return self.facts.memory_steps * (DRIVEN_PER_STEP if name == "blocked_share" else 1.0)

    def _known(self, agent: Any) -> dict[str, float]:
        """Facts for the rules, as far as they are known."""
        facts: dict[str, float | None] = dict(vars(self.facts))
        facts["trained_steps"] = float(self.trained_steps)
        facts["lowest_gate_factor"] = lowest_gate_factor(agent)
        facts |= self._assessments()
        return {name: float(value) for name, value in facts.items() if value is not None}

    def snapshot(self) -> dict[str, Tensor]:
        numbers = (self.calls_beside_bfgs, self.calls_beside_best)
        known = [torch.nan if number is None else number for number in numbers]
        counters = torch.tensor([self.steps, self.trained_steps])
        own = {"counters": counters, "known": torch.tensor(known, dtype=torch.float64)}
        own |= {f"length.{name}": _exact(number) for name, number in self.lengths.items()}
        return own | joined({name: getattr(self, name).snapshot() for name in PARTS})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps, self.trained_steps = (int(number) for number in tensors["counters"])
        known = [None if number != number else number for number in tensors["known"].tolist()]
        self.calls_beside_bfgs, self.calls_beside_best = known
        self.lengths = {name: float(number) for name, number in Stored(dict(tensors), {}).part("length").items()}
        for name in PARTS:
            getattr(self, name).restore(Stored(dict(tensors), {}).part(name))


def _replay_ages(replay: StructureReplay, steps: int) -> dict[str, Mean]:
    """Batches are drawn uniformly, so the mean age of sampled transitions are that of all there is."""
    if len(replay) == 0:
        return {}
    age = (len(replay) - 1) / 2
    weight = float(max(steps, 1))
    return {
        "replay_age_transitions": Mean(age, weight),
        "replay_age": Mean(age / replay.capacity, weight),
        "replay_forgets": Mean(float(replay.oldest > 0), weight),
    }


def _public(line: dict[str, float]) -> dict[str, float]:
    """As metrics.jsonl has them."""
    named = {name: value for name, value in line.items() if name not in INTERNAL and not name.startswith("share_")}
    if "log_force" in named:
        named["largest_force_ev_per_angstrom"] = 10 ** named.pop("log_force")
    return {f"{PREFIX}{name}": value for name, value in sorted(named.items())}


def closest_pairs(structures: Structures) -> Tensor:
    """Distance of the nearest two atoms, own images included, (n_structures,) Å; at most the search's reach."""
    closest = torch.full((structures.n_structures,), PAIR_SEARCH_ANGSTROM, dtype=torch.float64)
    try:
        pairs = Pairs.of(structures, PAIR_SEARCH_ANGSTROM)
    except StructureError:
        return closest  # an atom has flown away: the potential's business, not a reason to end a run here
    owners = structures.structure_index[pairs.ends[0]]
    return closest.scatter_reduce(0, owners, pairs.vectors.norm(dim=1), "amin")


@torch.no_grad()
def critic_values(agent: Any, state: State, move: Move) -> Tensor | None:
    """What the critic expects of these moves, (n_structures,): the smallest of several, the mean of a distribution."""
    critic = getattr(agent, "critics", getattr(agent, "critic", None))
    if isinstance(critic, CategoricalCritic):
        return (softmax(critic(state, move), dim=1) @ agent.support).double()
    if isinstance(critic, Critics):
        return critic(state, move).amin(dim=1).double()
    return None


@torch.no_grad()
def gate_factors(agent: Any, state: State) -> Tensor:
    """The gate's factor of each structure, exactly 1 where there is no gate (R6.4), (n_structures,)."""
    factors = getattr(getattr(agent, "policy", None), "gate_factors", None)
    return torch.ones(state.n_structures, dtype=torch.float64) if factors is None else factors(state).double()


def lowest_gate_factor(agent: Any) -> float | None:
    """How far the gate can close; None where there is none."""
    policy: Any = getattr(agent, "policy", None)
    return None if getattr(policy, "gate", None) is None else 1 / LARGEST_GATE_FACTOR


# ---- Does the critic know how far to go? The policy's move times a half, one and two, really made.
#
# Across states short moves may go with high rewards while from each state a longer one is better, and a critic that has
# learned the first drives the policy the wrong way (docs/results/learning.md).

FACTORS = {"half": 0.5, "own": 1.0, "double": 2.0}


@torch.no_grad()
def lengths(agent: Any, environment: Environment, state: State) -> dict[str, float]:
    """What the critic says of each length, `value_of_…`, and what one step of it brought, `worth_of_…`.

    The latter is the reward and, discounted, the critic's value of going on. `…_error` is the standard error of the
    worth beside that of the own length. A force call per structure and length, which training does not count.
    """
    values = dict[str, Tensor]()
    worths = dict[str, Tensor]()
    usable = torch.ones(state.n_structures, dtype=torch.bool)
    own = agent.act(state).to(state.structures.dtype)
    for name, factor in FACTORS.items():
        move = own.scaled(torch.full((state.n_structures,), factor, dtype=torch.float64), state.structures)
        transition = environment.step(state, move)
        after = transition.next_state
        expected = critic_values(agent, state, move)
        later = critic_values(agent, after, agent.act(after))
        if expected is None or later is None:
            return {}
        values[name] = expected
        worths[name] = transition.reward + transition.discount * later
        usable &= transition.outcome != Outcome.NON_FINITE
    found = {f"value_of_{name}_move": value[usable].mean() for name, value in values.items()}
    found |= {f"worth_of_{name}_move": worth[usable].mean() for name, worth in worths.items()}
    for name in ("half", "double"):
        differences = (worths[name] - worths["own"])[usable]
        found[f"{name}_move_error"] = differences.std() / math.sqrt(max(len(differences), 1))
    return {name: float(number) for name, number in found.items()}
