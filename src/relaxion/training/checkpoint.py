"""Checkpoints and files of agents: files of tensors in the run's own format (`relaxion.files`)."""

from __future__ import annotations

from relaxion.errors import CheckpointError
from relaxion.files import Format

FORMAT = Format(version=2, error=CheckpointError)  # 1 left the plain values out of the digest

read, write = FORMAT.read, FORMAT.write
