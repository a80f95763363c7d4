"""Many structures at once on one potential: `relaxion.relax_batch`.

Every structure has its own optimizer, the one `relaxion.Relaxer` would give it; what is shared are the force calls, the
search for neighbours, the springs and the network. A structure that is done leaves, and the next takes its place.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import Filter, FrechetCellFilter

from relaxion.errors import MissingStressError, PotentialError, RelaxionError, SettingsError, StructureError
from relaxion.memory.recording import Memory
from relaxion.optimize.ase_interface import quiet_filters, read_coordinates, read_point
from relaxion.optimize.choice import Chooser, stepper_of
from relaxion.optimize.models import MOST_TOGETHER, KnownPairs
from relaxion.optimize.point import Array, Point, Proposal, longest
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.relaxer import SHORTEST_MOTION, STEPS_WITHOUT_MOTION
from relaxion.optimize.remembering import Remembered, memory_at
from relaxion.optimize.stepper import Stepper, propose
from relaxion.potentials.ase import AsePotential
from relaxion.potentials.counting import CountingCalculator, error_in_words
from relaxion.potentials.pairwise import PairwisePotential
from relaxion.potentials.potential import Potential
from relaxion.potentials.registry import potential as potential_of
from relaxion.structures import Structures
from relaxion.structures.conversion import check_atoms, forget_symmetry
from relaxion.structures.devices import DeviceLike
from relaxion.structures.state import Outcome

logger = logging.getLogger(__name__)

BATCH_SIZE = 128  # structures at once; measured in benchmarks/speed/relax_batch.md
MAX_FORCE_CALLS = 500
ERROR = "error"  # the end of a structure whose potential raised, or answered with nonsense
TIME_LIMIT = "time limit"
TOO_LARGE_A_FORCE = "too large a force"  # at a start, where the settings have a limit


MakeStepper: TypeAlias = Callable[[Atoms], tuple[str, Stepper]]
"""The name of who relaxes these atoms, and a new stepper for them."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What the potential said of one structure."""

    energy: float
    forces: Array
    stress: Array | None  # ASE's six components, eV/Å³; None: nobody asked

    def results(self) -> dict[str, Any]:
        plain = {"energy": self.energy, "free_energy": self.energy, "forces": self.forces}
        return plain if self.stress is None else {**plain, "stress": self.stress}


@dataclass(frozen=True, eq=False)
class Visit:
    """One force call: where, what was said there, and whether the next step began there."""

    point: Point
    answer: Answer
    accepted: bool


@dataclass(frozen=True, eq=False)
class Relaxed:
    """How one structure of many fared."""

    atoms: Atoms  # what was reached, with its energy and forces; the start where nothing was
    outcome: Outcome  # RUNNING: it was ended from outside, see `error`
    force_calls: int
    energy_ev: float | None  # of `atoms`, as the next; None: never evaluated, or not finite
    fmax_ev_per_angstrom: float | None
    policy_used: str  # the policy's name, or "classical"
    fallback_used: int  # steps made by the core in place of the policy, or by FIRE in place of the core
    seconds: float  # its share of the time
    error: str | None = None  # a sentence, where potential or time limit ended it
    tag: Any = None  # whatever was given to `add`
    visited: tuple[Visit, ...] = ()  # every evaluated point in order, where recorded

    @property
    def converged(self) -> bool:
        return self.outcome is Outcome.CONVERGED

    @property
    def label(self) -> str:
        """The outcome in words; "error" or "time limit" where it was ended from outside."""
        if self.error is None:
            return self.outcome.label
        return TIME_LIMIT if self.error.startswith(TIME_LIMIT) else ERROR


@dataclass(frozen=True)
class BatchSettings:
    """What is the same for every structure."""

    policy: str | Path | None = "auto"
    fmax: float = 0.05  # eV/Å
    cell: bool = False
    max_force_calls: int = MAX_FORCE_CALLS
    allow_unseen: bool = False
    time_limit_seconds: float | None = None  # of one structure's share of the time
    record: bool = False  # keep every evaluated point
    stresses: bool = False  # ask for them also where the cell does not relax
    largest_first_force: float | None = None  # eV/Å; a start above it is not relaxed
    device: DeviceLike = None  # where networks compute: the policy's, and the potential's where it is given by name

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fmax) and self.fmax > 0):
            raise SettingsError(f"fmax is a force in eV/Å above 0, got {self.fmax}; try 0.05")
        if self.max_force_calls < 1:
            raise SettingsError(f"max_force_calls is 1 or more, got {self.max_force_calls}; try {MAX_FORCE_CALLS}")
        if self.time_limit_seconds is not None and not self.time_limit_seconds > 0:
            raise SettingsError(f"the time limit is above 0 seconds, got {self.time_limit_seconds}")


