"""Results as frames of extended XYZ that can be told from torn or damaged ones without any reader but this.

A frame is what ASE writes, with our facts and a digest at the end of its second line. ASE, OVITO and others read it.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms

from relaxion.files import decoded

PREFIX = "relaxion_"
DIGEST = re.compile(rb" relaxion_sha256=(d[0-9a-f]{16})\n")
FACT = re.compile(r' relaxion_(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
ENERGY = re.compile(r"(?:^| )energy=(\S+)")
LONGEST_LINE = 1 << 20  # a second line of more bytes is none of ours
MOST_ATOMS = 10_000_000


@dataclass(frozen=True)
class ResultFrame:
    """Where a whole frame lies, and what its second line says."""

    shard: Path
    offset: int
    length: int
    facts: dict[str, Any]

    @property
    def key(self) -> str:
        return str(self.facts["key"])


def written(atoms: Atoms, facts: dict[str, Any]) -> str:
    """The frame of a relaxed structure; facts are plain values."""
    image = atoms.copy()
    image.calc = atoms.calc
    image.info = {name: value for name, value in plain_info(atoms).items() if _fits(name, value)}
    image.info |= {PREFIX + name: value for name, value in facts.items() if value is not None}
    text = io.StringIO()
    ase.io.write(text, image, format="extxyz")
    return sealed(text.getvalue())


def plain_info(atoms: Atoms) -> dict[str, Any]:
    """The words, numbers and truths of `atoms.info`, such as a name of its own; numbers of NumPy as Python's."""
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in atoms.info.items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(name, str) and isinstance(value, bool | int | float | str)
    }


def _fits(name: str, value: Any) -> bool:
    """Into the second line of a frame."""
    return not name.startswith(PREFIX) and len(str(value)) < 1000 and "\n" not in str(value)


def sealed(text: str) -> str:
    """The frame with the digest of itself."""
    first, second, rest = text.split("\n", 2)
    return f"{first}\n{second} {PREFIX}sha256={_digest(first, second, rest)}\n{rest}"


def _digest(first: str, second: str, rest: str) -> str:
    # 64 bits: this guards against accidents, not against people. A letter keeps readers from taking it for a number.
    return "d" + hashlib.sha256(f"{first}\n{second}\n{rest}".encode()).hexdigest()[:16]


def facts_of(second_line: str) -> dict[str, Any]:
    """What the second line of a frame says."""
    facts = {name: _value(text) for name, text in FACT.findall(second_line)}
    if (energy := ENERGY.search(second_line)) is not None:
        facts["energy_ev"] = _value(energy[1])
    return facts


def _value(text: str) -> Any:
    if text in ("T", "F"):
        return text == "T"
    try:
        value = decoded(text)
    except ValueError:
        return text
    return value if isinstance(value, str | bool | int | float | None) else text


def scan(file: Path) -> Iterator[ResultFrame | int]:
    """Every whole frame of a shard; at last the offset where whole frames end (the size, if nothing is torn).

    A frame that is damaged but has the right number of lines is passed over.
    """
    with file.open("rb") as stream:
        offset = 0
        while True:
            lines = _lines(stream)
            if lines is None:
                yield offset
                return
            length = sum(map(len, lines))
            if (facts := _checked(lines)) is not None:
                yield ResultFrame(file, offset, length, facts)
            offset += length


def _lines(stream: io.BufferedReader) -> list[bytes] | None:
    """The lines of the next frame; None at the end, or where what follows is no whole frame."""
    first = stream.readline(32)
    if not first.endswith(b"\n") or not first.strip().isdigit() or int(first) > MOST_ATOMS:
        return None
    lines = [first]
    for _ in range(int(first) + 1):
        line = stream.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):  # torn, or the number of atoms is a lie
            return None
        lines.append(line)
    return lines


def _checked(lines: list[bytes]) -> dict[str, Any] | None:
    found = DIGEST.search(lines[1])
    if found is None or found.end() != len(lines[1]):
        return None
    try:
        first, second = lines[0].decode().rstrip("\n"), lines[1][: found.start()].decode()
        rest = b"".join(lines[2:]).decode()
    except UnicodeDecodeError:
        return None
    facts = facts_of(second)
    return facts if _digest(first, second, rest) == found[1].decode() and "key" in facts else None
