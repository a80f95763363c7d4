"""The collectors of a run as the learner sees them: asked, waited for, and replaced when they are lost."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from relaxion.errors import RelaxionWarning, RunError
from relaxion.scaling.collectors.collector import Orders, RemoteCollector
from relaxion.scaling.collectors.messages import Answer, Place, Request
from relaxion.scaling.ray_engine import RayEngine

PATIENCE_SECONDS = 120  # without an answer before a word is said
MOST_LOSSES = 3  # of one collector over the same step: then the step itself is what kills


@dataclass
class _Member:
    actor: Any
    request: Request  # without a place
    place: Callable[[], Place]
    under_way: Any  # Ray's promise of an answer


class Team:
    """Collectors by number. A lost one is replaced by a new one that is put where the lost one stood."""

    def __init__(self, engine: RayEngine, orders: Orders) -> None:
        self._engine, self._ray = engine, engine.ray
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0)(RemoteCollector)
        self._orders = self._ray.put(orders)
        self.members: dict[int, _Member] = {}

    def ask(self, number: int, request: Request, place: Callable[[], Place]) -> None:
        """Begin a step. `place` says where the collector stands, for one that must be put there first."""
        known = self.members.get(number)
        if known is None:
            self._hire(number, request, place)
        else:
            under_way = known.actor.collect.remote(request)
            self.members[number] = _Member(known.actor, request, place, under_way)

    def answer(self, number: int) -> Answer:
        """Wait for it, redoing what was lost."""
        exceptions = self._ray.exceptions
        for _ in range(MOST_LOSSES):
            member = self.members[number]
            try:
                return self._waited_for(number, member)
            except exceptions.RayTaskError as error:
                raise error.cause from None  # what went wrong over there, as if it had been here
            except exceptions.RayError as error:  # the actor, its machine, or the answer on its way
                if getattr(error, "actor_init_failed", False):
                    raise RunError(f"collector {number} cannot begin: {_last_line(error)}") from error
                self._replace(number, member)
        raise RunError(
            f"collector {number} was lost {MOST_LOSSES} times over the same step, so something in that step ends it "
            "(the potential? memory?); run without collectors to see it; `resume=True` continues from the last "
            "checkpoint"
        )

    def _waited_for(self, number: int, member: _Member) -> Answer:
        ready, _ = self._ray.wait([member.under_way], timeout=PATIENCE_SECONDS)
        if not ready:
            warnings.warn(
                f"collector {number} has not answered for {PATIENCE_SECONDS} s: a slow potential, or no free core "
                "('ray status' shows it)",
                RelaxionWarning,
                stacklevel=4,
            )
        return self._ray.get(member.under_way)

    def _replace(self, number: int, member: _Member) -> None:
        self._let_go(member)  # one that is only out of reach must not come back
        warnings.warn(f"collector {number} was lost; a new one repeats its step", RelaxionWarning, stacklevel=4)
        self._hire(number, member.request, member.place)

    def _hire(self, number: int, request: Request, place: Callable[[], Place]) -> None:
        actor = self._actor_class.remote(self._orders)
        under_way = actor.collect.remote(replace(request, place=place()))
        self.members[number] = _Member(actor, request, place, under_way)

    def _let_go(self, member: _Member) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(member.actor)

    def close(self) -> None:
        """All collectors end, and Ray with them where it was started for them."""
        for member in self.members.values():
            self._let_go(member)
        self.members = {}
        self._engine.stop()


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
