"""The page of a folder of `relax-many`: force calls of every structure over the run, and where policies got better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaxion.errors import CheckpointError, FileError
from relaxion.files import json_of
from relaxion.scaling.relax_many.folder import read_manifest
from relaxion.scaling.relax_many.learning import FOLDER, LAG, read_study
from relaxion.scaling.relax_many.summary import read_force_calls
from relaxion.web.page import Page, Part, facts, notes, tile

WINDOW = 20  # structures of the running mean


def many_page(folder: Path, against: Sequence[Path] = ()) -> Page:
    """`against`: other folders for the same input, with another policy, say, or what `relaxion bench` says of it."""
    shown = ManyFolder(folder, against)
    shown.poll(0.0)
    if not len(shown.calls):
        raise FileError(f"{folder} has no result yet; wait for the first")
    return shown.page()


class ManyFolder:
    """One folder, growing or done, as the live page follows it."""

    def __init__(self, folder: Path, against: Sequence[Path] = ()) -> None:
        self.folder, self.against = folder, against
        self.settings = read_manifest(folder)["settings"]
        self.every = int(self.settings.get("learn_every", 0))
        self.calls, self.studies = np.zeros(0), list[dict[str, Any]]()
        self.others: dict[str, np.ndarray] = {}
        self._seen: list[tuple[str, int]] = []

    def poll(self, seconds: float) -> bool:
        """All of it anew where any file has grown, however long that takes."""
        del seconds
        files = sorted(file for path in (self.folder, *self.against) for file in _grow(path))
        seen = [(str(file), file.stat().st_size) for file in files]
        if seen == self._seen:
            return False
        self._seen = seen
        self.calls = np.array(read_force_calls(self.folder), dtype=float)
        self.others = {name: calls for path in self.against for name, calls in _calls_of(path).items()}
        self.studies = studies_of(self.folder) if self.every else []
        return True

    def heading(self) -> dict[str, Any]:
        title = f"{self.folder.absolute().name}: {len(self.calls)} structures"
        lead = _lead(self.calls, self.every, self.studies) if len(self.calls) else "Waiting for the first result."
        return {"title": title, "eyebrow": "relax-many", "lead": lead}

    def parts(self) -> list[Part]:
        found: list[Part] = []
        if len(self.calls):
            found = [_tiles(self.calls, self.others, self.every)]
            found += [_plot(self.calls, self.others, self.every, self.studies), *_notes(self.studies)]
        return [{**part, "id": part["kind"]} for part in (*found, _facts(self.settings))]

    def page(self) -> Page:
        return Page(**self.heading(), parts=self.parts())


def _grow(path: Path) -> list[Path]:
    """The files of a result that grow."""
    return [path] if path.is_file() else [*path.glob("shards/*"), *path.glob(f"{FOLDER}/*.safetensors")]


def _calls_of(path: Path) -> dict[str, np.ndarray]:
    """Of another folder, or of each optimizer of a benchmark on the same structures, by what to call it."""
    if path.is_dir():
        return {path.name: np.array(read_force_calls(path), dtype=float)}
    try:
        told = json_of(path)
        own = {told["ours"]: " and ".join(told["policies_used"])}
        return {own.get(name) or name: np.array(calls, dtype=float) for name, calls in told["force_calls"].items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} is neither a folder of 'relax-many' nor a JSON file of 'relaxion bench'") from error


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
