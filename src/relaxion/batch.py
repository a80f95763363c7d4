"""Many structures at once on one potential: `relaxion.relax_batch`.

Every structure has its own optimizer, the one `relaxion.Relaxer` would give it (`batch_relaxation`); what is shared are
the force calls, the search for neighbours, the springs and the network. A structure that is done leaves, and the next
takes its place.
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

from relaxion.database import RelaxationDatabase
from relaxion.errors import MissingStressError, PotentialError, RelaxionError, SettingsError, StructureError
from relaxion.optimizer.batch_relaxation import Answer, Relaxation, Relaxed
from relaxion.optimizer.choice import Chooser, stepper_of
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import MOST_TOGETHER, KnownPairs
from relaxion.optimizer.point import quiet_filters
from relaxion.optimizer.records import database_at
from relaxion.optimizer.step import Stepper, propose
from relaxion.potentials.base import AsePotential, Potential
from relaxion.potentials.pairwise import PairwisePotential
from relaxion.potentials.registry import potential as potential_of
from relaxion.settings import strain_mask
from relaxion.structures import Structures
from relaxion.structures.state import Outcome
from relaxion.structures.structures import DeviceLike, check_atoms, symmetric

logger = logging.getLogger(__name__)

BATCH_SIZE = 128  # structures at once; measured in benchmarks/speed/relax_batch.md
MAX_FORCE_CALLS = 500

MakeStepper: TypeAlias = Callable[[Atoms], tuple[str, Stepper]]
"""The name of who relaxes these atoms, and a new stepper for them."""


@dataclass(frozen=True)
class BatchSettings:
    """What is the same for every structure."""

    policy: str | Path | None = "auto"
    fmax: float = 0.05  # eV/Å
    cell: bool = False
    max_force_calls: int = MAX_FORCE_CALLS
    allow_unseen: bool = False
    pressure_gpa: float = 0.0  # on free cells
    cell_mask: str = ""  # components of a free cell that may change, some of xx,yy,zz,yz,xz,xy; empty: all
    keep_symmetry: bool = False  # hold each structure to its space group
    leave_saddles: bool = False  # check the ends for negative curvature, and relax on where there is some
    time_limit_seconds: float | None = None  # of one structure's share of the time
    record: bool = False  # keep every evaluated point
    device: DeviceLike = None  # where networks compute: the policy's, and the potential's where it is given by name

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fmax) and self.fmax > 0):
            raise SettingsError(f"fmax is a force in eV/Å above 0, got {self.fmax}; try 0.05")
        if self.max_force_calls < 1:
            raise SettingsError(f"max_force_calls is 1 or more, got {self.max_force_calls}; try {MAX_FORCE_CALLS}")
        if not math.isfinite(self.pressure_gpa):
            raise SettingsError(f"the pressure is a number in GPa, got {self.pressure_gpa}")
        if self.pressure_gpa and not self.cell:
            raise SettingsError("a pressure acts on free cells; add cell=True")
        strain_mask(self.cell_mask)
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
    database: str | Path | RelaxationDatabase | None = None,
    device: DeviceLike = None,
    pressure_gpa: float = 0.0,
    model: str | BaseCalculator | Potential | None = None,
    leave_saddles: bool = False,
) -> list[Relaxed]:
    """Relax all structures, in the order given; the same results as `Relaxer` brings one by one, to rounding.

    An error of the potential ends only that structure, not the others.

    Args:
        structures: ASE atoms, with constraints if need be; they are not changed.
        potential: a name ("emt"), an ASE calculator (asked one structure after the other) or a potential.
        policy: as in `Relaxer`; so are `allow_unseen`, `database` and `leave_saddles`.
        fmax: largest force at the end, eV/Å.
        cell: relax the cells too, against `pressure_gpa` (GPa).
        max_force_calls: of each structure.
        batch_size: structures evaluated together.
        device: where the networks of the policy and of a named potential compute.
        model: a cheaper potential that plans, as in `Relaxer`.
    """
    settings = BatchSettings(policy, fmax, cell, max_force_calls, allow_unseen, pressure_gpa, device=device)
    settings = replace(settings, leave_saddles=leave_saddles)
    return list(relax_stream(structures, potential, settings, batch_size, database=database, model=model))


def relax_stream(
    structures: Iterable[Atoms],
    potential: str | BaseCalculator | Potential,
    settings: BatchSettings | None = None,
    batch_size: int = BATCH_SIZE,
    make_stepper: MakeStepper | None = None,
    database: str | Path | RelaxationDatabase | None = None,
    model: str | BaseCalculator | Potential | None = None,
) -> Iterator[Relaxed]:
    """The same as a generator, for input of any length: no more is read ahead than four batches.

    Results come in the order given, each as soon as all before it are there.
    """
    if batch_size < 1:
        raise SettingsError(f"batch_size is 1 or more, got {batch_size}; try {BATCH_SIZE}")
    relaxer = BatchRelaxer(potential, settings or BatchSettings(), make_stepper, database, model)
    source = iter(structures)
    waiting = {}
    first = 0
    read = 0
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
        database: str | Path | RelaxationDatabase | None = None,
        model: str | BaseCalculator | Potential | None = None,
    ) -> None:
        """`make_stepper`: who relaxes, in place of the policy that the settings name. `database`: a folder in which
        every evaluated geometry is kept; tags that are words are the names of relaxations there. `model`: a cheaper
        potential that plans."""
        self.settings = settings
        self.database = database_at(database)
        self.potential = potential_of(potential, settings.device if isinstance(potential, str) else None)
        self.model = None if model is None else potential_of(model, settings.device if isinstance(model, str) else None)
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
        self._running: list[Relaxation] = []
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
            atoms = symmetric(atoms) if settings.keep_symmetry else atoms
            name, stepper = self._make_stepper(atoms)
        except RelaxionError as error:
            self._finished.append(_refused(atoms, str(error), tag))
            return
        if (assumed := self.potential.assumption(atoms)) and assumed not in self._said:
            self._said.add(assumed)
            logger.warning("%s: %s (shown once, for the first such structure)", atoms.symbols, assumed)
        relaxation = Relaxation(
            atoms, tag, settings, self.potential, name, stepper, together=self.together, model=self.model
        )
        if self.database is not None:
            relaxation.remember(self.database, self.potential)
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
        chosen = stepper_of(decision, ClassicalSettings(), allow_unseen=settings.allow_unseen)
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

    def _advance(self, group: Sequence[Relaxation]) -> None:
        began = time.perf_counter()
        asked = [one for one in group if one.moved]
        known = self._evaluate(asked) if self.together else None
        seen = [(place, one, point) for place, one in enumerate(group) if (point := one.look()) is not None]
        if self.model is not None:
            for one in asked:
                if one.levels is not None:
                    one.levels.model.call_seconds = (time.perf_counter() - began) / len(asked)
            proposals = [one.levels.propose(point) for _, one, point in seen if one.levels is not None]
        else:
            steppers = [one.stepper for _, one, _ in seen]
            points = [point for *_, point in seen]
            places = [place for place, *_ in seen] if len(asked) == len(group) else None
            proposals = propose(steppers, points, known, places)
        for (_, one, point), proposal in zip(seen, proposals, strict=True):
            one.move(point, proposal)
        share = (time.perf_counter() - began) / len(group)
        for one in group:
            one.spend(share)

    def _evaluate(self, group: Sequence[Relaxation]) -> KnownPairs | None:
        """Tell the group what the potential says; the pairs that were searched for it, where that is known."""
        if not group:
            return None
        try:
            return self._ask(group)
        except Exception as error:  # noqa: BLE001 - potentials may raise anything; one structure must not stop others
            if len(group) == 1:
                group[0].failed(error)
                return None
        for one in group:
            self._evaluate([one])
        return None

    def _ask(self, group: Sequence[Relaxation]) -> KnownPairs | None:
        cells = [one.settings.cell for one in group]
        structures = _structures([one.atoms for one in group], cells)
        pairs = None
        if isinstance(self.potential, PairwisePotential):
            pairs = KnownPairs.of(structures, self.potential.cutoff_for(structures))
        with_stress = any(one.settings.cell for one in group)
        evaluation = self.potential(structures, stresses=with_stress)
        _check_shapes(self.potential.name, structures, evaluation.energies, evaluation.forces, evaluation.stresses)
        energies = evaluation.energies.tolist()
        forces = evaluation.forces.double().numpy()
        stresses = None if evaluation.stresses is None else evaluation.stresses.double().numpy()
        start = 0
        for number, one in enumerate(group):
            end = start + len(one.atoms)
            stress = None if stresses is None else stresses[number].flat[[0, 4, 8, 5, 2, 1]]
            one.told = Answer(energies[number], forces[start:end].copy(), stress)
            start = end
        return pairs


def _refused(atoms: Atoms, sentence: str, tag: Any) -> Relaxed:
    start = atoms.copy()
    return Relaxed(start, Outcome.RUNNING, 0, None, None, None, "", 0, 0.0, error=sentence, tag=tag)


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
        expected["stresses"] = (structures.n_structures, 3, 3)
        given["stresses"] = tuple(stresses.shape)
    for what, shape in expected.items():
        if given[what] != shape:
            raise PotentialError(f"{name} returned {what} of shape {given[what]}, expected {shape}")
