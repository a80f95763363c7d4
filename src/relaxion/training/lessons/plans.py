"""The frame of every plan of the task `metric`: what a run is taught, what it is assessed on, what its card says."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Generator

from relaxion.bench.assessment import Assessor, Starts
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.training.lessons.live import Examples

STARTS_SEED = 8500  # of validation starts: neither trained on nor those of any benchmark


class Plan:
    """What a run does with these settings: examples, assessment, card."""

    structures: ClassVar[str]  # in words, for the result
    fails_on: tuple[str, ...]
    engines: str

    def examples(self, policy: MetricPolicy, generator: Generator, /) -> Examples:
        """Lessons for the policy."""
        raise NotImplementedError

    def starts(self) -> list[Starts]:
        """To be assessed, never trained on; the same every time, so many of each kind."""
        raise NotImplementedError

    @cached_property
    def assessor(self) -> Assessor:
        return Assessor(self.starts)

    def compare(self, folder: Path) -> None:
        """Core, BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def errors(self, _network: MetricNetwork, /) -> dict[str, float]:
        """On lessons never trained on, for the log, where some are kept apart."""
        return {}

    def card(self) -> dict[str, Any]:
        """What is trained on."""
        raise NotImplementedError
