"""The page of a folder of `relax-many`: force calls of every structure over the run, and where policies got better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaxion.errors import CheckpointError, FileError
from relaxion.scaling.relax_many.folder import read_manifest
from relaxion.scaling.relax_many.learning import FOLDER, LAG, read_study
from relaxion.scaling.relax_many.summary import read_force_calls
from relaxion.web.page import Page, Part, facts, notes, tile

WINDOW = 20  # structures of the running mean


def many_page(folder: Path, against: Sequence[Path] = ()) -> Page:
    """`against`: other folders for the same input, with another policy, say."""
    settings, calls = read_manifest(folder)["settings"], np.array(read_force_calls(folder), dtype=float)
    if not len(calls):
        raise FileError(f"{folder} has no result yet; wait for the first")
    others = {other.name: np.array(read_force_calls(other), dtype=float) for other in against}
    every = int(settings.get("learn_every", 0))
    studies = studies_of(folder) if every else []
    return Page(
        title=f"{folder.name}: {len(calls)} structures",
        eyebrow="relax-many",
        lead=_lead(calls, every, studies),
        parts=[_tiles(calls, others, every), _plot(calls, others, every, studies), *_notes(studies), _facts(settings)],
    )


def studies_of(folder: Path) -> list[dict[str, Any]]:
    """What each study said, in order; damaged ones are left out."""
    found = []
    for file in sorted((folder / FOLDER).glob("*.safetensors")):
        try:
            found.append(read_study(file).values)
        except CheckpointError:
            continue
    return found


def _lead(calls: np.ndarray, every: int, studies: Sequence[dict[str, Any]]) -> str:
    if not every:
        return f"{calls.mean():.1f} force calls on average; the policies did not change."
    adopted = max((int(study["n_adopted"]) for study in studies), default=0)
    return (
        f"{calls.mean():.1f} force calls on average; {len(studies)} studies, of which {adopted} gave a better policy."
    )


def _tiles(calls: np.ndarray, others: dict[str, np.ndarray], every: int) -> Part:
    third = max(1, len(calls) // 3)
    shown = [tile("Last third", f"{calls[-third:].mean():.1f}", "calls")]
    if every:
        shown.append(tile("Before learning", f"{calls[: LAG * every].mean():.1f}", "calls"))
    for name, other in others.items():
        same = min(len(calls), len(other))
        ratio = calls[:same][-third:].mean() / other[:same][-third:].mean()
        shown.append(tile(f"Against {name}", f"{ratio:.2f}", note="of its calls, last third"))
    return {"kind": "tiles", "span": 12, "tiles": shown}


def _plot(calls: np.ndarray, others: dict[str, np.ndarray], every: int, studies: Sequence[dict[str, Any]]) -> Part:
    series = [_running("this run", calls), *(_running(name, other) for name, other in others.items())]
    better = [study for before, study in zip([{}, *studies], studies, strict=False) if _adopted(before, study)]
    places = [min((int(study["round"]) + LAG) * every + 1, len(calls)) for study in better]
    if places:
        heights = [series[0]["y"][place - 1] for place in places]
        series.append({"name": "a better policy", "mode": "dots", "x": places, "y": heights})
    limits = [{"value": float(calls[: LAG * every].mean()), "label": "mean before learning"}] if every else []
    summary = f"{calls[:WINDOW].mean():.1f} calls at the beginning, {calls[-WINDOW:].mean():.1f} at the end"
    return {
        "kind": "plot", "title": f"Force calls, mean of {WINDOW} structures", "span": 12, "x_label": "structure",
        "y_label": "force calls", "series": series, "limits": limits, "summary": summary,
    }  # fmt: skip


def _adopted(before: dict[str, Any], study: dict[str, Any]) -> bool:
    return int(study["n_adopted"]) > int(before.get("n_adopted", 0))


def _running(name: str, calls: np.ndarray) -> dict[str, Any]:
    sums = np.concatenate([[0.0], np.cumsum(calls)])
    ends = np.arange(1, len(calls) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    means = (sums[ends] - sums[begins]) / (ends - begins)
    return {"name": name, "x": ends.tolist(), "y": means.round(3).tolist()}


def _notes(studies: Sequence[dict[str, Any]]) -> list[Part]:
    judged = [study for study in studies if study.get("verdict")]
    if not judged:
        return []
    last = judged[-1]["verdict"]
    return notes(
        [
            f"The last study: error {last['ratio']:.2f} ({last['low']:.2f}–{last['high']:.2f}) of that of the policy "
            f"in use, on {last['n_apart']} relaxations held out."
        ]
    )


def _facts(settings: dict[str, Any]) -> Part:
    names = {"calculator": "Calculator", "policy": "Policy", "fmax_ev_per_angstrom": "Tolerance (eV/Å)",
             "learn_every": "Structures per study"}  # fmt: skip
    return facts("Settings", [(label, settings.get(name)) for name, label in names.items()])
