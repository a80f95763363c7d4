"""A metric goes on learning from relaxations, and is replaced only by one that proved better.

One relaxation in a few is held out, by its structure: nothing is learned from those, they judge. A student learns by
the one teacher (`networks/metric/teacher.py`); it takes the place of the metric in use where it predicts the ways of
the relaxations held out better, in 97.5 of 100 resamplings. Should that turn out wrong when more of them are there,
the metric it all began with comes back.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from relaxion.files import Stored, joined
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.teacher import Lessons, Teacher, TeachingSettings, relative_errors
from relaxion.optimize.examples import Examples, ExampleSettings

logger = logging.getLogger(__name__)

RESAMPLES, SEED = 2000, 0
LARGEST_ERROR = 3.0  # of one example: beyond it a step is useless however wrong it is
MOST_AT_ONCE = 2000  # atoms in one assessment


class StudySettings(ExampleSettings):
    """How a metric learns from relaxations."""

    n_updates: int = Field(default=20, ge=1)
    """Of one study; the rate falls along half a cosine over them. Twice as many, of 24 examples, take twice as long and
    leave 0.86 of the error where these leave 0.87 (110 Al–Fe packings, a study every ten)."""

    n_lessons: int = Field(default=16, ge=1)
    """Examples per update."""

    newest_share: float = Field(default=0.25, ge=0, le=1)
    """Of the examples of an update, those from relaxations that no earlier study has seen."""

    learning_rate: float = Field(default=8e-4, gt=0)
    """Of Adam at the start of a study; measured for policies that are good already."""

    final_learning_rate: float = Field(default=2e-5, gt=0)
    """At its end."""

    largest_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened."""

    apart_in: int = Field(default=4, ge=2)
    """One relaxation in so many is held out."""

    least_apart: int = Field(default=10, ge=2)
    """Fewer relaxations held out prove nothing: the metric stays as it is. With three, the first hundred packings of a
    row took 1.08 (1.01–1.14) of the shipped policy's calls: a smaller error on so few need not mean fewer calls."""

    certainty: float = Field(default=0.975, gt=0.5, lt=1)
    """Share of the resamplings in which a student must be better to take over, or worse to start again."""

    most_kept: int = Field(default=2000, ge=1)
    """Relaxations remembered for the examples; the newest replace the oldest."""

    most_apart: int = Field(default=60, ge=1)
    """And of those held out."""

    most_judged: int = Field(default=3, ge=1)
    """Examples of each of these: all of them would take longer to judge by than to learn from."""


@dataclass(frozen=True)
class Verdict:
    """Of the student against the metric in use, on relaxations that neither learned from."""

    n_apart: int
    error_before: float  # mean relative error of predicted ways
    error_after: float
    ratio: float
    low: float
    high: float  # in 95 of 100 resamplings the ratio lies between these
    share_better: float  # of the resamplings
    certainty: float  # that was asked for

    @property
    def better(self) -> bool:
        return self.share_better >= self.certainty

    @property
    def worse(self) -> bool:
        return self.share_better <= 1 - self.certainty

    @classmethod
    def of(cls, after: np.ndarray, before: np.ndarray, certainty: float) -> Verdict:
        """From the errors on each relaxation, paired."""
        which = np.random.default_rng(SEED).integers(len(after), size=(RESAMPLES, len(after)))
        ratios = after[which].mean(axis=1) / before[which].mean(axis=1)
        low, high = (float(bound) for bound in np.percentile(ratios, [2.5, 97.5]))
        ratio, share = float(after.mean() / before.mean()), float((ratios < 1).mean())
        return cls(len(after), float(before.mean()), float(after.mean()), ratio, low, high, share, certainty)


