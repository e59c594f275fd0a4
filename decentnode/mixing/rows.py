"""The weighted sum for many nodes at once: W x for a sparse W and one row of x per node."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decentnode import native
from decentnode.mixing import cpu
from decentnode.tensors import moved

CACHE_BYTES = 512 << 10
"""Bytes of x that are mixed before the next columns: half of the second-level cache of a current core."""
DENSE_NODES = 2048
"""Up to this many nodes, a dense product is used if the loop in C is not available."""
_ELEMENTS_PER_THREAD = 1 << 17


class RowWeights:
    """A sparse matrix W [N, N] of mixing weights."""

    def __init__(self, rows: Sequence[Mapping[int, float]]) -> None:
        """rows: for each node, the weights of its sources and its own."""
        others = [[(j, w) for j, w in sorted(row.items()) if j != i] for i, row in enumerate(rows)]
        self._set_entries(
            np.array([row.get(i, 0.0) for i, row in enumerate(rows)]), np.cumsum([0, *map(len, others)]),
            np.array([j for each in others for j, _ in each], np.int64),
            np.array([w for each in others for _, w in each], np.float64),
        )  # fmt: skip

    @classmethod
    def of_entries(cls, starts: np.ndarray, sources: np.ndarray, weights: np.ndarray) -> Self:
        """Constructs the matrix from the concatenated rows: row i begins at starts[i], with sources in ascending order,
        the node itself among them. starts: [N] int64. sources: [entries] int64. weights: [entries] float64."""
        made = cls.__new__(cls)
        rows = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(sources)))
        itself = rows == sources
        own, counts = np.zeros(len(starts)), np.bincount(rows[~itself], minlength=len(starts))
        own[rows[itself]] = weights[itself]
        made._set_entries(own, np.concatenate([[0], np.cumsum(counts)]), sources[~itself], weights[~itself])
        return made

    def _set_entries(self, own: np.ndarray, starts: np.ndarray, sources: np.ndarray, weights: np.ndarray) -> None:
        """own: [N]. starts: [N + 1]. sources, weights: [entries], without the node itself."""
        self.num_nodes = len(own)
        self._exact_weights = own, weights
        self._own, self._weights = own.astype(np.float32), weights.astype(np.float32)
        self._starts, self._sources = starts.astype(np.uintp), sources.astype(np.uintp)
        arrays = (self._own, self._starts, self._sources, self._weights)
        self._pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        self._matrices: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def mixed(self, x: Tensor) -> Tensor:
        """Returns W x as a new tensor. x: [N, E], contiguous, floating.

        On a CPU with a C compiler, every element is added up as `mix_into` does for one node, with the same bits: the
        node's own part first, then its sources in ascending order.
        """
        if x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and cpu.library() is not None:
            out = torch.empty_like(x)
            self._mix_in_c(out, x)
            return out
        return self._matrix_for(x) @ x

    def _mix_in_c(self, out: Tensor, x: Tensor) -> None:
        library, (rows, width) = cpu.library(), x.shape
        assert library is not None
        tile = max(64, CACHE_BYTES // (4 * max(1, rows)) // 16 * 16)
        out_address, x_address = out.data_ptr(), x.data_ptr()

        def mix_columns(start: int, stop: int) -> None:
            library.weighted_rows(rows, width, start, stop, tile, out_address, x_address, *self._pointers)

        threads = min(native.threads(), rows * width // _ELEMENTS_PER_THREAD, width // 64)
        if threads < 2:
            mix_columns(0, width)
        else:
            shares = native.shares(width, threads)
            native.spread(mix_columns, shares, len(shares))

    def _matrix_for(self, x: Tensor) -> Tensor:
        key = x.device, x.dtype
        if key not in self._matrices:
            nodes, starts = np.arange(self.num_nodes), self._starts.astype(np.int64)
            rows = np.concatenate([nodes, np.repeat(nodes, starts[1:] - starts[:-1])])
            at = torch.from_numpy(np.stack([rows, np.concatenate([nodes, self._sources.astype(np.int64)])]))
            values = torch.from_numpy(np.concatenate(self._exact_weights)).to(x.dtype)
            shape = (self.num_nodes, self.num_nodes)
            if self.num_nodes <= DENSE_NODES:
                found = torch.zeros(shape, dtype=x.dtype).index_put_((at[0], at[1]), values)
            else:
                found = torch.sparse_coo_tensor(at, values, shape, check_invariants=True).coalesce()
            self._matrices[key] = found.to(x.device) if found.is_sparse else moved(found, x.device)
        return self._matrices[key]
