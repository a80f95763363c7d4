"""`relaxion database` and `learn`: what a relaxation database holds, files in and out, and what is learned from it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from relaxion.apps.cli.command import DONE, INCOMPLETE, interrupts
from relaxion.apps.cli.inputs import command_line
from relaxion.apps.cli.installed import refuse_to_overwrite, target_of, write_bundle
from relaxion.apps.cli.progress import Now, bar, say, tell
from relaxion.database import USER, Note, RelaxationDatabase, key_of
from relaxion.errors import FileError, PolicyError, SettingsError
from relaxion.files import replacing
from relaxion.model.policy_file import SUFFIX
from relaxion.optimizer.choice import CORE, WORDS, Loaded, load
from relaxion.potentials.registry import make_potential
from relaxion.settings import assigned
from relaxion.structures import Outcome
from relaxion.structures.trajectory import Trajectory
from relaxion.train.data import dataset
from relaxion.train.supervised.fine_tune import (
    USUAL,
    Learned,
    OnUpdate,
    StoreFineTune,
    alone,
    bundle_of,
    gathered,
    without_molecules,
)
from relaxion.train.supervised.fit import FitSettings

MOST_NAMED = 8  # formulas that a sentence names

ADDED = "added"  # the kind of what is added
FINISHED = 0.05  # eV/Å: files do not say what was asked for; below it a relaxation has come to its end
LARGEST_MOVE = 1.5  # Å in one step; farther apart, frames belong to different relaxations
PER_TRANSACTION = 200


def overview(database: RelaxationDatabase, note: Note | None = None) -> dict[str, Any]:
    """What a database holds, for JSON; `note` hears of what cannot be read."""
    found = list(database.trajectories(note or (lambda _: None)))
    sizes = [t.n_atoms for t in found]
    rows = sum(len(t) * t.n_atoms for t in found)
    point_bytes = sum(t.positions.nbytes + t.forces.nbytes + t.cells.nbytes + t.stresses.nbytes for t in found)
    calls = [len(t) for t in found if t.outcome == Outcome.CONVERGED]
    return {
        **_counts(found),
        "mean_calls_converged": float(np.mean(calls)) if calls else None,
        "free_cells": sum(bool(t.cell_free) for t in found),
        "smallest_n_atoms": min(sizes, default=None),
        "largest_n_atoms": max(sizes, default=None),
        "elements": list(Symbols(sorted({int(number) for t in found for number in t.numbers}))),
        "formulas": dict(Counter(t.formula for t in found)),
        "calculators": _calculators(found),
        "bytes": sum(file.stat().st_size for file in database.files()),
        "bytes_per_atom_and_point": point_bytes / rows if rows else None,
    }


def _counts(found: Sequence[Trajectory]) -> dict[str, int]:
    converged = sum(t.outcome == Outcome.CONVERGED for t in found)
    return {"relaxations": len(found), "converged": converged, "force_calls": sum(map(len, found))}


def _calculators(found: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """What each calculator was asked, the busiest first."""
    by_settings: dict[str, list[Trajectory]] = {}
    for trajectory in found:
        by_settings.setdefault(repr(sorted(trajectory.settings.items())), []).append(trajectory)
    told = [{"name": own[0].engine, "settings": own[0].settings, **_counts(own)} for own in by_settings.values()]
    return sorted(told, key=lambda one: -one["relaxations"])


def _lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    if not found["relaxations"]:
        return ["empty: relax with --database DIR, or add the files of earlier relaxations"]
    mean = found["mean_calls_converged"]
    calls = "–" if mean is None else f"{mean:.1f}"
    named = sorted(found["formulas"].items(), key=lambda pair: (-pair[1], pair[0]))
    words = ", ".join(f"{formula} ({number})" for formula, number in named[:MOST_NAMED])
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    size = f"{found['bytes'] / 1e6:.2f} MB, {found['bytes_per_atom_and_point']:.0f} bytes per atom and point"
    first = f"{found['relaxations']} relaxations, {found['converged']} converged in {calls} calls on average"
    sizes = f"{found['smallest_n_atoms']} to {found['largest_n_atoms']} atoms"
    return [
        f"{first}, {found['free_cells']} with free cell; {found['force_calls']} structures evaluated; {size}",
        f"  elements: {' '.join(found['elements'])}; {sizes}",
        f"  compositions: {words}{more}",
        *(
            f"  calculator {one['name']}: {one['relaxations']} relaxations, {one['force_calls']} calls"
            for one in found["calculators"]
        ),
    ]


def export_to(database: RelaxationDatabase, out: Path, *, force: bool, note: Note | None = None) -> int:
    """Every evaluated structure as one frame, in one go; how many there are."""
    if out.suffix not in (".extxyz", ".xyz"):
        raise FileError(f"{out}: relaxations are exported as extended XYZ; choose a name that ends with .extxyz")
    if out.exists() and not force:
        raise FileError(f"{out} exists; --force replaces it, or choose another name")
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


# ---- the commands

SECONDS_BETWEEN_PLAIN_LINES = 10.0


def show_database(
    folder: Path, added: Sequence[Path], calculator: str | None, export: Path | None, *, as_json: bool, force: bool
) -> int:
    """Add, export, show; in this order."""
    if calculator is not None and not added:
        raise SettingsError("--calculator names the calculator that made the files of --add; there are none")
    if added:
        found = add_files(RelaxationDatabase.open_or_create(folder, {"made_by": USER}), added, calculator)
        words = f"{found.relaxations} relaxations with {found.structures} structures added"
        words += f", {found.already} were there already" * bool(found.already)
        words += f"; {found.without_forces} structures without energy and forces left out" * bool(found.without_forces)
        say(f"relaxion: {words}")
    database = RelaxationDatabase.open(folder)
    if export is not None:
        number = export_to(database, export, force=force, note=_note)
        say(f"relaxion: {number} structures -> {export}")
    found = overview(database, None if export is not None else _note)
    for line in [json.dumps(found)] if as_json else [f"{folder}/", *_lines(found)]:
        tell(line)
    return DONE


@dataclass(frozen=True)
class LearnRequest:
    """What `relaxion learn` was asked."""

    folder: Path
    origin: str
    out: str
    calculator: str | None
    calc: str | None
    number: int
    assignments: list[str] | None
    as_json: bool
    force: bool
    quiet: bool


def learn_from_database(request: LearnRequest) -> int:
    """The first signal is only noticed: the fit is saved, and the same command goes on."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    name, out = _named(request)
    settings = FitSettings.read(USUAL.model_dump() | assigned(request.assignments or (), "--set"))
    origin = _origin(request.origin)
    potential = None if request.calc is None else make_potential(request.calc)
    trajectories = gathered(request.folder, request.calculator, _note)
    trajectories = without_molecules(request.folder, trajectories, origin, _note)
    began = time.monotonic()
    with alone(request.folder), interrupts.held():
        tuned = StoreFineTune(request.folder, origin, trajectories, settings)
        with _progress(request) as on_update:
            whole = tuned.run(on_update, lambda: interrupts.noticed)
        if not whole:
            say(f"relaxion: stopped after {tuned.tuning.n_updates} updates, saved; the same command continues")
            return interrupts.exit_code
        measured = None if potential is None else tuned.measure(potential, request.number, lambda: interrupts.noticed)
        learned = tuned.tested(time.monotonic() - began, measured)
        if learned.kept:
            write_bundle(bundle_of(name, tuned, learned, command_line()), out)
    plain = learned.plain() | {"policy": str(out) if learned.kept else None}
    tell(json.dumps(plain) if request.as_json else _in_words(request.origin, learned, out))
    return DONE if learned.kept else INCOMPLETE


