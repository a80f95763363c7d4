"""Snapshots of optimizers as bytes: JSON, followed by the numbers of the arrays as they are in memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

ARRAY = "array"  # the only key of what stands for an array: its place, kind and shape
PREFIX = 8  # bytes, for the length of the JSON text


def packed(plain: dict[str, Any]) -> bytes:
    """Of dictionaries, lists, numbers, text and arrays; as quick as copying the arrays."""
    numbers = list[bytes]()

    def stand_in(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        place = sum(map(len, numbers))
        numbers.append(value.tobytes())
        return {ARRAY: [place, value.dtype.str, value.shape]}

    text = json.dumps(plain, default=stand_in).encode()
    return b"".join([len(text).to_bytes(PREFIX, "little"), text, *numbers])


def unpacked(content: bytes) -> dict[str, Any]:
    """The opposite; bytes behind the end do not matter."""
    start = PREFIX + int.from_bytes(content[:PREFIX], "little")

    def restored(found: dict[str, Any]) -> Any:
        if found.keys() != {ARRAY}:
            return found
        place, kind, shape = found[ARRAY]
        return np.frombuffer(content, kind, int(np.prod(shape)), start + place).reshape(shape).copy()

    return json.loads(content[PREFIX:start], object_hook=restored)