def relax_batch(
    structures: Iterable[Atoms],
    potential: str | BaseCalculator | Potential,
    policy: str | Path | None = "auto",
    fmax: float = 0.05,
    cell: bool = False,
    max_force_calls: int = MAX_FORCE_CALLS,
    batch_size: int = BATCH_SIZE,
    allow_unseen: bool = False,
    memory: str | Path | Memory | None = None,
    device: DeviceLike = None,
) -> list[Relaxed]:
    """Relax all structures, in the order given; the same results as `Relaxer` brings one by one, to rounding.

    `structures`: ASE atoms, with constraints if need be; they are not changed. `potential`: a name ("emt"), an ASE
    calculator (asked one structure after the other) or a potential. `policy`, `allow_unseen`: as in `Relaxer`. `fmax`:
    eV/Å. `cell`: relax the cells too. `memory`: as in `Relaxer`. `device`: where the networks of the policy and of a
    named potential compute. An error of the potential ends only that structure, not the others.
    """
    settings = BatchSettings(policy, fmax, cell, max_force_calls, allow_unseen, device=device)
    return list(relax_stream(structures, potential, settings, batch_size, memory=memory))


def relax_stream(
    structures: Iterable[Atoms],
    potential: str | BaseCalculator | Potential,
    settings: BatchSettings | None = None,
    batch_size: int = BATCH_SIZE,
    make_stepper: MakeStepper | None = None,
    memory: str | Path | Memory | None = None,
) -> Iterator[Relaxed]:
    """The same as a generator, for input of any length: no more is read ahead than four batches.

    Results come in the order given, each as soon as all before it are there.
    """
    if batch_size < 1:
        raise SettingsError(f"batch_size is 1 or more, got {batch_size}; try {BATCH_SIZE}")
    relaxer = BatchRelaxer(potential, settings or BatchSettings(), make_stepper, memory)
    source, waiting, first, read = iter(structures), {}, 0, 0
    more = True
    while True:
        # a slow structure must not let the finished ones behind it pile up without end
        while more and relaxer.n_running < batch_size and read - first < 4 * batch_size:
            if (atoms := next(source, None)) is None:
                more = False
            else:
                relaxer.add(atoms, read)
                read += 1
        if not relaxer.n_running and not relaxer.has_finished:
            return
        for relaxed in relaxer.advance():
            waiting[relaxed.tag] = relaxed
        while first in waiting:
            yield waiting.pop(first)
            first += 1


