"""A relaxation database and the world: what it holds, in numbers and words; export as extended XYZ; relaxations that
people have already (.traj, extxyz, vasprun.xml, whatever ASE reads) added to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.io.extxyz import write_extxyz
from ase.stress import voigt_6_to_full_3x3_stress
from ase.symbols import Symbols

from relaxion.database import Note, RelaxationDatabase, key_of
from relaxion.errors import FileError
from relaxion.files import replacing
from relaxion.structures import Outcome
from relaxion.structures.trajectory import Trajectory
from relaxion.train.data import dataset

MOST_NAMED = 8  # formulas that a sentence names

ADDED = "added"  # the kind of what is added
FINISHED = 0.05  # eV/Å: files do not say what was asked for; below it a relaxation has come to its end
LARGEST_MOVE = 1.5  # Å in one step; farther apart, frames belong to different relaxations
PER_TRANSACTION = 200


@dataclass(frozen=True)
class CalculatorOverview:
    """What one calculator was asked."""

    name: str
    settings: Mapping[str, Any]
    relaxations: int
    converged: int
    force_calls: int


@dataclass(frozen=True)
class Overview:
    """The whole database."""

    relaxations: int
    converged: int
    force_calls: int
    mean_calls_converged: float | None
    free_cells: int
    smallest_n_atoms: int | None
    largest_n_atoms: int | None
    elements: list[str]
    formulas: Mapping[str, int]
    calculators: list[CalculatorOverview]
    bytes: int
    bytes_per_atom_and_point: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        if not self.relaxations:
            return ["empty: relax with `database=...`, or add the files of earlier relaxations"]
        calls = "–" if self.mean_calls_converged is None else f"{self.mean_calls_converged:.1f}"
        named = sorted(self.formulas.items(), key=lambda pair: (-pair[1], pair[0]))
        words = ", ".join(f"{formula} ({number})" for formula, number in named[:MOST_NAMED])
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        size = f"{self.bytes / 1e6:.2f} MB, {self.bytes_per_atom_and_point:.0f} bytes per atom and point"
        first = f"{self.relaxations} relaxations, {self.converged} converged in {calls} calls on average"
        return [
            f"{first}, {self.free_cells} with free cell; {self.force_calls} structures evaluated; {size}",
            f"  elements: {' '.join(self.elements)}; {self.smallest_n_atoms} to {self.largest_n_atoms} atoms",
            f"  compositions: {words}{more}",
            *(f"  calculator {c.name}: {c.relaxations} relaxations, {c.force_calls} calls" for c in self.calculators),
        ]


def overview(database: RelaxationDatabase, note: Note | None = None) -> Overview:
    """Of everything that can be read; `note` hears of what cannot."""
    found = list(database.trajectories(note or (lambda _: None)))
    converged = [t for t in found if t.outcome == Outcome.CONVERGED]
    sizes = [t.n_atoms for t in found]
    n_bytes = sum(file.stat().st_size for file in database.files())
    rows = sum(len(t) * t.n_atoms for t in found)
    point_bytes = sum(t.positions.nbytes + t.forces.nbytes + t.cells.nbytes + t.stresses.nbytes for t in found)
    elements = Symbols(sorted({int(number) for t in found for number in t.numbers}))
    return Overview(
        relaxations=len(found),
        converged=len(converged),
        force_calls=sum(map(len, found)),
        mean_calls_converged=float(np.mean([len(t) for t in converged])) if converged else None,
        free_cells=sum(bool(t.cell_free) for t in found),
        smallest_n_atoms=min(sizes, default=None),
        largest_n_atoms=max(sizes, default=None),
        elements=list(elements),
        formulas=dict(Counter(t.formula for t in found)),
        calculators=_calculators(found),
        bytes=n_bytes,
        bytes_per_atom_and_point=point_bytes / rows if rows else None,
    )


def _calculators(found: Iterable[Trajectory]) -> list[CalculatorOverview]:
    by_settings: dict[str, list[Trajectory]] = {}
    for trajectory in found:
        by_settings.setdefault(repr(sorted(trajectory.settings.items())), []).append(trajectory)
    told = [
        CalculatorOverview(
            name=group[0].engine,
            settings=group[0].settings,
            relaxations=len(group),
            converged=sum(t.outcome == Outcome.CONVERGED for t in group),
            force_calls=sum(map(len, group)),
        )
        for group in by_settings.values()
    ]
    return sorted(told, key=lambda one: -one.relaxations)


def export(database: RelaxationDatabase, out: Path, *, force: bool, note: Note | None = None) -> int:
    """Every evaluated structure as one frame, in one go; how many there are."""
    if out.suffix not in (".extxyz", ".xyz"):
        raise FileError(f"{out}: relaxations are exported as extended XYZ; choose a name that ends with .extxyz")
    if out.exists() and not force:
        raise FileError(f"{out} exists; `force=True` replaces it, or choose another name")
    written = 0
    try:
        with replacing(out, "x", encoding="utf-8") as file:
            for trajectory in database.trajectories(note or (lambda _: None)):
                images = [_image(trajectory, step) for step in range(len(trajectory))]
                write_extxyz(file, images)
                written += len(images)
    except OSError as error:
        raise FileError(f"{out} cannot be written ({error.strerror})") from error
    return written


def _image(trajectory: Trajectory, step: int) -> Atoms:
    atoms = Atoms(
        trajectory.numbers.numpy(),
        trajectory.positions[step].numpy(),
        cell=trajectory.cells[step].numpy(),
        pbc=trajectory.pbc.numpy(),
    )
    if not bool(trajectory.movable.all()):
        atoms.set_constraint(FixAtoms(mask=~trajectory.movable.numpy()))
    stress = trajectory.stresses[step].numpy()
    told = {"energy": float(trajectory.energies[step]), "forces": trajectory.forces[step].numpy()}
    if stress.any():
        told["stress"] = stress.flat[[0, 4, 8, 5, 2, 1]]
    atoms.calc = SinglePointCalculator(atoms, **told)
    label = Outcome(trajectory.outcome).label.replace(" ", "_")
    atoms.info |= {"relaxation": trajectory.key, "step": step, "calculator": trajectory.engine, "outcome": label}
    return atoms


@dataclass(frozen=True)
class AddedFiles:
    """What came of some files."""

    relaxations: int
    structures: int
    already: int  # relaxations that the database held
    without_forces: int  # frames that say no energy or no forces


def add_files(database: RelaxationDatabase, files: Sequence[Path], calculator: str | None = None) -> AddedFiles:
    """FileError at a file that cannot be read, before anything is written. `calculator`: for files that name none."""
    read = [(file, dataset.read(file)) for file in files]
    known = database.keys()
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
    for first in range(0, len(new), PER_TRANSACTION):
        database.append(new[first : first + PER_TRANSACTION])
    return AddedFiles(len(new), sum(map(len, new)), already, bare)


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
