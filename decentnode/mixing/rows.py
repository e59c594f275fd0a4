"""The weighted sum for many nodes at once: W x for a sparse W, a row of x per node."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from decentnode import native
from decentnode.mixing import cpu

CACHE_BYTES = 512 << 10
"""So much of x is mixed before the next columns: half of the second cache of the cores of these years."""
DENSE_NODES = 2048
"""Up to so many nodes a dense product is taken where the loop in C is not there."""
_PER_THREAD = 1 << 17


class RowWeights:
    """A matrix W [N, N] of few entries per row."""

    def __init__(self, rows: Sequence[Mapping[int, float]]) -> None:
        """rows: per node the weights of its sources and its own."""
        self.num_nodes = len(rows)
        others = [[(j, w) for j, w in sorted(row.items()) if j != i] for i, row in enumerate(rows)]
        self._own = np.array([row.get(i, 0.0) for i, row in enumerate(rows)], np.float32)
        self._starts = np.cumsum([0, *map(len, others)], dtype=np.uintp)
        self._sources = np.array([j for each in others for j, _ in each], np.uintp)
        self._weights = np.array([w for each in others for _, w in each], np.float32)
        arrays = (self._own, self._starts, self._sources, self._weights)
        self._pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        self._rows = rows
        self._matrices: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def mixed(self, x: Tensor) -> Tensor:
        """Returns W x as a new tensor. x: [N, E], contiguous, floating.

        On a CPU with a C compiler, each entry is added up as `mix_into` does it for one node: own part first, then the
        sources in ascending order, with the same bits.
        """
        if x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and cpu.library() is not None:
            out = torch.empty_like(x)
            self._loop(out, x)
            return out
        return self._matrix(x) @ x

    def _loop(self, out: Tensor, x: Tensor) -> None:
        library, (rows, width) = cpu.library(), x.shape
        assert library is not None
        tile = max(64, CACHE_BYTES // (4 * max(1, rows)) // 16 * 16)
        to, of = out.data_ptr(), x.data_ptr()

        def call(start: int, stop: int) -> None:
            library.weighted_rows(rows, width, start, stop, tile, to, of, *self._pointers)

        threads = min(native.threads(), rows * width // _PER_THREAD, width // 64)
        if threads < 2:
            call(0, width)
        else:
            shares = native.shares(width, threads)
            native.spread(call, shares, len(shares))

    def _matrix(self, x: Tensor) -> Tensor:
        key = x.device, x.dtype
        if key not in self._matrices:
            at = torch.tensor([(i, j) for i, row in enumerate(self._rows) for j in row]).T
            values = torch.tensor([w for row in self._rows for w in row.values()], dtype=x.dtype)
            shape = (self.num_nodes, self.num_nodes)
            if self.num_nodes <= DENSE_NODES:
                found = torch.zeros(shape, dtype=x.dtype).index_put_((at[0], at[1]), values)
            else:
                found = torch.sparse_coo_tensor(at, values, shape, check_invariants=True).coalesce()
            self._matrices[key] = found.to(x.device)
        return self._matrices[key]
