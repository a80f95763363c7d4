"""Structures out of files, one after the other: a file of a million is never held whole."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ase.io
from ase import Atoms

from relaxion.errors import SettingsError
from relaxion.paths import check_file, chosen_numbers, without_slice
from relaxion.train.data.dataset import opened_for_ase, reading_error


@dataclass(frozen=True, eq=False)
class InputPlace:
    """One structure of the input, or why there is none."""

    file: Path
    index: int
    atoms: Atoms | None
    error: str | None = None

    @property
    def label(self) -> str:
        return f"{self.file}#{self.index}"

    def key_of_error(self) -> str:
        """Under which a place that cannot be read is set aside."""
        return "s" + hashlib.sha256(f"{self.label} {self.error}".encode()).hexdigest()[:32]


def check_files(files: Sequence[Path]) -> None:
    """Refuse what is not there before anything is begun."""
    seen: set[Path] = set()
    for file in files:
        check_file(without_slice(file)[0])
        if file.absolute() in seen:
            raise SettingsError(f"{file} is given twice; name each file once")
        seen.add(file.absolute())


def places(file: Path) -> Generator[InputPlace]:
    """Every structure of a file, or those that `file@0:2` means, in order; one that cannot be read says why."""
    file, words = without_slice(file)
    if words is None:
        yield from _all_places(file)
        return
    counted = sum(1 for _ in _all_places(file)) if "-" in words else sys.maxsize  # from the end: how many there are
    chosen, found = chosen_numbers(words, counted), False
    last = max(chosen[0], chosen[-1]) if chosen else -1
    for place in _all_places(file):
        if place.index > last and place.error is None:
            break
        if place.index in chosen or place.error is not None:
            found = True
            yield place
    if not found:
        yield InputPlace(file, 0, None, f"{file}@{words} means no structure: it has fewer structures")


def _all_places(file: Path) -> Generator[InputPlace]:
    """Where a file cannot be read on, a last place says why."""
    index = 0
    try:
        check_file(file)
        with opened_for_ase(file) as (source, form):
            images = ase.io.iread(source, index=":", format=form, do_not_split_by_at_sign=True)
            while (atoms := next(images, None)) is not None:
                atoms.calc = None  # energies that came with it are of no use
                yield InputPlace(file, index, atoms)
                index += 1
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - ASE's readers have no common error: damaged files bring any kind
        yield InputPlace(file, index, None, f"{file} cannot be read from structure {index} on: {reading_error(error)}")
        return
    if index == 0:
        yield InputPlace(file, 0, None, f"{file} holds no structure")