class BatchRelaxer:
    """Structures come in by `add` at any time; each `advance` is one force call for all that run."""

    def __init__(
        self,
        potential: str | BaseCalculator | Potential,
        settings: BatchSettings,
        make_stepper: MakeStepper | None = None,
        memory: str | Path | Memory | None = None,
    ) -> None:
        """`make_stepper`: who relaxes, in place of the policy that the settings name. `memory`: a folder in which
        every evaluated geometry is kept; tags that are words are the names of relaxations there."""
        self.settings, self.memory = settings, memory_at(memory)
        self.potential = potential_of(potential, settings.device if isinstance(potential, str) else None)
        if settings.cell and not self.potential.has_stress:
            raise MissingStressError(
                f"{self.potential.name} gives no stress, so cells cannot relax; leave out cell=True, or try 'emt'"
            )
        self._make_stepper = make_stepper or self._chosen
        self._chooser = Chooser(
            None if make_stepper else settings.policy,
            allow_unseen=settings.allow_unseen,
            calculator=self.potential,
            device=settings.device,
        )
        self.together = not isinstance(self.potential, AsePotential)
        self._running: list[_Relaxation] = []
        self._finished: list[Relaxed] = []
        self._said: set[str] = set()  # notes, once each

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def has_finished(self) -> bool:
        """Whether `advance` has something to give though nothing runs: structures refused by `add`."""
        return bool(self._finished)

    def add(
        self, atoms: Atoms, tag: Any = None, cell: bool | None = None, settings: BatchSettings | None = None
    ) -> None:
        """One more structure; `cell`: whether its cell relaxes, if not as the settings say; `settings`: of its own.

        What cannot be relaxed is not run, but comes back with the sentence why.
        """
        if not isinstance(atoms, Atoms):
            raise StructureError(f"structures are ase.Atoms, got {type(atoms).__name__}")
        try:
            settings = settings or self.settings
            settings = settings if cell is None else replace(settings, cell=cell)
            self._check(atoms, settings.cell)
            name, stepper = self._make_stepper(atoms)
        except RelaxionError as error:
            self._finished.append(_refused(atoms, str(error), tag))
            return
        relaxation = _Relaxation(atoms, tag, settings, self.potential, name, stepper, together=self.together)
        if self.memory is not None:
            relaxation.remember(self.memory, self.potential)
        self._running.append(relaxation)

    def _check(self, atoms: Atoms, cell: bool) -> None:
        check_atoms(atoms)
        if cell and not atoms.pbc.all():
            raise StructureError(
                f"the structure is periodic along {int(atoms.pbc.sum())} of 3 axes, so it has no cell to relax"
            )
        known = self.potential.elements
        if known is not None and not known.issuperset(atoms.numbers.tolist()):
            self.potential.check_elements(_structures([atoms], [False]))  # raises, naming them

    def _chosen(self, atoms: Atoms) -> tuple[str, Stepper]:
        settings = self.settings
        decision = self._chooser.decide_for(atoms)
        if decision.note and decision.note not in self._said:
            logger.log(logging.WARNING if decision.loud else logging.INFO, decision.note)
            self._said.add(decision.note)
        chosen = stepper_of(decision, QuasiNewtonSettings(), allow_unseen=settings.allow_unseen)
        return chosen.name, chosen.stepper

    def advance(self) -> list[Relaxed]:
        """One force call for every structure that runs; those that are done now, or were refused."""
        group = sorted(self._running, key=lambda one: len(one.atoms))
        with quiet_filters():
            for start in range(0, len(group), self._at_once):
                self._advance(group[start : start + self._at_once])
        self._running = [one for one in group if one.result is None]
        finished = [*self._finished, *(one.result for one in group if one.result is not None)]
        self._finished = []
        return finished

    @property
    def _at_once(self) -> int:
        """Pairwise potentials are quickest where the pairs fit into the processor's cache, networks with many."""
        if not self.together:
            return 1
        return MOST_TOGETHER if isinstance(self.potential, PairwisePotential) else max(len(self._running), 1)

    def _advance(self, group: Sequence[_Relaxation]) -> None:
        began = time.perf_counter()
        asked = [one for one in group if one.moved]
        known = self._evaluate(asked) if self.together else None
        seen = [(place, one, point) for place, one in enumerate(group) if (point := one.look()) is not None]
        steppers, points, places = [one.stepper for _, one, _ in seen], [p for *_, p in seen], [n for n, *_ in seen]
        proposals = propose(steppers, points, known, places if len(asked) == len(group) else None)
        for (_, one, point), proposal in zip(seen, proposals, strict=True):
            one.move(point, proposal)
        share = (time.perf_counter() - began) / len(group)
        for one in group:
            one.spend(share)

    def _evaluate(self, group: Sequence[_Relaxation]) -> KnownPairs | None:
        """Tell the group what the potential says; the pairs that were searched for it, where that is known."""
        if not group:
            return None
        try:
            return self._ask(group)
        except Exception as error:  # noqa: BLE001 - potentials may raise anything; one structure must not stop others
            if len(group) == 1:
                group[0].fail(error_in_words(error))
                return None
        for one in group:
            self._evaluate([one])
        return None

    def _ask(self, group: Sequence[_Relaxation]) -> KnownPairs | None:
        cells = [one.settings.cell for one in group]
        structures = _structures([one.atoms for one in group], cells)
        pairs = None
        if isinstance(self.potential, PairwisePotential):
            pairs = KnownPairs.of(structures, self.potential.cutoff_for(structures))
        with_stress = any(_with_stress(one.settings, self.potential, one.atoms) for one in group)
        evaluation = self.potential(structures, stresses=with_stress)
        _check_shapes(self.potential.name, structures, evaluation.energies, evaluation.forces, evaluation.stresses)
        energies, forces = evaluation.energies.tolist(), evaluation.forces.double().numpy()
        stresses = None if evaluation.stresses is None else evaluation.stresses.double().numpy()
        start = 0
        for number, one in enumerate(group):
            end = start + len(one.atoms)
            stress = None if stresses is None else stresses[number].flat[[0, 4, 8, 5, 2, 1]]
            one.told = Answer(energies[number], forces[start:end].copy(), stress)
            start = end
        return pairs


