"""Texts in an index as rows of tokens, each with a target and a user, or as windows in which the target of each token
is the next one."""

from __future__ import annotations

import numpy as np

from decentnode.data.cache import Index, Writer
from decentnode.samples import PADDING, Rows, Samples

BLOCK = 1024
"""How many texts are in memory at once during the conversion."""


class TokenRows:
    """The texts of a split, read from the index; a row is copied only when a batch is taken."""

    def __init__(self, index: Index, split: str, padding: int) -> None:
        self._index, self._split, self._padding = index, split, padding
        self._tokens = index[f"{split}_tokens"]  # mapped once: rows of one array object are copied to a device once
        self._lengths = index[f"{split}_length"].astype(np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths

    def samples(self, indices: np.ndarray) -> Samples:
        rows = Rows(self._tokens, self._starts[indices], self._lengths[indices], self._padding)
        return Samples(rows, np.array(self._index[f"{self._split}_y"][indices]), ids=True)


class TokenRowsWriter:
    """Writes the texts of a split to the index, a block at a time."""

    def __init__(self, writer: Writer, split: str) -> None:
        self._writer, self._split = writer, split
        self._pending: list[tuple[list[int], float, int]] = []
        self.count = 0

    def add(self, tokens: list[int], target: float, user: int) -> None:
        self._pending.append((tokens, target, user))
        self.count += 1
        if len(self._pending) >= BLOCK:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        tokens, targets, users = zip(*self._pending, strict=True)
        self._writer.append(f"{self._split}_tokens", np.array([each for row in tokens for each in row], np.int32))
        self._writer.append(f"{self._split}_length", np.array([len(row) for row in tokens], np.int32))
        kind = np.int64 if all(isinstance(target, int) for target in targets) else np.float32
        self._writer.append(f"{self._split}_y", np.array(targets, kind))
        self._writer.append(f"{self._split}_user", np.array(users, np.int64))
        self._pending.clear()


class TokenWindows:
    """Windows of a split's texts, read from the index; a window does not extend beyond its text."""

    def __init__(self, index: Index, split: str) -> None:
        self._tokens = index[f"{split}_tokens"]
        self._starts, self._lengths = (np.array(index[f"{split}_{what}"]) for what in ("start", "length"))

    def samples(self, indices: np.ndarray) -> Samples:
        """Returns windows of tokens [length] with the next token of each; windows at the end of a text are shorter."""
        starts, lengths = self._starts[indices], self._lengths[indices]
        return Samples(Rows(self._tokens, starts, lengths), Rows(self._tokens, starts + 1, lengths, PADDING), ids=True)


class TokenWindowsWriter:
    """Writes the texts of a split to the index, cut into windows of `length` tokens."""

    def __init__(self, writer: Writer, split: str, length: int) -> None:
        self._writer, self._split, self._length = writer, split, length
        self._tokens = self.count = 0

    def add(self, tokens: list[int], user: int) -> None:
        """Adds a text. Texts of fewer than two tokens are left out, because there is no next token to predict."""
        firsts = np.arange(0, len(tokens) - 1, self._length)
        if not len(firsts):
            return
        self._writer.append(f"{self._split}_tokens", np.array(tokens, np.int32))
        self._writer.append(f"{self._split}_start", firsts + self._tokens)
        self._writer.append(f"{self._split}_length", np.minimum(self._length, len(tokens) - 1 - firsts))
        self._writer.append(f"{self._split}_user", np.full(len(firsts), user))
        self._tokens += len(tokens)
        self.count += len(firsts)
