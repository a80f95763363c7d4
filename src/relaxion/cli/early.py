"""What is done before torch and ASE are loaded: the number of threads, what is refused or answered at once."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relaxion.cli import completion
from relaxion.cli.requests import ManyRequest, RelaxingRequest, RelaxRequest, TrainRequest, TuneRequest
from relaxion.cli.showing_requests import RaceRequest, ReportRequest
from relaxion.errors import SettingsError
from relaxion.paths import check_file, without_slice
from relaxion.settings import nearest, strain_mask

THREADS = "OMP_NUM_THREADS"


def use_one_thread() -> None:
    """One thread for NumPy, torch and whatever this process starts, unless the user has said otherwise.

    On small structures and networks more threads gain nothing, and lose much where processes share the cores.
    """
    if THREADS in os.environ:
        return
    os.environ[THREADS] = "1"
    if "torch" in sys.modules:  # it has read the variable already
        sys.modules["torch"].set_num_threads(1)


def check_early(request: Any) -> None:
    """Refuse what needs no structure and no potential to be seen wrong; the command itself checks the rest."""
    match request:
        case RelaxRequest():
            check_numbers(request.fmax, request.steps, rattle=request.rattle)
            check_cell_options(request)
            if len(request.files) == 1 and not request.as_json:  # of several the others are relaxed all the same
                _check_structures(request.files)
        case RaceRequest():
            check_numbers(request.fmax, request.steps, rattle=request.rattle)
            _check_structures([request.file])
        case ManyRequest():
            check_numbers(request.fmax, request.steps)
            check_cell_options(request)
            _check_structures(request.files or ())
        case TrainRequest() | TuneRequest() if request.recipe:
            _check_recipe(request.recipe)
        case ReportRequest():
            check_file(request.path)


def answered_early(request: Any) -> bool:
    """Answer what needs neither torch nor ASE: `train` without a recipe lists all of them."""
    if not isinstance(request, TrainRequest) or request.recipe is not None:
        return False
    from relaxion.cli.progress import print_table  # rich draws a random number when it is loaded

    print_table([("recipe", True), ("what", False)], completion.trainable().items())
    return True


def _check_structures(files: Sequence[Path]) -> None:
    for file in files:
        check_file(without_slice(file)[0])


def check_cell_options(request: RelaxingRequest) -> None:
    """Refuse what has no meaning without a free cell, and what cannot be read."""
    if not math.isfinite(request.pressure):
        raise SettingsError(f"--pressure is a number in GPa, got {request.pressure}; try --pressure 10")
    if not request.cell and (request.pressure or request.cell_mask):
        raise SettingsError("--pressure and --cell-mask are for a free cell; add --cell")
    strain_mask(request.cell_mask)


def _check_recipe(word: str) -> None:
    known = completion.recipes("")
    if word not in known and not Path(word).exists():
        raise SettingsError(f"no recipe '{word}', neither shipped nor a file: {nearest(word, known)}")


def check_numbers(fmax: float, steps: int, *, fewest_steps: int = 0, rattle: float = 0.0) -> None:
    """Refuse options that make no sense, before anything is read."""
    if not (math.isfinite(fmax) and fmax > 0):
        raise SettingsError(f"--fmax is a force in eV/Å above 0, got {fmax}; try --fmax 0.05")
    if steps < fewest_steps:
        raise SettingsError(f"--steps is {fewest_steps} or more, got {steps}; try --steps 500")
    if not (math.isfinite(rattle) and rattle >= 0):
        raise SettingsError(f"--rattle is a length in Å, 0 or more, got {rattle}; try --rattle 0.05")
