"""The collector's side: a worker that steps structures as it is told, with the weights it is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from relaxion.errors import RunError
from relaxion.potentials.registry import potential
from relaxion.structures import State, Structures
from relaxion.train.agents.shared import restore_snapshot
from relaxion.train.collectors.messages import (
    CollectorAnswer,
    CollectorRequest,
    arrays,
    packed,
    tensors,
    unpacked_state,
)
from relaxion.train.runs.checkpoint import named_generator
from relaxion.train.tasks.relax_collector import GENERATORS, RelaxCollector, make_agent
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import RelaxTask
from relaxion.version import __version__


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
