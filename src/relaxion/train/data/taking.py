"""Relaxations that people have already, taken into a memory: .traj, extxyz, vasprun.xml, whatever ASE reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from ase.constraints import FixAtoms
from ase.stress import voigt_6_to_full_3x3_stress

from relaxion.database.recording import key_of
from relaxion.database.store import TrajectoryStore
from relaxion.database.trajectory import Trajectory
from relaxion.errors import FileError
from relaxion.structures import Outcome
from relaxion.train.data import dataset

ADDED = "added"  # the kind of what is taken in
FINISHED = 0.05  # eV/Å: files do not say what was asked for; below it a relaxation has come to its end
LARGEST_MOVE = 1.5  # Å in one step; farther apart, frames belong to different relaxations
PER_SHARD = 200


@dataclass(frozen=True)
class Taken:
    """What came of some files."""

    relaxations: int
    structures: int
    already: int  # relaxations that the memory had
    without_forces: int  # frames that say no energy or no forces


def take_in(store: TrajectoryStore, files: Sequence[Path], calculator: str | None = None) -> Taken:
    """FileError at a file that cannot be read, before anything is written. `calculator`: for files that name none."""
    read = [(file, dataset.read(file)) for file in files]
    known = store.keys()
    new = list[Trajectory]()
    already = 0
    bare = 0
    for _, images in read:
        told = [atoms for atoms in images if _has_forces(atoms)]
        bare += len(images) - len(told)
        for group in relaxations(told):
            trajectory = trajectory_from(group, calculator)
            already += trajectory.key in known
            if trajectory.key not in known:
                known.add(trajectory.key)
                new.append(trajectory)
    if not new and not already:
        names = ", ".join(str(file) for file in files)
        raise FileError(f"{names}: no structure there has an energy and finite forces: there is nothing to keep")
    for first in range(0, len(new), PER_SHARD):
        store.append(new[first : first + PER_SHARD])
    return Taken(len(new), sum(map(len, new)), already, bare)


def relaxations(images: Sequence[Atoms]) -> Iterator[list[Atoms]]:
    """Frames that follow each other: the same atoms, nobody far away from where it was."""
    group: list[Atoms] = []
    for atoms in images:
        if group and not _follows(group[-1], atoms):
            yield group
            group = []
        group.append(atoms)
    if group:
        yield group


def _follows(before: Atoms, after: Atoms) -> bool:
    if not np.array_equal(before.numbers, after.numbers) or not np.array_equal(before.pbc, after.pbc):
        return False
    if before.info.get("relaxation") != after.info.get("relaxation"):
        return False
    return bool(np.linalg.norm(after.positions - before.positions, axis=1).max() < LARGEST_MOVE)


def _has_forces(atoms: Atoms) -> bool:
    if atoms.calc is None or not len(atoms):
        return False
    try:
        told = (atoms.get_potential_energy(), atoms.get_forces(apply_constraint=False), atoms.positions)
    except (PropertyNotImplementedError, RuntimeError, KeyError, ValueError):
        return False
    return all(bool(np.isfinite(value).all()) for value in told)


def trajectory_from(images: Sequence[Atoms], calculator: str | None = None) -> Trajectory:
    """One relaxation; its cell is free where it changes."""
    first = images[0]
    cells = np.stack([np.asarray(atoms.cell) for atoms in images])
    positions = np.stack([atoms.positions for atoms in images])
    forces = np.stack([atoms.get_forces(apply_constraint=False) for atoms in images])
    energies = np.array([atoms.get_potential_energy() for atoms in images], dtype=np.float64)
    movable = np.ones(len(first), dtype=bool)
    for constraint in first.constraints:
        if isinstance(constraint, FixAtoms):
            movable[constraint.index] = False
    engine = calculator or str(first.info.get("calculator") or getattr(first.calc, "name", "") or "unknown")
    largest = np.linalg.norm(forces[-1][movable], axis=1).max() if movable.any() else 0.0
    start = {"numbers": first.numbers, "positions": positions, "energies": energies, "cells": cells, "engine": engine}
    return Trajectory(
        key=key_of(start),
        kind=ADDED,
        engine=engine,
        outcome=int(Outcome.CONVERGED if largest < FINISHED else Outcome.RUNNING),
        cell_free=bool(np.abs(cells - cells[0]).max() > 1e-8),
        numbers=torch.from_numpy(first.numbers.astype(np.int64)),
        pbc=torch.from_numpy(np.array(first.pbc)),
        movable=torch.from_numpy(movable),
        cells=torch.from_numpy(cells.astype(np.float64)),
        positions=torch.from_numpy(positions.astype(np.float64)),
        energies=torch.from_numpy(energies),
        forces=torch.from_numpy(forces.astype(np.float64)),
        stresses=torch.from_numpy(np.stack([_stress(atoms) for atoms in images])),
    )


def _stress(atoms: Atoms) -> np.ndarray:
    try:
        stress = np.asarray(atoms.get_stress(apply_constraint=False), dtype=np.float64)
    except (PropertyNotImplementedError, RuntimeError, KeyError, ValueError):
        return np.zeros((3, 3))
    return voigt_6_to_full_3x3_stress(stress) if np.isfinite(stress).all() else np.zeros((3, 3))
