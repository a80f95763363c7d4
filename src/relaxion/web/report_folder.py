"""From what lies on disk to a report: a result folder of `relaxion relax`, or any trajectory ASE reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError

from relaxion.bench.comparison import Compared, compared
from relaxion.bench.result_folder import MANIFEST, listed_files, read_manifest
from relaxion.bench.runs import Reading, Run, finite, largest_force
from relaxion.errors import FileError
from relaxion.optimize.film import Film, frame_of
from relaxion.structures.dataset import read
from relaxion.web.report_relaxation import Relaxation, policy_in_words


def relaxation_on_disk(path: Path) -> Relaxation:
    """What there is to tell about a result folder or a trajectory file."""
    if not path.exists():
        raise FileError(f"{path} does not exist; give a folder written by 'relaxion relax', or a trajectory")
    return _from_folder(path) if path.is_dir() else _from_trajectory(path)


def _from_folder(folder: Path) -> Relaxation:
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileError(_what_it_is_not(folder))
    trajectories = [name for name in listed_files(manifest) if name.endswith(".traj")]
    if not trajectories or not (folder / trajectories[0]).is_file():
        raise FileError(f"{folder}: its trajectory is missing; relax the structure again, with --report")
    images = read(folder / trajectories[0])
    try:
        return _told(folder, manifest, images)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{folder / MANIFEST} is damaged ({error!r}); relax the structure again, with --report"
        ) from error


def _what_it_is_not(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return f"{folder / MANIFEST} cannot be read; relax the structure again, with --report"
    runs = sorted(file.parent for file in folder.glob("*/settings.toml"))
    if runs:
        return f"{folder} holds {len(runs)} training runs; name one of them, such as {runs[0]}"
    inner = sorted(file.parent for file in folder.glob(f"*/{MANIFEST}"))
    if inner:
        return f"{folder} holds {len(inner)} results; name one of them, such as {inner[0]}"
    return (
        f"{folder} holds neither a result ({MANIFEST}: 'relaxion relax FILE --out {folder}' makes one) nor a training "
        "run (settings.toml, metrics.jsonl)"
    )


def _told(folder: Path, manifest: dict[str, Any], images: Sequence[Atoms]) -> Relaxation:
    result, request = manifest["result"], manifest.get("request", {})
    run = _run(images, _readings(images, manifest.get("calls")), result, manifest.get("calls") or {})
    return Relaxation(
        label=str(result["file"]) + (f"[{result['index']}]" if "index" in result else ""),
        start=_bare(images[0]),
        run=run,
        tolerance=_number(request.get("fmax_ev_per_angstrom")),
        calculator=str(request.get("calculator", "not recorded")),
        policy=policy_in_words(request.get("policy", "auto"), result.get("policy")),
        free_cell=bool(request.get("free_cell", False)),
        command=str(request["command"]) if "command" in request else None,
        others=[_other(name, plain, run, len(images[0])) for name, plain in result.get("compare", {}).items()],
        hints=[
            f"Made from {folder} by 'relaxion report': what was proposed, and the curves of others, are not on disk."
        ],
    )


def _run(images: Sequence[Atoms], readings: tuple[Reading, ...], result: dict[str, Any], calls: dict[str, Any]) -> Run:
    bases = calls.get("base_call") or []
    film = Film()
    for place, atoms in enumerate(images):
        film.add(frame_of(atoms, place + 1, bases[place] if place < len(bases) else None))
    stands = _place_that_stands(readings, result)
    return Run(
        outcome=str(result["outcome"]),
        force_calls=int(result["force_calls"]),
        energy_ev=_number(result["energy_ev"]),
        fmax_ev_per_angstrom=_number(result["fmax_ev_per_angstrom"]),
        wall_time_seconds=float(result["wall_time_seconds"]),
        policy_used=result.get("policy"),
        fallback_used=int(result.get("fallback_used", 0)),
        error=result.get("error"),
        final=_bare(images[min(stands, len(images) - 1)]),
        readings=readings,
        frames=tuple(film.frames),
    )


def _place_that_stands(readings: Sequence[Reading], result: dict[str, Any]) -> int:
    """The frame with the energy of the result: after rejected steps it is not the last."""
    energy = _number(result["energy_ev"])
    gaps = [np.inf if energy is None or r.energy_ev is None else abs(r.energy_ev - energy) for r in readings]
    return len(gaps) - 1 - int(np.argmin(gaps[::-1])) if gaps else 0


def _readings(images: Sequence[Atoms], calls: dict[str, Any] | None) -> tuple[Reading, ...]:
    """As the manifest has them, or as the frames say themselves."""
    if not calls or len(calls["energy_ev"]) != len(images):
        return tuple(_reading(place + 1, atoms) for place, atoms in enumerate(images))
    columns = (calls[name] for name in ("energy_ev", "fmax_ev_per_angstrom", "accepted", "method"))
    return tuple(
        Reading(place + 1, _number(energy), _number(fmax), bool(accepted), str(method))
        for place, (energy, fmax, accepted, method) in enumerate(zip(*columns, strict=True))
    )


def _reading(call: int, atoms: Atoms) -> Reading:
    try:
        return Reading(call, finite(atoms.get_potential_energy()), finite(largest_force(atoms)))
    except (PropertyNotImplementedError, RuntimeError):  # RuntimeError: no calculator at all
        return Reading(call, None, None)


def _other(name: str, plain: dict[str, Any], ours: Run, n_atoms: int) -> Compared:
    outcome = "converged" if plain["converged"] else "error" if "error" in plain else "step_limit"
    run = Run(
        outcome=outcome,
        force_calls=int(plain["force_calls"]),
        energy_ev=_number(plain["energy_ev"]),
        fmax_ev_per_angstrom=_number(plain["fmax_ev_per_angstrom"]),
        wall_time_seconds=float(plain["wall_time_seconds"]),
        error=plain.get("error"),
    )
    return compared(str(name), run, ours, n_atoms)


def _from_trajectory(file: Path) -> Relaxation:
    """Somebody's trajectory: frames, and energies and forces where it has them. Each frame is taken for a call."""
    images = read(file)
    if any(not np.array_equal(atoms.numbers, images[0].numbers) for atoms in images):
        raise FileError(f"{file} holds {len(images)} different structures, not the way of one; give a trajectory")
    film = Film()
    for place, atoms in enumerate(images):
        film.add(frame_of(atoms, place + 1, place or None))
    readings = tuple(_reading(place + 1, atoms) for place, atoms in enumerate(images))
    run = Run(
        outcome="not recorded",
        force_calls=len(images),
        energy_ev=readings[-1].energy_ev,
        fmax_ev_per_angstrom=readings[-1].fmax_ev_per_angstrom,
        wall_time_seconds=0.0,
        final=_bare(images[-1]),
        readings=readings,
        frames=tuple(film.frames),
    )
    moved = not np.allclose(images[0].cell, images[-1].cell)
    hints = ["Made from a trajectory: each frame is taken for one force call, which line searches do not write down."]
    return Relaxation(str(file), _bare(images[0]), run, None, "not recorded", "not recorded", moved, hints=hints)


def _bare(atoms: Atoms) -> Atoms:
    copy = atoms.copy()
    copy.calc = None
    return copy


def _number(value: Any) -> float | None:
    return None if value is None else finite(float(value))