class Study:
    """`add` relaxations, `learn`, and look at `network`, which only ever gets better."""

    def __init__(self, network: MetricNetwork, settings: StudySettings | None = None, seed: int = 0) -> None:
        self.settings = settings or StudySettings()
        self.network = deepcopy(network).requires_grad_(False)  # in use
        self.student = deepcopy(network).requires_grad_(True)
        self.origin = deepcopy(network).requires_grad_(False)
        self.taught: list[Examples] = []
        self.apart: list[Examples] = []
        self.n_studies = self.n_adopted = self.n_new = 0
        self.verdict: Verdict | None = None
        self._teacher: Teacher | None = None
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def n_relaxations(self) -> int:
        return len(self.taught) + len(self.apart)

    def add(self, examples: Examples) -> None:
        """One more relaxation: to learn from, or to judge by."""
        if is_apart(examples.key, self.settings.apart_in):
            examples = examples.thinned(self.settings.most_judged)
            self.apart = [*self.apart, examples][-self.settings.most_apart :]
            return
        self.taught = [*self.taught, examples][-self.settings.most_kept :]
        self.n_new += 1

    def learn(self) -> Verdict | None:
        """One study; the verdict on its student, None where there was nothing to learn or nobody to judge."""
        if not self.taught:
            return None
        while not self.done:
            self.update()
        return self.judge()

    @property
    def done(self) -> bool:
        """Whether this study has made all its updates."""
        return self._teacher is not None and self._teacher.n_updates >= self.settings.n_updates

    @property
    def n_updates(self) -> int:
        """Of this study so far."""
        return 0 if self._teacher is None else self._teacher.n_updates

    def update(self) -> dict[str, float]:
        """One of `n_updates`; what it showed."""
        return self.teacher.update(self._drawn())

    @property
    def teacher(self) -> Teacher:
        """Of this study: each begins at the full rate, with nothing in Adam's memory."""
        if self._teacher is None:
            self._teacher = Teacher(self.student, self._teaching())
        return self._teacher

    def judge(self) -> Verdict | None:
        """The end of a study: the student takes over where it proved better, and starts again where it proved worse."""
        self.n_studies, self.n_new, self._teacher = self.n_studies + 1, 0, None
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.student.parameters()):
            logger.warning("learning gave weights that are not finite; they were discarded")
            self.student.load_state_dict(self.network.state_dict())
            return None
        return self._judged()

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that changes but the examples, which stay in their memory."""
        parts = {"network": self.network.state_dict(), "student": self.student.state_dict()}
        parts |= {} if self._teacher is None else {"teacher": self._teacher.tensors()}
        counters = torch.tensor([self.n_studies, self.n_adopted, self.n_new, self.n_updates])
        own = {"generator": self.generator.get_state(), "counters": counters}
        return {name: tensor.clone() for name, tensor in joined(parts | {"study": own}).items()}

    def restore(self, stored: Stored) -> None:
        """Go on exactly there; a KeyError or a RuntimeError where it is another network's."""
        self.network.load_state_dict(stored.part("network"))
        self.student.load_state_dict(stored.part("student"))
        own = stored.part("study")
        self.n_studies, self.n_adopted, self.n_new, n_updates = own["counters"].tolist()
        self.generator.set_state(own["generator"])
        self._teacher = None
        if teacher := stored.part("teacher"):
            self.teacher.restore(teacher, n_updates)

    def _teaching(self) -> TeachingSettings:
        own = self.settings
        return TeachingSettings(
            lesson_updates=own.n_updates,
            lesson_learning_rate=own.learning_rate,
            lesson_learning_rate_final=min(own.final_learning_rate, own.learning_rate),
            lesson_largest_gradient_norm=own.largest_gradient_norm,
        )

    def _drawn(self) -> Lessons:
        """Relaxations first, then one example of each: long ones count no more than short ones."""
        number, total = self.settings.n_lessons, len(self.taught)
        n_newest = round(number * self.settings.newest_share) if 0 < self.n_new < total else 0
        first = total - self.n_new if n_newest else 0  # where all are new, or none is, anyone is drawn
        newest = torch.randint(first, total, (n_newest,), generator=self.generator)
        anyone = torch.randint(total, (number - n_newest,), generator=self.generator)
        parts = []
        for place in [*newest.tolist(), *anyone.tolist()]:
            singles = self.taught[place].singles
            parts.append(singles[int(torch.randint(len(singles), (1,), generator=self.generator))])
        return Lessons.concatenate(parts)

    def _judged(self) -> Verdict | None:
        if len(self.apart) < self.settings.least_apart:
            return None
        used, certainty = errors_of(self.network, self.apart), self.settings.certainty
        self.verdict = Verdict.of(errors_of(self.student, self.apart), used, certainty)
        if self.verdict.better:
            self.network.load_state_dict(self.student.state_dict())
            self.n_adopted += 1
        elif self.n_adopted and Verdict.of(used, errors_of(self.origin, self.apart), certainty).worse:
            logger.info("what was learned turned out worse than the policy it started from, which is used again")
            self.network.load_state_dict(self.origin.state_dict())
            self.student.load_state_dict(self.origin.state_dict())
            self.n_adopted = 0
        elif self.verdict.worse:
            self.student.load_state_dict(self.network.state_dict())
        return self.verdict


def is_apart(key: str, one_in: int) -> bool:
    """By the key alone: a relaxation stays on its side, whatever comes later."""
    return int(hashlib.sha256(f"apart {key}".encode()).hexdigest()[:12], 16) % one_in == 0


def errors_of(network: MetricNetwork, examples: Sequence[Examples]) -> np.ndarray:
    """The mean relative error of each relaxation's predicted ways, (n_relaxations,)."""
    found: list[np.ndarray] = []
    group: list[Examples] = []
    for one in examples:
        if group and sum(other.lessons.state.structures.n_atoms for other in (*group, one)) > MOST_AT_ONCE:
            found.append(_errors(network, group))
            group = []
        group.append(one)
    return np.concatenate([*found, _errors(network, group)])


def _errors(network: MetricNetwork, group: Sequence[Examples]) -> np.ndarray:
    with torch.no_grad():
        errors = relative_errors(network, Lessons.concatenate([one.lessons for one in group]))
    parts = errors.clamp_max(LARGEST_ERROR).split([one.number for one in group])
    return np.array([float(part.mean()) for part in parts])
