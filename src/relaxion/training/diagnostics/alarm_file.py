"""alarms.jsonl: a line for every alarm that begins or ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from relaxion.errors import CheckpointError
from relaxion.training.diagnostics.alarms import Event


class AlarmFile:
    """Made with the first alarm; a resume cuts it back to where its checkpoint was written."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no file; it was there before the run: remove it")
        length = self.position()
        if length < position:
            raise CheckpointError(f"{path} has {length} bytes, its checkpoint was written after {position}: it was cut")
        if length > position:
            os.truncate(path, position)

    def write(self, events: Iterable[Event]) -> None:
        """Append, and force to disk: alarms are few."""
        lines = "".join(json.dumps(event.as_record(), ensure_ascii=False) + "\n" for event in events)
        if lines:
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())

    def position(self) -> int:
        """Bytes written: what a checkpoint remembers."""
        return self.path.stat().st_size if self.path.exists() else 0
