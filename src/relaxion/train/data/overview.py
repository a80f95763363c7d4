"""What a memory holds, in numbers and words; and all of it as extended XYZ, for those who train potentials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.io.extxyz import write_extxyz
from ase.symbols import Symbols

from relaxion.database.store import Note, TrajectoryStore
from relaxion.database.trajectory import Trajectory
from relaxion.errors import FileError
from relaxion.files import part_of
from relaxion.structures import Outcome

MOST_NAMED = 8  # formulas that a sentence names


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
    """The whole memory."""

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
            return ["empty: relax with `memory=...`, or take in the files of earlier relaxations"]
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


def overview(store: TrajectoryStore, note: Note | None = None) -> Overview:
    """Of everything that can be read; `note` hears of what cannot."""
    found = list(store.trajectories(note or (lambda _: None)))
    converged = [t for t in found if t.outcome == Outcome.CONVERGED]
    sizes = [t.n_atoms for t in found]
    n_bytes = sum(file.stat().st_size for file in [*store.shards(), *store.journals()])
    rows = sum(len(t) * t.n_atoms for t in found)
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
        formulas=dict(Counter(formula_of(t) for t in found)),
        calculators=_calculators(found),
        bytes=n_bytes,
        bytes_per_atom_and_point=n_bytes / rows if rows else None,
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


def formula_of(trajectory: Trajectory) -> str:
    return Symbols(trajectory.numbers.numpy()).get_chemical_formula()


def export(store: TrajectoryStore, out: Path, *, force: bool, note: Note | None = None) -> int:
    """Every evaluated structure as one frame, in one go; how many there are."""
    if out.suffix not in (".extxyz", ".xyz"):
        raise FileError(f"{out}: a memory is exported as extended XYZ; choose a name that ends with .extxyz")
    if out.exists() and not force:
        raise FileError(f"{out} exists; `force=True` replaces it, or choose another name")
    beside = part_of(out)
    written = 0
    try:
        beside.unlink(missing_ok=True)
        with beside.open("x", encoding="utf-8") as file:
            for trajectory in store.trajectories(note or (lambda _: None)):
                written += _write(file, trajectory)
        beside.replace(out)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise FileError(f"{out} cannot be written ({error.strerror})") from error
    return written


def _write(file: IO[str], trajectory: Trajectory) -> int:
    images = [_image(trajectory, step) for step in range(len(trajectory))]
    write_extxyz(file, images)
    return len(images)


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
