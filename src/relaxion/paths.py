"""What a file name says before anything is read: whether it is there, and which of its structures are meant.

Loads neither torch nor ASE, so that a wrong name is told at once.
"""

from __future__ import annotations

import re
from pathlib import Path

from relaxion.errors import FileError

SLICE = re.compile(r"-?\d+|(-?\d+)?:(-?\d+)?(:(-?[1-9]\d*)?)?")  # as ASE has it: 3, -1, 0:2, ::10


def check_file(path: Path) -> None:
    """Refuse, with a sentence, a file that is not there or empty, and what is no file: pipes, devices."""
    try:
        if not path.exists():
            raise FileError(f"{path} does not exist; check the name (the working directory is {Path.cwd()})")
        if not (path.is_file() or path.is_dir()):
            raise FileError(f"{path} is neither a file nor a folder; write the structures to a file first")
        if path.is_file() and path.stat().st_size == 0:
            raise FileError(f"{path} is empty (0 bytes)")
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise FileError(f"{path} cannot be read: {error.strerror}") from error


def without_slice(path: Path) -> tuple[Path, str | None]:
    """The file and the slice of `file@0:2`; a file that has such a name is taken as it is."""
    name, at, words = path.name.rpartition("@")
    if not at or not name or SLICE.fullmatch(words) is None or _exists(path):
        return path, None
    return path.with_name(name), words


def chosen_numbers(words: str, number: int) -> range:
    """Which of `number` structures a slice means, counted from 0; none where there are too few."""
    if ":" not in words:
        place = int(words)
        return range(place % number, place % number + 1) if -number <= place < number else range(0)
    bounds = [int(word) if word else None for word in words.split(":")]
    return range(number)[slice(*bounds)]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False
