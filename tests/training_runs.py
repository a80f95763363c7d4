"""Small runs of every kind, trained for real: what reports and live pages are tested with."""

from __future__ import annotations

import json
from pathlib import Path

from relaxion.train.runs.loop import train
from relaxion.train.tasks.settings import read_settings

ATOMS = {
    "task": "relax", "agent": "td3", "structures": "alloys:Al-Cu-Ni:2-4", "n_pooled": 40, "steps": 96,
    "n_structures": 8, "max_force_calls": 30, "channels": 4, "n_layers": 1, "cutoff_angstrom": 3.5, "batch_size": 8,
    "warmup_steps": 24, "replay_capacity": 400, "updates_per_round": 2, "log_interval_steps": 16,
    "assessment_interval_steps": 32, "assessment_starts": 12, "checkpoint_interval_steps": 32,
}  # fmt: skip
PENDULUM = {
    "task": "Pendulum-v1", "agent": "td3", "seed": 4, "steps": 120, "widths": [8], "batch_size": 8, "warmup_steps": 20,
    "replay_capacity": 200, "assessment_starts": 3, "assessment_interval_steps": 60, "log_interval_steps": 20,
    "checkpoint_interval_steps": 60,
}  # fmt: skip


def train_small(kind: dict[str, object], out: Path, **changes: object) -> Path:
    """The folder of a finished run."""
    train(read_settings({**kind, **changes}), out)
    return out


def without_times(line: str) -> dict[str, float | None]:
    """A record without what differs between two equal runs."""
    return {name: value for name, value in json.loads(line).items() if name not in ("time/time_elapsed", "time/fps")}
