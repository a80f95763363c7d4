"""Training on structures with collectors elsewhere.

Collectors take turns in a fixed order. The learner waits for the one whose turn it is, stores its step, makes the
updates that the step pays for, and sends it off again with the newest weights; meanwhile the others step. So with N
collectors a step was taken with weights N - 1 turns old, and with one the loop is that of the local trainer, to the
bit. Nothing depends on who is quicker: the order of arrival is the order of turns.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaxion import __version__
from relaxion.errors import CheckpointError, RelaxionWarning, RunError, SettingsError
from relaxion.files import Stored, joined
from relaxion.potentials.registry import potential
from relaxion.structures import Move, State, Structures
from relaxion.train.agents.shared import NoisyExplorer, restore_snapshot
from relaxion.train.diagnostics.diagnosis import RelaxationsUnderWay
from relaxion.train.experience.environment import Transition, replaced
from relaxion.train.experience.structure_replay import state_from_tensors, state_tensors
from relaxion.train.runs.loop import MakeTrainer, enough_memory
from relaxion.train.tasks.progress import RunTrainer, named_generator, taken_back
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import GENERATORS, Collected, RelaxCollector, RelaxTask, make_agent, relax_task
from relaxion.train.tasks.settings import RunSettings
from relaxion.workers import WorkerPlace, WorkerPool

Arrays = dict[str, NDArray[Any]]
HAS_STRESSES = "has_stresses"  # beside the numbers of a state, where stresses nobody asked for are zero
PER_STRUCTURE = ("reward", "discount", "source", "outcome", "back_off")


@dataclass(frozen=True, eq=False)
class CollectorPlace:
    """Where a collector stands: enough for another one to go on in its stead, to the bit."""

    state: Arrays | None  # None: it has not begun yet
    generators: Arrays


@dataclass(frozen=True, eq=False)
class CollectorRequest:
    """One step. `place` only for a collector that does not stand there already."""

    policy: Arrays
    n_stored: int
    step: int
    place: CollectorPlace | None = None

    def snapshot(self) -> dict[str, Tensor]:
        return {"counters": torch.tensor([self.n_stored, self.step]), **joined({"weights": tensors(self.policy)})}

    @classmethod
    def restored(cls, values: Mapping[str, Tensor]) -> CollectorRequest:
        n_stored, step = (int(number) for number in values["counters"])
        return cls(arrays(Stored(dict(values), {}).part("weights")), n_stored, step)


@dataclass(frozen=True, eq=False)
class CollectorAnswer:
    """What one step brought. The learner has the state it began in, unless `first_state` holds it."""

    first_state: Arrays | None
    proposed: Arrays
    executed: Arrays
    per_structure: Arrays
    next_state: Arrays
    fresh: Arrays | None  # new starts in place of what is finished, in order
    generators: Arrays
    force_calls: int


def packed_state(state: State) -> Arrays:
    """Without its graph, which is found anew."""
    return {**arrays(state_tensors(state)), HAS_STRESSES: np.array(state.evaluation.stresses is not None)}


def unpacked_state(packed: Arrays) -> State:
    state = state_from_tensors(tensors(packed))
    return state if packed[HAS_STRESSES] else replace(state, evaluation=replace(state.evaluation, stresses=None))


def packed(collected: Collected, began: bool, generators: Arrays, force_calls: int) -> CollectorAnswer:
    """`began`: the learner has not seen the state that this step began in."""
    transition = collected.transition
    finished = collected.transition.finished
    return CollectorAnswer(
        first_state=packed_state(transition.state) if began else None,
        proposed=arrays(vars(transition.proposed)),
        executed=arrays(vars(transition.executed)),
        per_structure=arrays({name: getattr(transition, name) for name in PER_STRUCTURE}),
        next_state=packed_state(transition.next_state),
        fresh=packed_state(collected.state.select(finished)) if bool(finished.any()) else None,
        generators=generators,
        force_calls=force_calls,
    )


def unpacked(answer: CollectorAnswer, state: State | None) -> Collected:
    """The step again, given the state it began in."""
    began = unpacked_state(answer.first_state) if answer.first_state is not None else state
    assert began is not None
    next_state = unpacked_state(answer.next_state)
    transition = Transition(
        state=began,
        proposed=Move(**tensors(answer.proposed)),
        executed=Move(**tensors(answer.executed)),
        next_state=next_state,
        **tensors(answer.per_structure),
    )
    if answer.fresh is not None:
        next_state = replaced(next_state, transition.finished, unpacked_state(answer.fresh))
    return Collected(transition, next_state, answer.force_calls)


def arrays(values: Mapping[str, Tensor]) -> Arrays:
    """Each by itself: a view would take all of the memory that it looks at along."""
    return {name: tensor.detach().contiguous().numpy().copy() for name, tensor in values.items()}


def tensors(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Copies, because what comes out of Ray may not be written to."""
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


