"""Checks that every partition makes before and after dividing the samples."""

from __future__ import annotations

from collections.abc import Sequence

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