class Told:
    """A calculator, as far as ASE's atoms and filters ask one, that says what it was told."""

    answer: Answer

    def get_forces(self, _atoms: Atoms) -> Array:
        return self.answer.forces.copy()

    def get_potential_energy(self, _atoms: Atoms, force_consistent: bool = False) -> float:
        del force_consistent
        return self.answer.energy

    def get_stress(self, _atoms: Atoms) -> Array:
        assert self.answer.stress is not None
        return self.answer.stress.copy()


class _Relaxation:
    """One structure on its way."""

    def __init__(
        self,
        atoms: Atoms,
        tag: Any,
        settings: BatchSettings,
        potential: Potential,
        policy_used: str,
        stepper: Stepper,
        *,
        together: bool,
    ) -> None:
        self.start, self.tag, self.settings = atoms, tag, settings
        self.atoms = atoms.copy()
        self._told = Told() if together else None
        stress = _with_stress(settings, potential, atoms)
        self._counter = None if together else CountingCalculator(potential, stress=stress)
        self.atoms.calc = self._told or self._counter
        self.target: Atoms | Filter = FrechetCellFilter(self.atoms) if settings.cell else self.atoms
        self.policy_used, self.stepper = policy_used, stepper
        self.calls, self.seconds, self._motionless = 0, 0.0, 0
        self.moved = True  # since the last force call; constraints may undo a step
        self._coordinates: Array | None = None  # as the target has them now, where they are known
        self._base: tuple[Point, Answer] | None = None  # where the next step begins, and what was said there
        self.result: Relaxed | None = None
        self._visited: list[Visit] = []
        self._remembered: Remembered | None = None
        self._base_call: int | None = None  # the force call at which the next step begins

    def remember(self, memory: Memory, potential: Potential) -> None:
        """Keep all of it from now on."""
        key = self.tag if isinstance(self.tag, str) else ""
        self._remembered = Remembered(memory, self.target, self.policy_used, potential, key)
        self._remembered.fmax = self.settings.fmax

    @property
    def told(self) -> Answer:
        if self._told is not None:
            return self._told.answer
        assert self._counter is not None
        results = self._counter.results
        return Answer(results["free_energy"], results["forces"], results.get("stress"))

    @told.setter
    def told(self, answer: Answer) -> None:
        assert self._told is not None
        self._told.answer = answer

    def look(self) -> Point | None:
        """The point just evaluated; None where the structure is done with it."""
        if self.result is not None:
            return None
        try:
            point = read_point(self.target, self._coordinates)
        except PotentialError as error:  # of a calculator that is asked only now
            self.fail(str(error))
            return None
        self.calls += self.moved
        if self.settings.record and self.moved:
            self._visited.append(Visit(point, self.told, accepted=True))
        if self._remembered is not None and self.moved:
            told = self.told
            self._remembered.answered(self.calls, self._base_call, told.energy, told.forces, told.stress)
        if point.largest_force < self.settings.fmax and math.isfinite(point.energy):
            self._end(Outcome.CONVERGED, point, self.told)
        elif self.stepper.last is None and not point.finite:
            self._end(Outcome.NON_FINITE, point, None)
        elif self.stepper.last is None and point.largest_force > (self.settings.largest_first_force or math.inf):
            self.fail(TOO_LARGE_A_FORCE)
        return None if self.result is not None else point

    def move(self, point: Point, proposal: Proposal) -> None:
        """The next step, or the end where there is none."""
        base = self._judged(point, proposal)
        if self._visited and proposal.base is not point:
            self._visited[-1] = replace(self._visited[-1], accepted=False)
        if self.calls >= self.settings.max_force_calls:
            self._settle(*base)
            return
        self.target.set_positions(proposal.base.coordinates + proposal.step)
        self._coordinates = read_coordinates(self.target)
        length = longest(self._coordinates - point.coordinates)
        self.moved, short = length > 0, length < SHORTEST_MOTION
        self._motionless = self._motionless + 1 if short else 0
        if self._motionless >= STEPS_WITHOUT_MOTION:
            self._settle(*base, outcome=Outcome.STALLED)

    def _judged(self, point: Point, proposal: Proposal) -> tuple[Point, Answer]:
        if proposal.base is point or self._base is None:
            self._base, self._base_call = (point, self.told), self.calls
        return self._base

    def _settle(self, base: Point, answer: Answer, outcome: Outcome = Outcome.STEP_LIMIT) -> None:
        """Leave the atoms at the better point, as the relaxer does."""
        self.target.set_positions(base.coordinates)
        self._end(outcome, base, answer)

    def spend(self, seconds: float) -> None:
        self.seconds += seconds
        limit = self.settings.time_limit_seconds
        if self.result is None and limit is not None and self.seconds > limit:
            self.fail(f"{TIME_LIMIT} of {limit:g} s exceeded after {self.calls} force calls")

    def fail(self, sentence: str) -> None:
        """Ended from outside; what was reached so far is kept."""
        if self._base is not None:
            self.target.set_positions(self._base[0].coordinates)
        self._end(Outcome.RUNNING, *(self._base or (None, None)), error=sentence)

    def _end(self, outcome: Outcome, point: Point | None, answer: Answer | None, error: str | None = None) -> None:
        if self._remembered is not None:
            self._remembered.end(outcome)
        final = self.start.copy() if point is None else self.atoms
        final.calc = None
        if answer is not None:
            final.calc = SinglePointCalculator(final, **answer.results())
            forget_symmetry(final)
        self.result = Relaxed(
            atoms=final,
            outcome=outcome,
            force_calls=self.calls,
            energy_ev=None if answer is None else answer.energy,
            fmax_ev_per_angstrom=None if answer is None or point is None else point.largest_force,
            policy_used=self.policy_used,
            fallback_used=self.stepper.fallback_used,
            seconds=self.seconds,
            error=error,
            tag=self.tag,
            visited=tuple(self._visited),
        )


