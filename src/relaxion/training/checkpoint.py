"""Checkpoints and files of agents: files of tensors in the run's own format (`relaxion.files`)."""

from __future__ import annotations

from typing import Any

from relaxion.errors import CheckpointError
from relaxion.files import Format, Stored

FORMAT = Format(version=2, error=CheckpointError)  # 1 left the plain values out of the digest

read, write = FORMAT.read, FORMAT.write


def stored_settings(stored: Stored) -> dict[str, Any]:
    """The flat settings that lie with the weights; none in very old files."""
    settings = stored.values.get("settings", {})
    if not isinstance(settings, dict):
        raise CheckpointError("the settings beside the old weights are no table; take another file")
    return settings
