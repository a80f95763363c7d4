"""Fine-tuning: a stiffness goes on learning from relaxations, and is replaced only by one that proved better.

One relaxation in a few is held out for validation, by its structure: nothing is learned from those. The network that
learns takes the place of the one in use where it predicts the ways of the relaxations held out better, in 97.5 of 100
resamplings. Should that turn out wrong when more of them are there, the network it all began with comes back.

`relaxion learn` does this with a database of relaxations, without a force call. Interrupted, it goes on where it was; a
database that has grown meanwhile begins a new fit.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.data import atomic_numbers as numbers_of
from ase.symbols import Symbols
from torch import Tensor

from relaxion import __version__
from relaxion.database import Note, RelaxationDatabase
from relaxion.errors import CheckpointError, PolicyError, RunError
from relaxion.files import Format, Stored, exclusive, joined
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.model.card import LearnedFrom
from relaxion.model.policy_file import PolicyFile, network_of
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.choice import CORE, Loaded, leaves_molecules, new_stepper
from relaxion.optimizer.hessian.internal_topology import in_vacuum, molecular_share
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import fingerprint
from relaxion.structures import Structures
from relaxion.structures.trajectory import Trajectory
from relaxion.train.judge.assessment import CAP, FMAX, Relax, under_safeguard
from relaxion.train.judge.statistics import Interval, resampled, resampled_means
from relaxion.train.supervised.dataset import RelaxationSet
from relaxion.train.supervised.fit import (
    Examples,
    Fit,
    FitSettings,
    RelaxationExamples,
    formula_of,
    is_validation,
    relative_errors,
    secants_of,
)

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


FORMAT = Format(version=2, error=CheckpointError)
LOCK = ".learning"
UNFINISHED = ".fit.safetensors"
UNFINISHED_KIND = "unfinished fit"
SECONDS_BETWEEN_SAVES = 20.0
FEWEST_FORMULAS = 10  # from so many on whole compositions are held out, else single relaxations
MOST_TRAINING = 100_000  # relaxations learned from
MOST_VALIDATION = 1000  # relaxations held out
FROM_A_DATABASE = FitSettings(fit_updates=0, examples_per_update=32, fit_learning_rate=8e-4)  # by the relaxations
LEAST_HELD_OUT = 3  # relaxations held out: a database may be small, and intervals are shown
CALLS_EXPONENT = 0.5  # measured: calls fall about with the square root of the error (benchmarks/memory/README.md)

Stop = Callable[[], bool]
OnUpdate = Callable[[int, int, Mapping[str, float]], None]  # made, of how many, what the last one showed


@dataclass(frozen=True)
class Learned:
    """What came of it."""

    acceptance: Acceptance
    kept: bool
    n_training: int
    n_examples: int
    n_updates: int
    seconds: float
    expected_calls_ratio: float
    calls_before: float | None  # of the finished relaxations held out, as they were made
    measured: Interval | None  # ratio of calls on starts held out, where a calculator was given
    policy: StiffnessPolicy

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("policy", "acceptance", "measured")}
        measured = None if self.measured is None else asdict(self.measured)
        return own | {"acceptance": asdict(self.acceptance), "measured": measured}


def gathered(memory: Path, calculator: str | None, note: Note) -> list[Trajectory]:
    """All relaxations of one calculator. RunError where there are none, or of several and none was chosen."""
    found = list(RelaxationDatabase.open(memory).trajectories(note))
    if not found:
        raise RunError(f"the database {memory} is empty; relax with `database={memory}` first, or add files")
    names = sorted({trajectory.engine for trajectory in found})
    if calculator is not None and calculator != "all":
        chosen = [trajectory for trajectory in found if trajectory.engine == calculator]
        if not chosen:
            raise RunError(f"the database {memory} has no calculator '{calculator}'; it has {', '.join(names)}")
        return chosen
    kinds = {fingerprint(trajectory.settings): trajectory.settings for trajectory in found}
    if calculator is None and len(kinds) > 1:
        words = "; ".join(_in_words(settings) for settings in kinds.values())
        raise RunError(
            f"the database {memory} mixes {len(kinds)} calculators or settings ({words}), whose stiffness may differ: "
            f"choose one with `calculator={names[0]}`, or all with `calculator=all`"
        )
    return found


def without_molecules(memory: Path, trajectories: Sequence[Trajectory], origin: Loaded, note: Note) -> list[Trajectory]:
    """Those whose like "auto" would relax with what is learned; RunError where there are none.

    Molecules are left to the classical optimizer, unless somebody had a policy by name relax them.
    """
    kept = [each for each in trajectories if each.policy not in ("", CORE) or not _left_to_core(each, origin)]
    left_out = len(trajectories) - len(kept)
    why = "the classical optimizer relaxes molecules, and does not learn from use"
    if left_out and not kept:
        raise RunError(f"the database {memory} has only molecules, from which no policy learns: {why}")
    if left_out:
        note(f"{left_out} relaxations of molecules are left out: {why}")
    return kept


def _left_to_core(trajectory: Trajectory, origin: Loaded) -> bool:
    pbc = trajectory.pbc.numpy()
    positions = trajectory.positions[0].numpy()
    cell = trajectory.cells[0].numpy()
    start = Atoms(trajectory.numbers.numpy(), positions, cell=cell, pbc=pbc)
    alone = bool(np.isfinite(positions).all()) and molecular_share(start) == 1 and in_vacuum(start)
    return alone and leaves_molecules(origin.bundle.card)


def _in_words(settings: Mapping[str, Any]) -> str:
    parameters = settings.get("parameters") or {}
    more = ", ".join(f"{name}={value}" for name, value in parameters.items())[:120]
    return f"{settings.get('name', 'unknown')}{f' ({more})' if more else ''}"


def grouped(trajectories: Sequence[Trajectory]) -> list[RelaxationExamples]:
    """Their examples. The keys, which decide what is held out, are compositions where there are many of them."""
    found = [one for t in trajectories if (one := secants_of(t)) is not None]
    if len({one.formula for one in found}) < FEWEST_FORMULAS:
        return found
    sides = {held_out(one.formula) for one in found}
    return [replace(one, key=one.formula) for one in found] if len(sides) == 2 else found


class StoreFineTune:
    """One fit to the relaxations of one store, from one policy."""

    def __init__(self, memory: Path, origin: Loaded, trajectories: Sequence[Trajectory], settings: FitSettings):
        """RunError where the store has too few examples."""
        if not isinstance(origin.policy, StiffnessPolicy):
            raise PolicyError(
                f"the policy {origin.bundle.name} does not predict stiffness, so it cannot learn this way"
            )
        self.memory = memory
        self.origin = origin
        self.policy = origin.policy
        self.trajectories = list(trajectories)
        examples = grouped(self.trajectories)
        updates = settings.fit_updates or int(np.clip(4 * len(examples), 200, 1500))
        self.settings = settings.model_copy(update={"fit_updates": updates})
        self.tuning = FineTune(
            self.policy.network,
            self.settings,
            MOST_TRAINING,
            MOST_VALIDATION,
            least_validation=LEAST_HELD_OUT,
        )
        for one in examples:
            self.tuning.add(one)
        training = len(self.tuning.training.relaxations)
        validation = len(self.tuning.validation)
        if not training or validation < LEAST_HELD_OUT:
            raise RunError(
                f"the database {memory} has {training} relaxations to fit and {validation} to validate, of "
                f"{len(self.trajectories)} in all; at least 1 and {LEAST_HELD_OUT} are needed: relax "
                "more"
            )

    @property
    def identity(self) -> str:
        """Of everything that decides the result."""
        keys = [one.key + str(one.number) for one in (*self.tuning.training.relaxations, *self.tuning.validation)]
        words = [self.settings.model_dump_json(), self.origin.weights_sha256, *keys]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()

    def run(self, on_update: OnUpdate | None = None, stop: Stop = lambda: False) -> bool:
        """All updates; False where it was stopped, and saved."""
        self._resume()
        saved = time.monotonic()
        while not self.tuning.done:
            if stop():
                self._save()
                return False
            scalars = self.tuning.update()
            if on_update is not None:
                on_update(self.tuning.n_updates, self.settings.fit_updates, scalars)
            if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                self._save()
                saved = time.monotonic()
        return True

    def tested(self, seconds: float, measured: Interval | None = None) -> Learned:
        """The end of it."""
        training = self.tuning.training.relaxations
        acceptance = self.tuning.test()
        if acceptance is None:
            raise RunError("learning gave weights that are not finite; nothing was saved")
        policy = deepcopy(self.policy)
        policy.network.load_state_dict(self.tuning.network.state_dict())
        with suppress(OSError):
            (self.memory / UNFINISHED).unlink(missing_ok=True)
        calls = [one.n_calls for one in self.tuning.validation if one.finished]
        return Learned(
            acceptance=acceptance,
            kept=acceptance.better and (measured is None or measured.value <= 1),
            n_training=len(training),
            n_examples=sum(one.number for one in training),
            n_updates=self.settings.fit_updates,
            seconds=seconds,
            expected_calls_ratio=acceptance.ratio**CALLS_EXPONENT,
            calls_before=float(np.mean(calls)) if calls else None,
            measured=measured,
            policy=policy,
        )

    def _resume(self) -> None:
        """What an interrupted run of the same fit has left."""
        with suppress(CheckpointError, KeyError, RuntimeError, ValueError):
            stored = FORMAT.read(self.memory / UNFINISHED, UNFINISHED_KIND)
            if stored.values.get("identity") == self.identity:
                self.tuning.restore(stored)

    def _save(self) -> None:
        values = {"identity": self.identity}
        FORMAT.write(self.memory / UNFINISHED, UNFINISHED_KIND, self.tuning.snapshot(), values)

    def measure(self, potential: Potential, number: int, stop: Stop = lambda: False) -> Interval:
        """The ratio of real calls, after over before, from starts held out. Called before `tested`."""
        keys = {one.key for one in self.tuning.validation}
        starts = [t for t in self.trajectories if t.key in keys or formula_of(t) in keys][:number]
        if not starts:
            raise RunError("no held-out start is left to relax")
        after = self._calls(starts, potential, self.tuning.learning, stop)
        before = self._calls(starts, potential, self.tuning.network, stop)
        return resampled(after, before)

    def _calls(self, starts: Sequence[Trajectory], potential: Potential, network: Any, stop: Stop) -> np.ndarray:
        rule = self.origin.rule
        relax: Relax = under_safeguard(lambda: new_stepper(policy_model=LearnedHessians(network), rule=rule), FMAX, CAP)
        structures = Structures.concatenate([t.structures.select(torch.tensor([0])) for t in starts])
        return np.array([one.force_calls for one in relax(potential, structures, stop)], dtype=np.float64)


def bundle_of(name: str, tuned: StoreFineTune, learned: Learned, command: str) -> PolicyFile:
    """What is kept: the origin with other weights, and a card that says what of."""
    trajectories = tuned.trajectories
    origin = tuned.origin.bundle
    numbers = sorted({int(number) for t in trajectories for number in t.numbers.unique()})
    symbols = list(Symbols(numbers))
    sizes = [t.n_atoms for t in trajectories]
    prints = sorted({fingerprint(t.settings) for t in trajectories})
    source = LearnedFrom(
        origin=origin.name,
        origin_sha256=tuned.origin.weights_sha256,
        calculators=tuple(prints),
        elements=tuple(symbols),
        relaxations=len(trajectories),
        relaxations_apart=learned.acceptance.n_validation,
        error_ratio=learned.acceptance.ratio,
        error_ratio_low=learned.acceptance.low,
        error_ratio_high=learned.acceptance.high,
        calls_ratio=None if learned.measured is None else learned.measured.value,
    )
    card = origin.card.model_copy(
        update={
            "elements": tuple(sorted({*origin.card.elements, *symbols}, key=numbers_of.__getitem__)),
            "smallest_n_atoms": min([origin.card.smallest_n_atoms, *sizes]),
            "largest_n_atoms": max([origin.card.largest_n_atoms, *sizes]),
            "potential": ", ".join(sorted({t.engine for t in trajectories})),
            "starts": (f"{len(trajectories)} relaxations of a database, after {origin.name}",),
            "agent": "imitation",
            "training_command": command,
            "seed": SEED,
            "environment_steps": sum(map(len, trajectories)),
            "wall_time_seconds": learned.seconds,
            "n_assessment_starts": None,
            "results": (),
            "fails_on": ("Validated on held-out relaxations of its database, never on other structures.",),
            "relaxion_version": __version__,
            "date": datetime.now(UTC).date().isoformat(),
            "run_weights_sha256": None,
            "training_settings": tuned.settings.model_dump(mode="json"),
            "learned_from": source,
        }
    )
    own = network_of(learned.policy.settings, learned.policy.state_dict(), stochastic=False)
    networks = {**origin.networks, "policy": own}
    return PolicyFile(name, networks, card)


@contextmanager
def alone(memory: Path) -> Iterator[None]:
    """Two learners on one memory would write over each other's unfinished fit."""
    try:
        lock = exclusive(memory / LOCK)
    except BlockingIOError as error:
        raise RunError(f"another 'relaxion learn' is busy with {memory}; wait for it") from error
    except OSError as error:
        raise RunError(
            f"the database {memory} cannot be locked ({error.strerror}); may this folder be written?"
        ) from error
    with lock:
        yield