def _with_stress(settings: BatchSettings, potential: Potential, atoms: Atoms) -> bool:
    return settings.cell or (settings.stresses and potential.has_stress and bool(atoms.pbc.any()))


def _refused(atoms: Atoms, sentence: str, tag: Any) -> Relaxed:
    start = atoms.copy()
    return Relaxed(start, Outcome.RUNNING, 0, None, None, "", 0, 0.0, error=sentence, tag=tag)


def _structures(images: Sequence[Atoms], cell_free: Sequence[bool]) -> Structures:
    """As `Structures.from_ase`, of atoms that were checked when they came and whose constraints are ASE's business."""
    counts = [len(atoms) for atoms in images]
    numbers = np.concatenate([atoms.numbers for atoms in images]).astype(np.int64)
    return Structures(
        positions=torch.from_numpy(np.concatenate([atoms.positions for atoms in images])),
        cells=torch.from_numpy(np.stack([atoms.cell.array for atoms in images])),
        periodic=torch.from_numpy(np.stack([atoms.pbc for atoms in images])),
        atomic_numbers=torch.from_numpy(numbers),
        structure_index=torch.repeat_interleave(torch.arange(len(images)), torch.tensor(counts)),
        movable=torch.ones(len(numbers), dtype=torch.bool),
        cell_free=torch.tensor(list(cell_free)),
    )


def _check_shapes(name: str, structures: Structures, energies: Any, forces: Any, stresses: Any) -> None:
    expected = {"energies": (structures.n_structures,), "forces": (structures.n_atoms, 3)}
    given = {"energies": tuple(energies.shape), "forces": tuple(forces.shape)}
    if stresses is not None:
        expected["stresses"], given["stresses"] = (structures.n_structures, 3, 3), tuple(stresses.shape)
    for what, shape in expected.items():
        if given[what] != shape:
            raise PotentialError(f"{name} answered with {what} of shape {given[what]}, expected {shape}")
