"""Reads selected rows of an array that can only be read as a stream (gzip, a compressed zip member)."""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np

from decentnode.data.base import checked_indices

CHUNK_BYTES = 4 << 20


def stream_rows(
    stream: BinaryIO, dtype: np.dtype, count: int, row_shape: tuple[int, ...], indices: np.ndarray | None
) -> np.ndarray:
    """Returns the rows at `indices` [M], in that order (all when None), as [M, *row_shape].

    The stream must be at the first of `count` rows. It is read to the array's end in any case, but only the selected
    rows are kept. Raises EOFError if it ends early, and DataError if an index is out of range.
    """
    row_bytes = math.prod(row_shape) * dtype.itemsize
    wanted = np.arange(count) if indices is None else checked_indices(indices, count)
    order = np.argsort(wanted, kind="stable")
    in_order = wanted[order]
    found: list[np.ndarray] = []
    rows = max(1, CHUNK_BYTES // max(row_bytes, 1))
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        chunk = _read_exactly(stream, (stop - start) * row_bytes)
        first, last = np.searchsorted(in_order, (start, stop))
        if last > first:
            block = np.frombuffer(chunk, dtype).reshape(stop - start, *row_shape)
            found.append(block[in_order[first:last] - start])
    if not found:
        return np.empty((0, *row_shape), dtype)
    joined = np.concatenate(found)
    if np.array_equal(order, np.arange(len(order))):
        return joined
    rows_in_wanted_order = np.empty_like(joined)
    rows_in_wanted_order[order] = joined
    return rows_in_wanted_order


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    pieces, missing = [], size
    while missing:
        piece = stream.read(min(missing, CHUNK_BYTES))
        if not piece:
            raise EOFError(f"{missing} bytes missing")
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
