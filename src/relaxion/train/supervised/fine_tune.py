"""Fine-tuning: a stiffness goes on learning from relaxations, and is replaced only by one that proved better.

One relaxation in a few is held out for validation, by its structure: nothing is learned from those. The network that
learns takes the place of the one in use where it predicts the ways of the relaxations held out better, in 97.5 of 100
resamplings. Should that turn out wrong when more of them are there, the network it all began with comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from relaxion.files import Stored, joined
from relaxion.model.stiffness_network import MetricNetwork
from relaxion.settings import Settings
from relaxion.train.supervised.examples import Examples, RelaxationExamples, is_validation
from relaxion.train.supervised.fit import ExampleSet, Fit, FitSettings, relative_errors

logger = logging.getLogger(__name__)

RESAMPLES = 2000
SEED = 0
CERTAINTY = 0.975  # share of the resamplings in which a network must be better to take over, or worse to start again
LARGEST_ERROR = 3.0  # of one example: beyond it a step is useless however wrong it is
MOST_AT_ONCE = 2000  # atoms in one batch of errors
NEWEST_SHARE = 0.25  # of the examples of an update, those from relaxations that no earlier fit has seen
FINAL_LEARNING_RATE = 2e-5
MOST_VALIDATION_EXAMPLES = 3  # of one relaxation: all of them would take longer to judge by than to learn from


class FineTuneSettings(Settings):
    """How a stiffness learns from relaxations that were made with it."""

    n_updates: int = Field(default=20, ge=0)
    """Of one fit; the rate falls along half a cosine over them. Twice as many, of 24 examples, take twice as long and
    leave 0.86 of the error where these leave 0.87 (110 Al–Fe packings, a fit every ten). 0, for `relaxion learn`: four
    for each relaxation, between 200 and 1500."""

    n_examples: int = Field(default=16, ge=1)
    """Examples per update."""

    learning_rate: float = Field(default=8e-4, gt=0)
    """Of Adam at the start of a fit; measured for policies that are good already."""

    validation_one_in: int = Field(default=4, ge=2)
    """One relaxation in so many is held out."""

    least_validation: int = Field(default=10, ge=2)
    """Fewer relaxations held out prove nothing: the network stays as it is. With three, the first hundred packings of a
    row took 1.08 (1.01–1.14) of the shipped policy's calls: a smaller error on so few need not mean fewer calls."""

    seed: int = Field(default=0, ge=0)
    """Of what is drawn."""


@dataclass(frozen=True)
class Acceptance:
    """The test of a new network against the one in use, on relaxations that neither learned from."""

    n_validation: int
    error_before: float  # mean relative error of predicted ways
    error_after: float
    ratio: float
    low: float
    high: float  # in 95 of 100 resamplings the ratio lies between these
    share_better: float  # of the resamplings

    @property
    def better(self) -> bool:
        return self.share_better >= CERTAINTY

    @property
    def worse(self) -> bool:
        return self.share_better <= 1 - CERTAINTY

    @classmethod
    def of(cls, after: np.ndarray, before: np.ndarray) -> Acceptance:
        """From the errors on each relaxation, paired."""
        which = np.random.default_rng(SEED).integers(len(after), size=(RESAMPLES, len(after)))
        ratios = after[which].mean(axis=1) / before[which].mean(axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return cls(
            n_validation=len(after),
            error_before=float(before.mean()),
            error_after=float(after.mean()),
            ratio=float(after.mean() / before.mean()),
            low=float(low),
            high=float(high),
            share_better=float((ratios < 1).mean()),
        )


class RelaxationSet(ExampleSet):
    """Relaxations to learn from; the newest replace the oldest."""

    def __init__(self, number: int, most: int, seed: int) -> None:
        """`number`: examples per update; `most`: relaxations kept."""
        self.number = number
        self.most = most
        self.relaxations: list[RelaxationExamples] = []
        self.n_new = 0  # that no earlier fit has seen
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, found: RelaxationExamples) -> None:
        self.relaxations = [*self.relaxations, found][-self.most :]
        self.n_new += 1

    def draw(self, _n_updates: int, /) -> tuple[Examples, dict[str, float]]:
        """Relaxations first, then one example of each: long ones count no more than short ones."""
        total = len(self.relaxations)
        n_newest = round(self.number * NEWEST_SHARE) if 0 < self.n_new < total else 0
        first = total - self.n_new if n_newest else 0  # where all are new, or none is, anyone is drawn
        newest = torch.randint(first, total, (n_newest,), generator=self.generator)
        anyone = torch.randint(total, (self.number - n_newest,), generator=self.generator)
        parts = []
        for place in [*newest.tolist(), *anyone.tolist()]:
            singles = self.relaxations[place].singles
            parts.append(singles[int(torch.randint(len(singles), (1,), generator=self.generator))])
        return Examples.concatenate(parts), {}


