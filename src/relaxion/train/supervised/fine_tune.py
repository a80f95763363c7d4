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
from torch import Tensor

from relaxion.files import Stored, joined
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.train.judge.statistics import resampled, resampled_means
from relaxion.train.supervised.dataset import RelaxationSet
from relaxion.train.supervised.fit import Examples, Fit, FitSettings, RelaxationExamples, is_validation, relative_errors

logger = logging.getLogger(__name__)

SEED = 0  # of the examples drawn
CERTAINTY = 0.975  # share of the resamplings in which a network must be better to take over, or worse to start again
LARGEST_ERROR = 3.0  # of one example: beyond it a step is useless however wrong it is
MOST_AT_ONCE = 2000  # atoms in one batch of errors
FINAL_LEARNING_RATE = 2e-5
VALIDATION_ONE_IN = 4  # one relaxation in so many is held out
# Fewer relaxations held out prove nothing: the network stays as it is. With three, the first hundred packings of a row
# took 1.08 (1.01–1.14) of the shipped policy's calls: a smaller error on so few need not mean fewer calls.
LEAST_VALIDATION = 10
MOST_VALIDATION_EXAMPLES = 3  # of one relaxation: all of them would take longer to judge by than to learn from


# Of one fit while relaxing; the rate was measured for policies that are good already. Twice as many updates of 24
# examples take twice as long and leave 0.86 of the error where these leave 0.87 (110 Al–Fe packings, a fit every ten).
USUAL = FitSettings(fit_updates=20, examples_per_update=16, fit_learning_rate=8e-4)


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
        ratio = resampled(after, before)
        return cls(
            n_validation=len(after),
            error_before=float(before.mean()),
            error_after=float(after.mean()),
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            share_better=float((resampled_means(after, before) < 1).mean()),
        )


class FineTune:
    """`add` relaxations, `fit` to them, and look at `network`, which only ever gets better."""

    def __init__(
        self,
        network: StiffnessNetwork,
        settings: FitSettings = USUAL,
        most_training: int = 2000,
        most_validation: int = 60,
        *,
        least_validation: int = LEAST_VALIDATION,
        validation_one_in: int = VALIDATION_ONE_IN,
    ) -> None:
        """From a network that is not changed.

        settings: of each fit.
        most_training, most_validation: relaxations remembered; the newest replace the oldest.
        least_validation: with fewer relaxations held out nothing is tested, and the network stays.
        validation_one_in: one relaxation in so many is held out.
        """
        self.settings = settings
        self.most_validation = most_validation
        self.least_validation = least_validation
        self.validation_one_in = validation_one_in
        self.network = deepcopy(network).requires_grad_(False)  # in use
        self.learning = deepcopy(network).requires_grad_(True)
        self.origin = deepcopy(network).requires_grad_(False)
        self.training = RelaxationSet(settings.examples_per_update, most_training, SEED)
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
        if held_out(found.key, self.validation_one_in):
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
        """One of `fit_updates`; scalars for the log."""
        return self.fit.update()

    @property
    def fit(self) -> Fit:
        """Each begins at the full rate, with nothing in Adam's memory."""
        if self._fit is None:
            last = min(FINAL_LEARNING_RATE, self.settings.fit_learning_rate)
            self._fit = Fit(self.learning, self.training, self.settings, last)
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
        if len(self.validation) < self.least_validation:
            return None
        before = errors_of(self.network, self.validation)
        self.acceptance = Acceptance.of(errors_of(self.learning, self.validation), before)
        if self.acceptance.better:
            self.network.load_state_dict(self.learning.state_dict())
            self.n_adopted += 1
        elif self.n_adopted and Acceptance.of(before, errors_of(self.origin, self.validation)).worse:
            logger.info("the fine-tuned policy turned out worse than its origin, which is used again")
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


def held_out(key: str, one_in: int = VALIDATION_ONE_IN) -> bool:
    """Whether a relaxation with this key is for validation."""
    return is_validation(f"apart {key}", one_in)


def errors_of(network: StiffnessNetwork, relaxations: Sequence[RelaxationExamples]) -> np.ndarray:
    """The mean relative error of each relaxation's predicted ways, (n_relaxations,)."""
    found: list[np.ndarray] = []
    group: list[RelaxationExamples] = []
    for one in relaxations:
        if group and sum(other.examples.state.structures.n_atoms for other in (*group, one)) > MOST_AT_ONCE:
            found.append(_errors(network, group))
            group = []
        group.append(one)
    return np.concatenate([*found, _errors(network, group)])


def _errors(network: StiffnessNetwork, group: Sequence[RelaxationExamples]) -> np.ndarray:
    with torch.no_grad():
        errors = relative_errors(network, Examples.concatenate([one.examples for one in group]))
    parts = errors.clamp_max(LARGEST_ERROR).split([one.number for one in group])
    return np.array([float(part.mean()) for part in parts])
