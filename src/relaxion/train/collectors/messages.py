"""What goes between learner and collectors, as plain arrays: small, exact, and copied nowhere by pickle's own ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaxion.files import Stored, joined
from relaxion.structures import Move, State
from relaxion.train.experience.state_store import state_from_tensors, state_tensors
from relaxion.train.experience.transition import Transition
from relaxion.train.tasks.relax_collector import Collected

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
    """What one step brought. The learner knows the state it began in, unless `first_state` says it."""

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
