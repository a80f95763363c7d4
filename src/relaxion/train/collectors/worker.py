"""The collector's side: a worker that steps structures with the weights it is sent, and the messages between both.

Messages are plain arrays: small, exact, and copied nowhere by pickle's own ways.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaxion import __version__
from relaxion.errors import RunError
from relaxion.files import Stored, joined
from relaxion.potentials.registry import potential
from relaxion.structures import Move, State, Structures
from relaxion.train.agents.shared import restore_snapshot
from relaxion.train.experience.environment import Transition
from relaxion.train.experience.structure_replay import state_from_tensors, state_tensors
from relaxion.train.tasks.checkpoint import named_generator
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import GENERATORS, Collected, RelaxCollector, RelaxTask, make_agent

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
    transition, finished = collected.transition, collected.transition.finished
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
    renewed = next_state if answer.fresh is None else _renewed(transition, unpacked_state(answer.fresh))
    return Collected(transition, renewed, answer.force_calls)


def _renewed(transition: Transition, fresh: State) -> State:
    which = torch.arange(transition.n_structures)
    which[transition.finished] = transition.n_structures + torch.arange(fresh.n_structures)
    return State.concatenate([transition.next_state, fresh]).select(which)


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
        began, calls = self.state is None, 0
        if self.state is None:
            self.state, calls = self.collector.begin()
        collected = self.collector.collect(self.state, request.n_stored, request.step)
        self.state = collected.state
        generators = arrays({name: generator.get_state() for name, generator in self.generators.items()})
        yield packed(collected, began, generators, calls + collected.force_calls)