@dataclass(frozen=True)
class Orders:
    """The same for all collectors of a run, sent once."""

    settings: RelaxRunSettings
    pool: Structures  # to train on; files are read by the learner alone
    n_threads: int  # sums depend on it
    folder: str  # where a potential looks for its tables
    version: str = __version__


class RemoteCollector:
    """A worker. Between two requests it stays where it is; a request with a place puts it there."""

    def __init__(self, orders: Orders) -> None:
        if orders.version != __version__:
            both = f"{__version__} is installed here, {orders.version} where the learner runs"
            raise RunError(f"relaxion {both}; install the same everywhere")
        if Path(orders.folder).is_dir():
            os.chdir(orders.folder)
        torch.set_num_threads(orders.n_threads)
        settings = orders.settings
        self.agent = make_agent(settings, named_generator(settings.training.seed, "agent"))
        self.generators = {name: torch.Generator() for name in GENERATORS}
        task = RelaxTask(settings, potential(settings.atoms.potential), {"training": orders.pool})
        self.collector = RelaxCollector(settings, task, self.agent, self.generators)
        self.state: State | None = None

    def __call__(self, request: CollectorRequest) -> Iterator[CollectorAnswer]:
        """One step of all structures."""
        if (place := request.place) is not None:
            self.state = None if place.state is None else unpacked_state(place.state)
            for name, state in tensors(place.generators).items():
                self.generators[name].set_state(state)
        restore_snapshot({"policy": self.agent.policy}, tensors(request.policy))
        began = self.state is None
        calls = 0
        if self.state is None:
            self.state, calls = self.collector.begin()
        collected = self.collector.collect(self.state, request.n_stored, request.step)
        self.state = collected.state
        generators = arrays({name: generator.get_state() for name, generator in self.generators.items()})
        yield packed(collected, began, generators, calls + collected.force_calls)


# ---- The learner

PATIENCE_SECONDS = 120  # without an answer before a word is said
MOST_LOSSES = 3  # of one collector over the same step: then the step itself is what kills


class Team:
    """Collectors by number. In the place of a lost one a new one is put where the lost one stood."""

    def __init__(self, pool: WorkerPool[Any]) -> None:
        self.pool = pool
        self._asked: dict[int, tuple[CollectorRequest, Callable[[], CollectorPlace]]] = {}  # without an answer yet
        self._to_give: set[int] = set()  # asked, but their collector has not been given its request
        self._in_place: set[int] = set()  # collectors that stand where their last step ended
        self._answers: dict[int, CollectorAnswer] = {}
        self._losses: Counter[int] = Counter()  # over the same step

    def ask(self, number: int, request: CollectorRequest, place: Callable[[], CollectorPlace]) -> None:
        """Begin a step. `place` says where the collector stands, for one that must be put there first."""
        self._asked[number] = request, place
        self._to_give.add(number)
        self._hear(0.0)

    def answer(self, number: int) -> CollectorAnswer:
        """Wait for it, redoing what was lost."""
        while number not in self._answers:
            self._hear(PATIENCE_SECONDS)
            if number in self._asked and self.pool.silence(number) > PATIENCE_SECONDS:
                warnings.warn(
                    f"collector {number} has not answered for {PATIENCE_SECONDS} s: a slow potential, or no free core "
                    "('ray status' shows it)",
                    RelaxionWarning,
                    stacklevel=3,
                )
        return self._answers.pop(number)

    def _hear(self, timeout: float) -> None:
        self._give()
        for news in self.pool.hear(timeout):
            for answer in news.results:
                self._answers[news.worker] = answer
                del self._asked[news.worker]
                self._losses[news.worker] = 0
            if news.lost:
                self._lost(news.worker)
        self._give()

    def _give(self) -> None:
        for number in self._to_give.intersection(self.pool.idle()):
            request, place = self._asked[number]
            if number not in self._in_place:
                request = replace(request, place=place())
                self._in_place.add(number)
            self.pool.give(number, request)
            self._to_give.discard(number)

    def _lost(self, number: int) -> None:
        self._in_place.discard(number)
        if number not in self._asked:
            return
        self._to_give.add(number)
        self._losses[number] += 1
        if self._losses[number] == MOST_LOSSES:
            raise RunError(
                f"collector {number} was lost {MOST_LOSSES} times over the same step, so something in that step ends "
                "it (the potential? memory?); run without collectors to see it; `resume=True` continues from the last "
                "checkpoint"
            )
        warnings.warn(f"collector {number} was lost; a new one repeats its step", RelaxionWarning, stacklevel=4)


