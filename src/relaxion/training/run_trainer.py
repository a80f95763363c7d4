"""What a run asks of whoever trains, be it on vectors or on atoms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from relaxion.files import Stored
from relaxion.training.diagnostics.alarms import Event
from relaxion.training.result import Result
from relaxion.training.run_settings import RunSettings


class Assessment(Protocol):
    """How good the policy is, for the log."""

    def metrics(self) -> dict[str, float]: ...


class RunTrainer(Protocol):
    """Everything that changes can be taken out (`snapshot`) and put back (`restore`), to the bit."""

    @property
    def step(self) -> int:
        """Environment steps so far, of all environments or structures."""
        ...

    @property
    def settings(self) -> RunSettings: ...

    @property
    def steps_per_round(self) -> int:
        """Environment steps that one `advance` takes."""
        ...

    def prepare(self, folder: Path) -> None:
        """What is done once at the start and kept in the run folder."""
        ...

    def advance(self) -> None:
        """Collect, store, update."""
        ...

    def metrics(self) -> dict[str, float]:
        """What has built up since the last call; one line of the log."""
        ...

    def take_events(self) -> list[Event]:
        """Alarms that began or ended since the last call."""
        ...

    def assess(self, stop: Callable[[], bool]) -> Any:
        """An assessment without noise from fixed starts; training never notices."""
        ...

    def result(self, final: Any, wall_time_seconds: float) -> Result: ...

    def weights(self) -> dict[str, Tensor]:
        """What it takes to act, or to start a new run from."""
        ...

    def snapshot(self) -> dict[str, Tensor]: ...

    def restore(self, stored: Stored) -> None: ...

    def start_from(self, stored: Stored) -> None:
        """Take over old networks; counters and Adam's memory stay at 0 (R10.2)."""
        ...

    def close(self) -> None: ...
