"""How relaxations of an assessment went, start by start, with films of the ten that were hardest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase.symbols import Symbols
from torch import Tensor

from relaxion.optimizer.point import Film, Frame
from relaxion.structures import Outcome, State, Structures
from relaxion.train.experience.reward import largest_force
from relaxion.train.judge.runs import finite

WORST = 10  # films: those that needed most force calls
MOST_SHOTS = 64  # of one film; then every second goes
MOST_NUMBERS = 600_000  # coordinates of all films, about 3 MB as text; larger structures get fewer shots
MILLI = 1000  # units of stored positions per Å
CONVERGED = Outcome.CONVERGED.name.lower()


@dataclass(frozen=True, eq=False, kw_only=True)
class Shot(Frame):
    """One force call, and what it said."""

    energy_ev: float
    fmax_ev_per_angstrom: float


def shot(call: int, positions: np.ndarray, cell: np.ndarray, energy_ev: float, fmax_ev_per_angstrom: float) -> Shot:
    """Of atoms at these positions, Å; both arrays are copied."""
    return Shot(
        call=call,
        positions=positions.astype(np.float32),
        cell=np.array(cell, dtype=np.float64),
        energy_ev=energy_ev,
        fmax_ev_per_angstrom=fmax_ev_per_angstrom,
    )


def film_of(shots: Iterable[Shot], n_atoms: int) -> Film:
    """At most `MOST_SHOTS` of them: thinned out by halves, first and newest kept."""
    film = Film(largest_bytes=MOST_SHOTS * 12 * n_atoms)
    for one in shots:
        film.add(one)
    return film


@dataclass(frozen=True, eq=False)
class Relaxed:
    """How the policy fared from one start."""

    numbers: np.ndarray  # (n_atoms,) atomic numbers
    periodic: bool  # along any axis
    outcome: str  # a label of `Outcome` with underscores
    force_calls: int  # the cap where it did not converge
    energy_ev: float | None  # where it converged
    film: Film  # of shots
    label: str = ""  # the kind of start; empty where there is only one
    reward: float | None = None  # undiscounted sum; None: nobody gave rewards
    length: int | None = None  # steps

    @property
    def converged(self) -> bool:
        return self.outcome == CONVERGED

    @property
    def shots(self) -> list[Shot]:
        return [frame for frame in self.film.frames if isinstance(frame, Shot)]


class Filming:
    """Films many relaxations that run side by side, and says in the end how each fared."""

    def __init__(self, structures: Structures) -> None:
        self._numbers = np.split(structures.atomic_numbers.numpy(), _cuts(structures))
        self._periodic = structures.periodic.any(dim=1).tolist()
        self._films = [film_of((), len(numbers)) for numbers in self._numbers]

    def shoot(self, places: Tensor, state: State) -> None:
        """One more force call of the relaxations at these places."""
        structures = state.structures
        said = state.evaluation
        positions = np.split(structures.positions.numpy(), _cuts(structures))
        forces = largest_force(structures, said).tolist()
        columns = (state.calls.tolist(), positions, structures.cells.numpy(), said.energies.tolist(), forces)
        for place, *told in zip(places.tolist(), *columns, strict=True):
            self._films[place].add(shot(*told))

    def relaxed(
        self, outcomes: Tensor, calls: Tensor, returns: Tensor | None = None, lengths: Tensor | None = None
    ) -> list[Relaxed]:
        """How all of them ended; `calls` is the cap where one did not converge."""
        found = []
        for place, (outcome, film) in enumerate(zip(outcomes.tolist(), self._films, strict=True)):
            last: Any = film.frames[-1]
            found.append(
                Relaxed(
                    numbers=self._numbers[place],
                    periodic=self._periodic[place],
                    outcome=Outcome(outcome).name.lower(),
                    force_calls=int(calls[place]),
                    energy_ev=last.energy_ev if outcome == Outcome.CONVERGED else None,
                    film=film,
                    reward=None if returns is None else float(returns[place]),
                    length=None if lengths is None else int(lengths[place]),
                )
            )
        return found


def _cuts(structures: Structures) -> list[int]:
    return structures.counts.cumsum(0)[:-1].tolist()


@dataclass(frozen=True, eq=False)
class RelaxationRecord:
    """All starts of one assessment, in the order of the baselines."""

    fmax_ev_per_angstrom: float
    cap: int  # force calls charged for a failure
    relaxed: Sequence[Relaxed]

    def as_plain(self) -> dict[str, Any]:
        return {
            "fmax_ev_per_angstrom": self.fmax_ev_per_angstrom,
            "cap": self.cap,
            "structures": {
                "label": [one.label for one in self.relaxed],
                "formula": [Symbols(one.numbers).formula.format("metal") for one in self.relaxed],
                "n_atoms": [len(one.numbers) for one in self.relaxed],
                "outcome": [one.outcome for one in self.relaxed],
                "force_calls": [one.force_calls for one in self.relaxed],
                "energy_ev": [finite(one.energy_ev) for one in self.relaxed],
            },
            "worst": [{"place": place, **_film(self.relaxed[place], MOST_NUMBERS // WORST)} for place in self.worst()],
        }

    def worst(self) -> list[int]:
        """Places of those with most force calls; what did not converge stands before what took as long."""
        key = [(one.force_calls, not one.converged) for one in self.relaxed]
        return sorted(range(len(key)), key=lambda place: key[place], reverse=True)[:WORST]


def _film(relaxed: Relaxed, room: int) -> dict[str, Any]:
    """Whole thousandths of an Å; first and last shot at least."""
    fits = max(2, room // max(1, 3 * len(relaxed.numbers)))
    taken = relaxed.shots
    every = sorted({round(place) for place in np.linspace(0, len(taken) - 1, min(fits, len(taken)))})
    shots = [taken[place] for place in every]
    cells = [[round(float(value), 4) for value in shot.cell.ravel()] for shot in shots]
    return {
        "numbers": relaxed.numbers.tolist(),
        "periodic": relaxed.periodic,
        "call": [shot.call for shot in shots],
        "energy_ev": [finite(shot.energy_ev) for shot in shots],
        "fmax_ev_per_angstrom": [finite(shot.fmax_ev_per_angstrom) for shot in shots],
        "positions_milliangstrom": [
            np.rint(shot.positions * MILLI).astype(np.int64).ravel().tolist() for shot in shots
        ],
        "cells_angstrom": cells if any(cell != cells[0] for cell in cells) else cells[:1],
    }
