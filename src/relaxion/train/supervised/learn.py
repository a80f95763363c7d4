"""Fine-tuning from a store of relaxations, without a force call (`relaxion learn`).

What is learned is kept only if it predicts the ways of relaxations held out better than the policy it began with.
Interrupted, it goes on where it was; a store that has grown meanwhile begins a new fit.
"""

from __future__ import annotations

import hashlib
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

from relaxion import __version__
from relaxion.database import Note, RelaxationDatabase
from relaxion.errors import CheckpointError, PolicyError, RunError
from relaxion.files import Format, exclusive
from relaxion.model.card import LearnedFrom
from relaxion.model.policy_file import PolicyFile, network_of
from relaxion.model.stiffness_policy import StiffnessPolicy
from relaxion.optimizer.choice import CORE, Loaded, leaves_molecules, new_stepper
from relaxion.optimizer.hessian.internal.topology import in_vacuum, molecular_share
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import fingerprint
from relaxion.structures import Structures
from relaxion.structures.trajectory import Trajectory
from relaxion.train.judge.assessment import CAP, FMAX, Relax, under_safeguard
from relaxion.train.judge.statistics import Interval, resampled
from relaxion.train.supervised.fine_tune import SEED, Acceptance, FineTune, held_out
from relaxion.train.supervised.fit import FitSettings, RelaxationExamples, formula_of, secants_of

FORMAT = Format(version=2, error=CheckpointError)
LOCK = ".learning"
UNFINISHED = ".fit.safetensors"
UNFINISHED_KIND = "unfinished fit"
SECONDS_BETWEEN_SAVES = 20.0
FEWEST_FORMULAS = 10  # from so many on whole compositions are held out, else single relaxations
MOST_TRAINING = 100_000  # relaxations learned from
MOST_VALIDATION = 1000  # relaxations held out
USUAL = FitSettings(fit_updates=0, examples_per_update=32, fit_learning_rate=8e-4)  # 0 updates: by the relaxations
LEAST_VALIDATION = 3  # relaxations held out: a database may be small, and intervals are shown
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
            least_validation=LEAST_VALIDATION,
        )
        for one in examples:
            self.tuning.add(one)
        training = len(self.tuning.training.relaxations)
        validation = len(self.tuning.validation)
        if not training or validation < LEAST_VALIDATION:
            raise RunError(
                f"the database {memory} has {training} relaxations to fit and {validation} to validate, of "
                f"{len(self.trajectories)} in all; at least 1 and {LEAST_VALIDATION} are needed: relax "
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
