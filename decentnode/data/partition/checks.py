"""Checks that every partition makes before and after dividing the samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from decentnode.errors import DataError


def require_samples(num_samples: int, num_nodes: int) -> None:
    """Raises DataError if there are fewer samples than nodes."""
    if num_nodes < 1:
        raise DataError(f"num_nodes must be at least 1, got {num_nodes}")
    if num_samples < num_nodes:
        raise DataError(
            f"node {num_samples} would get no training sample: {num_samples} samples for {num_nodes} nodes; "
            "use fewer nodes or more data"
        )


def dealt(parts: Sequence[np.ndarray], remedy: str) -> list[np.ndarray]:
    """Returns the parts, each sorted int64. Raises DataError naming the first node without a sample and the remedy."""
    for uid, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(f"node {uid} would get no training sample; {remedy}")
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def checked_parts(parts: Iterable[np.ndarray], name: str, num_nodes: int, num_samples: int) -> list[np.ndarray]:
    """Returns what a partition's `split` returned, each part sorted int64. Raises DataError unless it has an array of
    indices of samples for each node, and none of them is empty."""
    if not isinstance(parts, Iterable):
        raise DataError(f"{name} must return a list of arrays of indices, got {type(parts).__name__}")
    arrays = [np.asarray(part) for part in parts]
    if len(arrays) != num_nodes:
        raise DataError(f"{name} must return one array of indices for each of {num_nodes} nodes, got {len(arrays)}")
    for uid, part in enumerate(arrays):
        if part.size == 0:
            raise DataError(f"{name} gave node {uid} no training sample")
        if part.ndim != 1 or part.dtype.kind not in "iu":
            raise DataError(f"{name} must return lists of integers, got {part.dtype} {part.shape} for node {uid}")
        if part.min() < 0 or part.max() >= num_samples:
            raise DataError(f"{name} must return indices in 0..{num_samples - 1}, got {part.min()}..{part.max()} for "
                            f"node {uid}")  # fmt: skip
    return [np.sort(part.astype(np.int64)) for part in arrays]