def _note(sentence: str) -> None:
    say(f"relaxion: {sentence}")


def _origin(name: str) -> Loaded:
    """The policy to begin with; words that `--policy` understands beside names are none."""
    if name in (*WORDS, CORE):
        raise PolicyError(
            f"'{name}' is no policy to start from: give --from universal, --from metals or one of your "
            "own; the classical optimizer does not learn"
        )
    return load(name)


def _named(request: LearnRequest) -> tuple[str, Path]:
    """A name, or a file."""
    path = Path(request.out) if request.out.endswith(SUFFIX) or os.sep in request.out else None
    name = request.out if path is None else path.name.removesuffix(SUFFIX)
    file = target_of(name, path)
    if not request.force:
        refuse_to_overwrite(file)
    return name, file


def _in_words(origin: str, learned: Learned, out: Path) -> str:
    test = learned.acceptance
    judged = (
        f"on {test.n_validation} held-out relaxations its error is {test.ratio:.2f} ({test.low:.2f}–"
        f"{test.high:.2f}) of that of {origin}"
    )
    if learned.measured is not None:
        judged += f", its measured force calls are {learned.measured:.2f} of those of {origin}"
    elif learned.calls_before is not None:
        judged += f"; expected force calls: about {learned.expected_calls_ratio:.2f} of those of {origin}"
    work = f"{learned.n_updates} updates from {learned.n_training} relaxations in {learned.seconds:.0f} s"
    if learned.kept:
        return f"{out}: {work}; {judged}"
    return f"nothing was saved: {work}, but {judged}: not proven better; relax more structures, then learn again"


@contextmanager
def _progress(request: LearnRequest) -> Iterator[OnUpdate | None]:
    due = Now(SECONDS_BETWEEN_PLAIN_LINES, at_once=False)
    with bar(str(request.folder), None, quiet=request.quiet) as advance:

        def report(made: int, total: int, told: Mapping[str, float]) -> None:
            words = f"error {told['fit/relative_error']:.2f}"
            if advance is not None:
                advance(total=total, completed=made, words=words)
            elif due():
                say(f"relaxion: {made} of {total} updates, {words}")

        yield None if request.quiet else report
