"""Memory used again for piece after piece: touching fresh memory takes longer than the arithmetic done in it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


class Scratch:
    """Buffers for the pieces of a long list of pairs; lives as long as one call."""

    def __init__(self, like: Tensor, n_pairs: int, numbers_at_once: int) -> None:
        self.like, self.n_pairs = like, n_pairs
        self.size = 1 + numbers_at_once // like.shape[-1]  # pairs in a piece; a row of `like` is a channel vector
        self.held: dict[str, Tensor] = {}

    def pieces(self) -> Iterator[tuple[slice, int]]:
        """Where each piece lies, and how many pairs it has."""
        for first in range(0, self.n_pairs, self.size):
            count = min(self.size, self.n_pairs - first)
            yield slice(first, first + count), count

    def __call__(self, name: str, count: int, *shape: int) -> Tensor:
        """(count, …), whatever was in it last; two names never share memory."""
        if name not in self.held:
            self.held[name] = self.like.new_empty((self.size, *shape))
        return self.held[name][:count]
