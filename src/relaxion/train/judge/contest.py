"""Every optimizer from the same start to the same fmax; the calculator counts, judges and keeps the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.neighborlist import natural_cutoffs, neighbor_list
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from relaxion.optimizer.point import quiet_filters
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import CalculatorFailed, CallLimitReached, error_in_words
from relaxion.train.judge.optimizers import Contestant
from relaxion.train.judge.runs import RelaxationTask, Stage, largest_force

LINK = 3  # sums of covalent radii; generous: even Lennard-Jones "hydrogens" sit at 1.8, loose packings below 2.5


@dataclass(frozen=True)
class Conditions:
    """What is the same for all contestants and all starts."""

    potential: Potential
    fmax: float = 0.05  # eV/Å
    cap: int = 500  # force calls; the calculator answers no more, and a failure is charged so many
    free_cell: bool = False


@dataclass(frozen=True)
class Score:
    """How one contestant fared on one start."""

    converged: bool  # by the forces where the atoms stand, whatever the optimizer says; and still in one piece
    spent: int  # force calls
    charged: int  # the same, or the cap where it failed
    energy_ev: float | None  # where it converged
    n_atoms: int
    seconds: float  # all in all
    calculator_seconds: float  # inside the calculator
    overhead_seconds: float  # what the optimizer took for itself; processor time, so that other work does not count
    error: str | None = None
    final: Atoms | None = None  # where it converged


OnScore = Callable[[str, int, Score], None]  # contestant, place of the start, score


def contest(
    contestants: Sequence[Contestant], starts: Sequence[Atoms], conditions: Conditions, on_score: OnScore | None = None
) -> Iterator[dict[str, Score]]:
    """Start by start, so that whatever has been done at any moment is a fair comparison."""
    for index, start in enumerate(starts):
        scores = {}
        for contestant in contestants:
            scores[contestant.name] = relax_one(contestant, start, conditions)
            if on_score is not None:
                on_score(contestant.name, index, scores[contestant.name])
        yield scores


def relax_one(contestant: Contestant, start: Atoms, conditions: Conditions) -> Score:
    """One contestant on one start."""
    cap = conditions.cap
    task = RelaxationTask(start, conditions.potential, conditions.fmax, cap, conditions.free_cell, call_limit=cap)
    stage = Stage(task, on_call=lambda *_: None)
    began = time.perf_counter()
    busy = time.process_time()
    error = _run(contestant, stage, cap)
    seconds = time.perf_counter() - began
    busy_seconds = time.process_time() - busy
    waited = stage.counter.seconds
    computed = stage.counter.busy_seconds
    energy = _energy_where_converged(stage) if error is None else None
    if energy is not None and (error := fell_apart(start, stage.atoms)) is not None:
        energy = None
    return Score(
        converged=energy is not None,
        spent=stage.counter.calls,
        charged=cap if energy is None else stage.counter.calls,
        energy_ev=energy,
        n_atoms=len(start),
        seconds=seconds,
        calculator_seconds=waited,
        overhead_seconds=max(busy_seconds - computed, 0.0),
        error=error,
        final=None if energy is None else bare(stage.atoms),
    )


def bare(atoms: Atoms) -> Atoms:
    """Where the atoms are, and nothing else."""
    return Atoms(atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc)


def _run(contestant: Contestant, stage: Stage, cap: int) -> str | None:
    """Run it as a user would; what went wrong, if anything did."""
    n_rows = len(stage.atoms) + (3 if stage.task.free_cell else 0)
    try:
        with contestant.build(stage.target) as optimizer, quiet_filters():
            optimizer.run(fmax=stage.task.fmax, steps=contestant.steps(n_rows, cap))
    except CallLimitReached:
        return None  # the forces will tell
    except Exception as error:  # noqa: BLE001 - optimizers report failure by exceptions of many kinds
        return error_in_words(error)
    return None


def _energy_where_converged(stage: Stage) -> float | None:
    """None if forces are too large where the atoms stand. Atoms left at a place not asked about cost one more call."""
    try:
        fmax: Any = largest_force(stage.target)
        return float(stage.atoms.get_potential_energy()) if fmax < stage.task.fmax else None
    except (CallLimitReached, CalculatorFailed):
        return None


def pieces(atoms: Atoms) -> int:
    """Groups of atoms that are linked; 1 for a crystal, which has nowhere to fly to."""
    if atoms.pbc.all():
        return 1
    first, second = neighbor_list("ij", atoms, natural_cutoffs(atoms, mult=LINK))
    links = coo_array((np.ones(len(first)), (first, second)), shape=(len(atoms), len(atoms)))
    return int(connected_components(links, directed=False, return_labels=False))


def fell_apart(start: Atoms, end: Atoms) -> str | None:
    """A sentence if one piece has become several: where atoms have flown apart forces vanish too."""
    now = pieces(end)
    return f"the structure fell apart into {now} pieces" if now > 1 and pieces(start) == 1 else None