class _Part:
    """One collector's share of the run, as of the last of its steps that was stored."""

    def __init__(self, state: State | None, generators: dict[str, Tensor], n_structures: int) -> None:
        self.state = state
        self.generators = generators
        self.under_way = torch.zeros(0, dtype=torch.int64)  # of the replay
        self.relaxations = RelaxationsUnderWay()  # of the diagnosis
        self.rewards: list[list[float]] = [[] for _ in range(n_structures)]  # of the episodes under way
        self.asked: CollectorRequest | None = None  # what it was last sent off with

    def place(self) -> CollectorPlace:
        state = None if self.state is None else packed_state(self.state)
        return CollectorPlace(state, arrays(self.generators))

    def snapshot(self) -> dict[str, Tensor]:
        parts = {"generators": self.generators, "relaxations": self.relaxations.snapshot()}
        parts |= {"replay": {"lanes": self.under_way}, "episodes": _ragged(self.rewards)}
        if self.state is not None:
            parts["state"] = state_tensors(self.state)
        if self.asked is not None:
            parts["asked"] = self.asked.snapshot()
        return joined(parts)

    def restore(self, stored: Stored) -> None:
        state = stored.part("state")
        asked = stored.part("asked")
        self.state = state_from_tensors(state) if state else None
        self.generators = {name: stored.part("generators")[name] for name in GENERATORS}
        self.relaxations.restore(stored.part("relaxations"))
        episodes = stored.part("episodes")
        self.rewards = [row.tolist() for row in episodes["numbers"].split(episodes["lengths"].tolist())]
        self.under_way = stored.part("replay")["lanes"]
        self.asked = CollectorRequest.restored(asked) if asked else None


def _ragged(rows: list[list[float]]) -> dict[str, Tensor]:
    return {
        "lengths": torch.tensor([len(row) for row in rows]),
        "numbers": torch.tensor([number for row in rows for number in row], dtype=torch.float64),
    }


