"""Where `relaxion bench` begins: a named set or a structure file, perturbed if asked for, all checked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from ase import Atoms

from relaxion.bench.checks import check_structure
from relaxion.bench.sets import SETS, find_set
from relaxion.errors import FileError, InputError, PotentialError, SettingsError
from relaxion.generators.perturbations import Perturbation, perturbation
from relaxion.potentials.potential import Potential
from relaxion.potentials.registry import make_potential
from relaxion.structures import Structures
from relaxion.structures.dataset import read

PERTURBED_NUMBER = 50  # starts from a file that is perturbed, unless --number says otherwise
FILE_CALCULATOR = "emt"


@dataclass(frozen=True)
class Starts:
    """Structures to relax, and how."""

    name: str
    title: str
    images: Sequence[Atoms]
    potential: Potential
    calculator: str
    free_cell: bool
    without_gpmin: bool


def find_starts(
    what: str, calculator: str | None, perturb: str | None, number: int | None, seed: int, *, free_cell: bool
) -> Starts:
    """By name, or from a file."""
    disturb = None if perturb is None else perturbation(perturb)
    if what in SETS:
        starts = _from_set(what, calculator, number, seed, free_cell)
    else:
        starts = _from_file(what, calculator, number, free_cell, perturbed=disturb is not None)
    images = [_start(image, disturb, seed, index) for index, image in enumerate(starts.images)]
    for index, image in enumerate(images):
        _check(starts, index, image)
    return replace(starts, images=images)


def _from_set(name: str, calculator: str | None, number: int | None, seed: int, free_cell: bool) -> Starts:
    known = find_set(name)
    return Starts(
        name=name,
        title=known.title,
        images=known.starts(number or known.number, seed),
        potential=known.make_potential() if calculator is None else make_potential(calculator),
        calculator=calculator or known.calculator,
        free_cell=free_cell or known.free_cell,
        without_gpmin=known.without_gpmin,
    )


def _from_file(what: str, calculator: str | None, number: int | None, free_cell: bool, *, perturbed: bool) -> Starts:
    path = Path(what)
    if not path.exists() and path.suffix == "" and path.name == what:
        find_set(what)  # raises: it looks like the name of a set
    images = read(path)
    if number is None:
        number = max(PERTURBED_NUMBER, len(images)) if perturbed else len(images)
    if number > len(images) and not perturbed:
        raise SettingsError(
            f"--number {number}: {what} holds {len(images)} structures; ask for fewer, or make more of each "
            "with --perturb rattle:0.1"
        )
    spec = calculator or FILE_CALCULATOR
    return Starts(
        name=what,
        title=f"structures of {path.name}",
        images=[images[index % len(images)] for index in range(number)],
        potential=make_potential(spec),
        calculator=spec,
        free_cell=free_cell,
        without_gpmin=False,
    )


def _start(image: Atoms, disturb: Perturbation | None, seed: int, index: int) -> Atoms:
    """Each start has random numbers of its own, whatever the others are."""
    if disturb is None:
        return image
    own = int(np.random.default_rng([seed, index]).integers(2**62))
    return disturb(Structures.from_ase(image), torch.Generator().manual_seed(own)).to_ase()[0]


def _check(starts: Starts, index: int, image: Atoms) -> None:
    try:
        check_structure(image, starts.potential, free_cell=starts.free_cell)
    except (InputError, PotentialError) as error:
        raise FileError(f"{starts.name}, structure {index}: {error}") from error
