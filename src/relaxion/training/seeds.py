"""Random generators by purpose."""

from __future__ import annotations

import hashlib

from torch import Generator


def named_generator(seed: int, name: str) -> Generator:
    """A generator of its own for every purpose: drawing more for one never changes another."""
    mixed = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(mixed[:8], "little") & (2**63 - 1))
