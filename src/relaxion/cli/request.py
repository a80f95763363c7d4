"""What the user of `relaxion relax` asked for, checked before anything is read."""

from __future__ import annotations

import math
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ase import Atoms

from relaxion.bench.optimizers import check_policy, policy_argument
from relaxion.bench.runs import Run
from relaxion.errors import PotentialError, RelaxionError, SettingsError
from relaxion.optimize.choice import decide
from relaxion.potentials import potential
from relaxion.potentials.potential import Potential


@dataclass(frozen=True)
class RelaxRequest:
    """What the user asked for."""

    files: tuple[Path, ...]
    calculator: str
    policy: str  # "auto", "none", the name of a policy or a file
    fmax: float  # eV/Å
    steps: int
    free_cell: bool
    compare: str  # names with commas between them
    out: Path
    as_json: bool
    force: bool
    quiet: bool
    rattle_angstrom: float
    seed: int
    report: bool = False  # write a page beside each result
    allow_unseen: bool = False  # let the policy speak about elements it was not trained on


@dataclass(frozen=True)
class PolicyChoice:
    """Who relaxes one structure: with "auto" it may be a policy for one and the core for the next."""

    policy: str | None  # the relaxer's `policy=`; None where its elements leave only the core
    allow_unseen: bool
    note: str  # why the core, where somebody may have expected a policy

    @classmethod
    def of(cls, request: RelaxRequest, atoms: Atoms) -> PolicyChoice:
        policy = policy_argument(request.policy)
        numbers, periodic = atoms.numbers.tolist(), bool(atoms.pbc.any())
        decision = decide(policy, numbers, periodic=periodic, allow_unseen=request.allow_unseen)
        return cls(None if decision.loaded is None else policy, request.allow_unseen, decision.note)


def check_numbers(request: RelaxRequest) -> None:
    """Refuse options that make no sense, before anything is read."""
    if not (math.isfinite(request.fmax) and request.fmax > 0):
        raise SettingsError(f"--fmax is a force in eV/Å above 0, got {request.fmax}; try --fmax 0.05")
    if request.steps < 0:
        raise SettingsError(f"--steps is 0 or more, got {request.steps}; try --steps 500")
    if not (math.isfinite(request.rattle_angstrom) and request.rattle_angstrom >= 0):
        raise SettingsError(f"--rattle is a length in Å, 0 or more, got {request.rattle_angstrom}; try --rattle 0.05")
    check_policy(policy_argument(request.policy))


def details(request: RelaxRequest, run: Run) -> dict[str, Any]:
    """What `relaxion report` wants to know later; it goes into the manifest of a result folder."""
    plain = {
        "command": command_line(),
        "calculator": request.calculator,
        "policy": request.policy,
        "fmax_ev_per_angstrom": request.fmax,
        "free_cell": request.free_cell,
    }
    calls = {
        "energy_ev": [reading.energy_ev for reading in run.readings],
        "fmax_ev_per_angstrom": [reading.fmax_ev_per_angstrom for reading in run.readings],
        "accepted": [reading.accepted for reading in run.readings],
        "method": [reading.method for reading in run.readings],
        "reason": [reading.reason for reading in run.readings],
        "base_call": [frame.base_call for frame in run.frames],
    }
    return {"request": plain, "calls": calls}


def command_line() -> str:
    """As it was typed, with quotes where a shell needs them."""
    program, *rest = sys.argv
    return shlex.join([Path(program).name, *rest])


def make_potential(spec: str) -> Potential:
    """The calculator, with whatever its factory raises turned into a sentence.

    Some packages greet on stdout when they load; that belongs to results alone, so greetings go to stderr.
    """
    try:
        with redirect_stdout(sys.stderr):
            return potential(spec)
    except RelaxionError:
        raise
    except Exception as error:  # the user's own factory or another package may raise anything
        raise PotentialError(f"--calc {spec}: it could not be made: {type(error).__name__}: {error}") from error
