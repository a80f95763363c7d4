"""Pages from Python: `relaxion.report(...)` of a relaxer, a result folder, a trajectory or a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from ase.filters import StrainFilter, UnitCellFilter

from relaxion.apps.comparison import Compared, compared, readings_of
from relaxion.apps.report.page import Page
from relaxion.apps.report.relaxation import RelaxationReport, policy_in_words, relaxation_page
from relaxion.apps.report.run import looks_like_run
from relaxion.apps.report.training import training_report
from relaxion.apps.result_folder import MANIFEST, listed_files, read_manifest
from relaxion.errors import FileError, SettingsError
from relaxion.optimizer.point import Film, Frame, bare_atoms, frame_of
from relaxion.optimizer.saddles import CURVATURE, EndCheck
from relaxion.relaxer import Relaxer
from relaxion.train.data.dataset import read
from relaxion.train.judge.runs import Reading, Run, finite, largest_force

AGAIN = "relax the structure again, with a report"
NOT_ON_DISK = "proposed moves and the curves of other optimizers are not stored."


def report(thing: Relaxer | str | Path) -> Page:
    """Of a relaxer, a result folder of `relaxion relax`, a trajectory or a training run; `.save(path)`, `.view()`."""
    if not isinstance(thing, str | Path):
        return page_of(thing)
    path = Path(thing)
    if not path.exists():
        raise FileError(f"{path} does not exist; give a folder written by 'relaxion relax', or a trajectory")
    if path.is_dir() and not (path / MANIFEST).exists() and looks_like_run(path):
        return training_report(path)
    return relaxation_page(_from_folder(path) if path.is_dir() else _from_trajectory(path))


# ---- what a relaxer has done


def page_of(optimizer: Relaxer) -> Page:
    """The report of what this relaxer has done so far; it costs no force call."""
    if not isinstance(optimizer, Relaxer):
        raise SettingsError(f"a report is made of a relaxion.Relaxer, got {type(optimizer).__name__}")
    if not optimizer.history:
        raise SettingsError("nothing to show yet: call run() first")
    atoms = bare_atoms(optimizer.atoms)
    name = "unknown" if atoms.calc is None else str(getattr(atoms.calc, "name", None) or type(atoms.calc).__name__)
    start = atoms.copy()
    first = optimizer.film.frames[0]
    start.set_cell(first.cell, apply_constraint=False)
    start.positions[:] = first.positions
    policy = policy_in_words(optimizer.policy, optimizer.policy_used)
    free_cell = isinstance(optimizer.atoms, UnitCellFilter | StrainFilter)
    run = _run_of(optimizer, atoms.copy())
    label = type(optimizer).__name__
    return relaxation_page(RelaxationReport(label, start, run, optimizer.fmax, name, policy, free_cell))


def _run_of(optimizer: Relaxer, final: Atoms) -> Run:
    """As the command line tells a run; nobody has kept the time."""
    outcome = optimizer.outcome.label.replace(" ", "_")
    entries = optimizer.history
    stands = next((entry for entry in reversed(entries) if entry.accepted), entries[-1])
    return Run(
        outcome, optimizer.force_calls, finite(stands.energy_ev), finite(stands.fmax_ev_per_angstrom), 0.0,
        optimizer.policy_used, fallback_used=optimizer.fallback_used, final=final, readings=readings_of(optimizer),
        frames=tuple(optimizer.film.frames), pressure_gpa=optimizer.pressure_gpa,
        pressure_volume_ev=finite(stands.enthalpy_ev - stands.energy_ev) or 0.0, model_used=optimizer.model_used,
        model_calls=optimizer.model_calls, end_check=optimizer.end_check,
    )  # fmt: skip


# ---- what lies on disk


def _from_folder(folder: Path) -> RelaxationReport:
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileError(_what_it_is_not(folder))
    trajectories = [name for name in listed_files(manifest) if name.endswith(".traj")]
    if not trajectories or not (folder / trajectories[0]).is_file():
        raise FileError(f"{folder}: its trajectory is missing; {AGAIN}")
    images = read(folder / trajectories[0])
    try:
        return _told(folder, manifest, images)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{folder / MANIFEST} is damaged ({error!r}); {AGAIN}") from error


def _what_it_is_not(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return f"{folder / MANIFEST} cannot be read; {AGAIN}"
    for file, what in (("settings.toml", "training runs"), (MANIFEST, "results")):
        inner = sorted(found.parent for found in folder.glob(f"*/{file}"))
        if inner:
            return f"{folder} holds {len(inner)} {what}; name one of them, such as {inner[0]}"
    return (
        f"{folder} holds neither a result ({MANIFEST}: 'relaxion relax' makes one) nor a training "
        "run (settings.toml, metrics.jsonl)"
    )


def _told(folder: Path, manifest: dict[str, Any], images: Sequence[Atoms]) -> RelaxationReport:
    result = manifest["result"]
    request = manifest.get("request", {})
    calls = _of_ways(manifest.get("calls") or {})
    pressure = finite(request.get("pressure_gpa")) or 0.0
    if pressure and "enthalpy_ev" not in result:
        raise FileError(f"{folder} is of an earlier relaxion, which mixed up energy and enthalpy; {AGAIN}")
    readings = _readings(images, calls)
    plain_check = result.get("end_check") or {}
    saddles = tuple(plain_check.get("saddle_energies_ev", ()))
    end_check = EndCheck(**{**plain_check, "saddle_energies_ev": saddles})
    run = _run_on_disk(
        result, str(result["outcome"]), pressure, policy_used=result.get("policy"),
        fallback_used=int(result.get("fallback_used", 0)), model_used=str(result.get("model", "")),
        model_calls=int(result.get("model_calls", 0)), readings=readings, end_check=end_check,
        final=images[_place_that_stands(readings, result)].copy(), frames=_frames(images, calls.get("base_call") or []),
    )  # fmt: skip
    return RelaxationReport(
        label=str(result["file"]) + (f"[{result['index']}]" if "index" in result else ""),
        start=images[0].copy(),
        run=run,
        tolerance=finite(request.get("fmax_ev_per_angstrom")),
        calculator=str(request.get("calculator", "not recorded")),
        policy=policy_in_words(request.get("policy", "auto"), result.get("policy")),
        free_cell=bool(request.get("free_cell", False)),
        command=str(request["command"]) if "command" in request else None,
        others=[_other(name, plain, run, len(images[0])) for name, plain in result.get("compare", {}).items()],
        hints=[f"Made from {folder} by 'relaxion report': {NOT_ON_DISK}"],
    )


def _run_on_disk(plain: dict[str, Any], outcome: str, pressure_gpa: float, **more: Any) -> Run:
    work = _pressure_volume(finite(plain["energy_ev"]), finite(plain.get("enthalpy_ev")))
    return Run(
        outcome, int(plain["force_calls"]), finite(plain["energy_ev"]), finite(plain["fmax_ev_per_angstrom"]),
        float(plain["wall_time_seconds"]), error=plain.get("error"), pressure_gpa=pressure_gpa,
        pressure_volume_ev=work, **more,
    )  # fmt: skip


def _pressure_volume(energy: float | None, enthalpy: float | None) -> float:
    """0 where one of them is not known: then there is no enthalpy either, or no pressure."""
    return 0.0 if energy is None or enthalpy is None else float(enthalpy) - float(energy)


def _other(name: str, plain: dict[str, Any], ours: Run, n_atoms: int) -> Compared:
    outcome = "converged" if plain["converged"] else "error" if "error" in plain else "step_limit"
    return compared(str(name), _run_on_disk(plain, outcome, ours.pressure_gpa), ours, n_atoms)


def _place_that_stands(readings: Sequence[Reading], result: dict[str, Any]) -> int:
    """The frame with the energy of the result: after rejected steps it is not the last."""
    energy = finite(result["energy_ev"])
    gaps = [np.inf if energy is None or r.energy_ev is None else abs(r.energy_ev - energy) for r in readings]
    return len(gaps) - 1 - int(np.argmin(gaps[::-1]))


def _of_ways(calls: dict[str, Any]) -> dict[str, Any]:
    """Without the looks near an end, which trajectories do not have."""
    kept = [place for place, method in enumerate(calls.get("method", [])) if method != CURVATURE]
    return {name: [column[place] for place in kept if place < len(column)] for name, column in calls.items()}


def _frames(images: Sequence[Atoms], bases: Sequence[int | None]) -> tuple[Frame, ...]:
    film = Film()
    for place, atoms in enumerate(images):
        film.add(frame_of(atoms, place + 1, bases[place] if place < len(bases) else None))
    return tuple(film.frames)


def _readings(images: Sequence[Atoms], calls: dict[str, Any]) -> tuple[Reading, ...]:
    """As the manifest has them, or as the frames say themselves."""
    if not calls or len(calls["energy_ev"]) != len(images):
        return tuple(_reading(place + 1, atoms) for place, atoms in enumerate(images))
    columns = [calls[name] for name in ("energy_ev", "fmax_ev_per_angstrom", "accepted", "method")]
    enthalpies = calls.get("enthalpy_ev") or calls["energy_ev"]
    rows = zip(*columns, map(_pressure_volume, calls["energy_ev"], enthalpies), strict=True)
    return tuple(
        Reading(
            place + 1, finite(energy), finite(fmax), bool(accepted), str(method), pressure_volume_ev=pressure_volume
        )
        for place, (energy, fmax, accepted, method, pressure_volume) in enumerate(rows)
    )


def _reading(call: int, atoms: Atoms) -> Reading:
    try:
        return Reading(call, finite(atoms.get_potential_energy()), finite(largest_force(atoms)))
    except (PropertyNotImplementedError, RuntimeError):  # RuntimeError: no calculator at all
        return Reading(call, None, None)


def _from_trajectory(file: Path) -> RelaxationReport:
    """Somebody's trajectory: frames, and energies and forces where it has them. Each frame is taken for a call."""
    images = read(file)
    if any(not np.array_equal(atoms.numbers, images[0].numbers) for atoms in images):
        raise FileError(f"{file} holds {len(images)} different structures, not one relaxation; give a trajectory")
    readings = _readings(images, {})
    frames = _frames(images, [None, *range(1, len(images))])
    energy = readings[-1].energy_ev
    fmax = readings[-1].fmax_ev_per_angstrom
    run = Run("not recorded", len(images), energy, fmax, 0.0, final=images[-1].copy(), readings=readings, frames=frames)
    moved = not np.allclose(images[0].cell, images[-1].cell)
    hints = [
        "Made from a trajectory: each frame counts as one force call, but line searches do not write all of theirs."
    ]
    return RelaxationReport(str(file), images[0].copy(), run, None, "not recorded", "not recorded", moved, hints=hints)
