"""What the user of `relaxion relax` asked for, checked before anything is read."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxion.bench.optimizers import check_policy, policy_argument
from relaxion.bench.runs import Run
from relaxion.errors import SettingsError


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
