"""The state file of a search: one safetensors file with a JSON header, written whole or not at all, no pickle.

It holds everything that decides how the search goes on, random generators included. A search that is resumed makes the
same hops as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from torch import Tensor

from relaxion.errors import FileError, RestartError
from relaxion.files import Format, Stored
from relaxion.search.choices import Walker
from relaxion.search.critic_choice import CriticChoice
from relaxion.search.walk import Minimum, Step, Walk

KIND = "search state"
FORMAT = Format(1, RestartError, advice="begin the search anew, in another folder")
NAME = "search.state"


def save_state(walk: Walk, path: Path, seconds: float) -> None:
    """`seconds`: wall time of the search so far."""
    tensors = {
        "minima": _stacked([minimum.atoms for minimum in walk.minima.found]),
        "minima_forces": _forces([minimum.atoms for minimum in walk.minima.found]),
        "walkers": _stacked([walker.atoms for walker in walk.walkers]),
    }
    values: dict[str, Any] = {
        "asked": question(walk),
        "calls": walk.calls,
        "seconds": seconds,
        "failures": walk.failures,
        "stopped": walk.stopped,
        "bond_scale": walk.bond_scale,
        "allowed_fragments": walk.allowed_fragments,
        "history": [list(asdict(step).values()) for step in walk.history],
        "minima": [
            [minimum.energy_ev, minimum.found_at_call, minimum.times_found, _own_energy(minimum.atoms)]
            for minimum in walk.minima.found
        ],
        "walkers": [
            [walker.energy_ev, walker.minimum, walker.best_ev, walker.random.bit_generator.state, walker.idle_hops]
            for walker in walk.walkers
        ],
        "tried": [[minimum, [look.tolist() for look in looks]] for minimum, looks in walk.tried.items()],
        "chooser": walk.chooser.state(),
    }
    if isinstance(walk.chooser, CriticChoice):
        tensors |= {f"chooser.{name}": tensor for name, tensor in walk.chooser.tensors().items()}
    FORMAT.write(path, KIND, tensors, values)


def restore_state(walk: Walk, path: Path) -> float:
    """Bring a new walk of the same start and settings to where the file was written; seconds spent until then."""
    stored = FORMAT.read(path, KIND)
    if stored.values.get("asked") != question(walk):
        raise FileError(
            f"{path} belongs to another search (other structure, settings or seed); give the same ones as before, "
            "or name another folder"
        )
    try:
        _restore(walk, stored)
        return float(stored.values["seconds"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RestartError(f"{path} cannot be understood ({error}); {FORMAT.advice}") from error


def question(walk: Walk) -> str:
    """A digest of structure and settings; more calls or more time may be given when a search is resumed."""
    settings = asdict(walk.settings)
    for name in ("calls", "seconds", "patience_calls"):
        settings.pop(name)
    start = walk.start
    held = [constraint.todict() for constraint in start.constraints]
    asked = [
        start.numbers.tolist(), start.positions.tolist(), start.cell.array.tolist(), start.pbc.tolist(), settings,
        list(walk.shares), str(held), type(walk.chooser).__name__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _restore(walk: Walk, stored: Stored) -> None:
    values = stored.values
    tensors = stored.tensors
    walk.calls = int(values["calls"])
    walk.failures = int(values["failures"])
    walk.bond_scale = float(values["bond_scale"])
    walk.allowed_fragments = int(values["allowed_fragments"])
    for row in values["history"]:
        walk.record(Step(*row))
    minima = _structures(walk.start, tensors["minima"])
    forces = tensors["minima_forces"].numpy()
    for atoms, own_forces, row in zip(minima, forces, values["minima"], strict=True):
        energy, found_at, times, own_energy = row
        if own_energy is not None:
            atoms.calc = SinglePointCalculator(atoms, energy=own_energy, free_energy=own_energy, forces=own_forces)
        walk.minima.found.append(Minimum(atoms, energy, found_at, times))
    standing = _structures(walk.start, tensors["walkers"])
    for atoms, (energy, minimum, best, random_state, idle) in zip(standing, values["walkers"], strict=True):
        random = np.random.default_rng()
        random.bit_generator.state = random_state
        walk.walkers.append(Walker(atoms, energy, minimum, best, random, idle))
    walk.tried = {int(minimum): [np.array(look) for look in looks] for minimum, looks in values["tried"]}
    walk.chooser.restore(values["chooser"])
    if isinstance(walk.chooser, CriticChoice):
        walk.chooser.restore_tensors(stored.part("chooser"))
    walk.stop_by_calls()  # the limits may be others than when it was written


def _stacked(images: list[Atoms]) -> Tensor:
    """(n_images, n_atoms + 3, 3): positions, then the cell, float64."""
    if not images:
        return torch.zeros((0, 3, 3), dtype=torch.float64)
    return torch.from_numpy(np.array([np.vstack([atoms.positions, atoms.cell.array]) for atoms in images]))


def _structures(start: Atoms, stacked: Tensor) -> list[Atoms]:
    found = []
    for rows in stacked.numpy():
        atoms = start.copy()
        atoms.calc = None
        atoms.set_cell(rows[-3:])
        atoms.positions = rows[:-3]
        found.append(atoms)
    return found


def _forces(images: list[Atoms]) -> Tensor:
    found = [np.zeros((len(a), 3)) if a.calc is None else a.get_forces(apply_constraint=False) for a in images]
    return torch.from_numpy(np.array(found)) if found else torch.zeros((0, 1, 3), dtype=torch.float64)


def _own_energy(atoms: Atoms) -> float | None:
    return None if atoms.calc is None else float(atoms.get_potential_energy())
