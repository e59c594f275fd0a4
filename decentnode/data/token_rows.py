"""Texts as rows of tokens in an index, each with a class and a user."""

from __future__ import annotations

import numpy as np

from decentnode.data.cache import Index, Writer
from decentnode.samples import Rows, Samples

BLOCK = 1024
"""Texts that are in memory at once while they are converted."""


class TokenRows:
    """The texts of a split, read from the index; no row is copied before a batch is taken."""

    def __init__(self, index: Index, split: str, padding: int) -> None:
        self._index, self._split, self._padding = index, split, padding
        self._lengths = index[f"{split}_length"].astype(np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths

    def samples(self, indices: np.ndarray) -> Samples:
        rows = Rows(self._index[f"{self._split}_tokens"], self._starts[indices], self._lengths[indices], self._padding)
        return Samples(rows, np.array(self._index[f"{self._split}_y"][indices]), ids=True)


class TokenRowsWriter:
    """The texts of a split on their way into the index, some at a time."""

    def __init__(self, writer: Writer, split: str) -> None:
        self._writer, self._split = writer, split
        self._held: list[tuple[list[int], int, int]] = []
        self.count = 0

    def add(self, tokens: list[int], target: int, user: int) -> None:
        self._held.append((tokens, target, user))
        self.count += 1
        if len(self._held) >= BLOCK:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        tokens, targets, users = zip(*self._held, strict=True)
        self._writer.append(f"{self._split}_tokens", np.array([each for row in tokens for each in row], np.int32))
        self._writer.append(f"{self._split}_length", np.array([len(row) for row in tokens], np.int32))
        self._writer.append(f"{self._split}_y", np.array(targets, np.int64))
        self._writer.append(f"{self._split}_user", np.array(users, np.int64))
        self._held.clear()