class FineTune:
    """`add` relaxations, `fit` to them, and look at `network`, which only ever gets better."""

    def __init__(
        self,
        network: MetricNetwork,
        settings: FineTuneSettings | None = None,
        most_training: int = 2000,
        most_validation: int = 60,
    ) -> None:
        """`most_training`, `most_validation`: relaxations remembered; the newest replace the oldest."""
        self.settings = settings or FineTuneSettings()
        self.most_validation = most_validation
        self.network = deepcopy(network).requires_grad_(False)  # in use
        self.learning = deepcopy(network).requires_grad_(True)
        self.origin = deepcopy(network).requires_grad_(False)
        self.training = RelaxationSet(self.settings.n_examples, most_training, self.settings.seed)
        self.validation: list[RelaxationExamples] = []
        self.n_fits = 0
        self.n_adopted = 0
        self.acceptance: Acceptance | None = None
        self._fit: Fit | None = None

    @property
    def n_relaxations(self) -> int:
        return len(self.training.relaxations) + len(self.validation)

    def add(self, found: RelaxationExamples) -> None:
        """One more relaxation: to learn from, or for validation."""
        if held_out(found.key, self.settings.validation_one_in):
            self.validation = [*self.validation, found.thinned(MOST_VALIDATION_EXAMPLES)][-self.most_validation :]
        else:
            self.training.add(found)

    def learn(self) -> Acceptance | None:
        """One fit and its test; None where there was nothing to learn from, or too little to test with."""
        if not self.training.relaxations:
            return None
        while not self.done:
            self.update()
        return self.test()

    @property
    def done(self) -> bool:
        """Whether this fit has made all its updates."""
        return self._fit is not None and self._fit.done

    @property
    def n_updates(self) -> int:
        """Of this fit so far."""
        return 0 if self._fit is None else self._fit.n_updates

    def update(self) -> dict[str, float]:
        """One of `n_updates`; scalars for the log."""
        return self.fit.update()

    @property
    def fit(self) -> Fit:
        """Each begins at the full rate, with nothing in Adam's memory."""
        if self._fit is None:
            rate = self.settings.learning_rate
            settings = FitSettings(fit_updates=self.settings.n_updates, fit_learning_rate=rate)
            self._fit = Fit(self.learning, self.training, settings, min(FINAL_LEARNING_RATE, rate))
        return self._fit

    def test(self) -> Acceptance | None:
        """The end of a fit: what it learned is used where it proved better, and dropped where it proved worse."""
        self.n_fits += 1
        self.training.n_new = 0
        self._fit = None
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.learning.parameters()):
            logger.warning("learning gave weights that are not finite; they were discarded")
            self.learning.load_state_dict(self.network.state_dict())
            return None
        if len(self.validation) < self.settings.least_validation:
            return None
        before = errors_of(self.network, self.validation)
        self.acceptance = Acceptance.of(errors_of(self.learning, self.validation), before)
        if self.acceptance.better:
            self.network.load_state_dict(self.learning.state_dict())
            self.n_adopted += 1
        elif self.n_adopted and Acceptance.of(before, errors_of(self.origin, self.validation)).worse:
            logger.info("what was learned turned out worse than the policy it started from, which is used again")
            self.network.load_state_dict(self.origin.state_dict())
            self.learning.load_state_dict(self.origin.state_dict())
            self.n_adopted = 0
        elif self.acceptance.worse:
            self.learning.load_state_dict(self.network.state_dict())
        return self.acceptance

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that changes but the examples, which stay in their store."""
        parts = {"network": self.network.state_dict(), "learning": self.learning.state_dict()}
        if self._fit is not None:
            parts["fit"] = self._fit.snapshot()
        counters = torch.tensor([self.n_fits, self.n_adopted, self.training.n_new])
        parts["own"] = {"generator": self.training.generator.get_state(), "counters": counters}
        return {name: tensor.clone() for name, tensor in joined(parts).items()}

    def restore(self, stored: Stored) -> None:
        """Go on exactly there; a KeyError or a RuntimeError where it is another network's."""
        self.network.load_state_dict(stored.part("network"))
        self.learning.load_state_dict(stored.part("learning"))
        own = stored.part("own")
        self.n_fits, self.n_adopted, self.training.n_new = own["counters"].tolist()
        self.training.generator.set_state(own["generator"])
        self._fit = None
        if fit := stored.part("fit"):
            self.fit.restore(fit)


def held_out(key: str, one_in: int) -> bool:
    """Whether a relaxation with this key is for validation."""
    return is_validation(f"apart {key}", one_in)


def errors_of(network: MetricNetwork, relaxations: Sequence[RelaxationExamples]) -> np.ndarray:
    """The mean relative error of each relaxation's predicted ways, (n_relaxations,)."""
    found: list[np.ndarray] = []
    group: list[RelaxationExamples] = []
    for one in relaxations:
        if group and sum(other.examples.state.structures.n_atoms for other in (*group, one)) > MOST_AT_ONCE:
            found.append(_errors(network, group))
            group = []
        group.append(one)
    return np.concatenate([*found, _errors(network, group)])


def _errors(network: MetricNetwork, group: Sequence[RelaxationExamples]) -> np.ndarray:
    with torch.no_grad():
        errors = relative_errors(network, Examples.concatenate([one.examples for one in group]))
    parts = errors.clamp_max(LARGEST_ERROR).split([one.number for one in group])
    return np.array([float(part.mean()) for part in parts])