class DistributedRelaxTrainer(RelaxTrainer):
    """An `RelaxTrainer` whose steps are taken elsewhere. Its checkpoint with one collector is the local trainer's."""

    def __init__(self, settings: RelaxRunSettings, task: RelaxTask, collectors: WorkerPlace) -> None:
        super().__init__(settings, task)
        self._collectors = collectors
        self._number = collectors.number
        self._team: Team | None = None
        self._sent_off = False
        self._parts: list[_Part] = []
        self._turn = 0  # whose step is stored next

    @property
    def n_collectors(self) -> int:
        """As asked for, else one for each core of the cluster."""
        if self._number is None:
            self._number = self.team.pool.n_workers
        return self._number

    @property
    def team(self) -> Team:
        """The collectors, started when they are first needed."""
        if self._team is None:
            orders = Orders(self.settings, self.task.pools["training"], torch.get_num_threads(), str(Path.cwd()))
            place = replace(self._collectors, number=self._number)
            self._team = Team(place.open(partial(RemoteCollector, orders)))
        return self._team

    def prepare(self, folder: Path) -> None:
        """All collectors are sent off first: they need not wait for BFGS and FIRE."""
        if not self._in_fit:
            self._send_off_all()
        super().prepare(folder)

    def advance(self) -> None:
        """Store the step of the collector whose turn it is, update, send it off again."""
        if self._in_fit:
            super().advance()
            return
        self._send_off_all()
        super().advance()
        self._send_off(self._turn)
        self._turn = (self._turn + 1) % self.n_collectors

    @property
    def _in_fit(self) -> bool:
        """A stiffness policy is fitted before the agent's first step."""
        return self.fit is not None and not self.fit.done

    def _send_off_all(self) -> None:
        """After the start and after a resume nobody is under way."""
        if self._sent_off:
            return
        self._sent_off = True
        if not self._parts:
            self._parts = self._fresh_parts()
        for number, part in enumerate(self._parts):
            self._send_off(number, part.asked)

    def _fresh_parts(self) -> list[_Part]:
        """The first collector has the local trainer's state and generators; the others begin by themselves."""
        own = {name: self.generators[name].get_state() for name in GENERATORS}
        parts = [_Part(self.state, own, self.steps_per_round)]
        parts[0].under_way = self.replay.under_way
        parts[0].relaxations = self.diagnosis.relaxations
        parts[0].rewards = self.episodes.under_way
        for number in range(1, self.n_collectors):
            seed = self.settings.training.seed
            states = {name: named_generator(seed, f"{name} {number}").get_state() for name in GENERATORS}
            parts.append(_Part(None, states, self.steps_per_round))
        return parts

    def _send_off(self, number: int, request: CollectorRequest | None = None) -> None:
        """With the newest weights, unless it was under way with older ones when the run was stopped."""
        part = self._parts[number]
        policy = {f"policy.{name}": tensor for name, tensor in self.agent.policy.state_dict().items()}
        part.asked = request or CollectorRequest(arrays(policy), len(self.replay), self.reinforced_steps)
        self.team.ask(number, part.asked, part.place)

    def _collect(self) -> None:
        """With what belongs to this collector's structures in its place."""
        part = self._parts[self._turn]
        self.replay.under_way = part.under_way
        self.diagnosis.relaxations = part.relaxations
        self.episodes.under_way = part.rewards
        super()._collect()
        part.under_way = self.replay.under_way
        part.state = self.state

    def _next_collected(self) -> Collected:
        part = self._parts[self._turn]
        answer = self.team.answer(self._turn)
        part.generators = tensors(answer.generators)
        for name, state in part.generators.items():
            self.generators[name].set_state(state)
        self._note_noise(part)
        return unpacked(answer, part.state)

    def _note_noise(self, part: _Part) -> None:
        """What the collector's agent was set to, for the log."""
        noise = self.exploration.noise
        asked = part.asked
        if noise is None or asked is None or self.exploration.at_random(asked.n_stored):
            return
        if isinstance(self.agent, NoisyExplorer):
            self.agent.exploration_scale = noise(asked.step)

    def snapshot(self) -> dict[str, Tensor]:
        """With one collector that of the local trainer: it was sent off with the newest weights."""
        own = super().snapshot()
        if self.n_collectors == 1:
            return own
        parts = {str(number): part.snapshot() for number, part in enumerate(self._parts)}
        counters = {"counters": {"turn": torch.tensor(self._turn), "number": torch.tensor(self.n_collectors)}}
        return own | joined({"collectors": joined(parts | counters)})

    def restore(self, stored: Stored) -> None:
        super().restore(stored)
        if self.n_collectors == 1:
            return
        with taken_back():
            collectors = Stored(stored.part("collectors"), {})
            self._turn = int(collectors.part("counters")["turn"])
            self._parts = []
            if collectors.part("0"):
                self._parts = self._fresh_parts()
                for number, part in enumerate(self._parts):
                    part.restore(Stored(collectors.part(str(number)), {}))

    def _check_collectors(self, number: int) -> None:
        """A checkpoint holds the share of every collector."""
        if self._number is None:
            self._number = number  # a cluster may have more or fewer cores today
        if self._number != number:
            kind = self._collectors.kind
            where = "" if self._collectors.address is None else f"@{self._collectors.address}"
            raise CheckpointError(
                f"this run has {number} collectors, {self._number} were asked for; "
                f"continue with `collectors={kind}:{number}{where}`"
            )

    def close(self) -> None:
        super().close()
        if self._team is not None:
            self._team.pool.close()


def trainer_with(collectors: WorkerPlace) -> MakeTrainer:
    """As `relaxion.train.runs.loop.train` takes one in `make`."""

    def make(settings: RunSettings) -> RunTrainer:
        if not isinstance(settings, RelaxRunSettings):
            raise SettingsError(
                f'collectors are for task = "relax", where a step costs force calls; a step of '
                f"{settings.training.task} costs less than sending it: train without collectors"
            )
        with enough_memory():
            return DistributedRelaxTrainer(settings, relax_task(settings), collectors)

    return make
