"""Counts how often the host waits for the GPU, on a pretended GPU and on a real one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MESSAGE = "called a synchronizing CUDA operation"


@contextmanager
def count_waits() -> Iterator[Counter[str]]:
    """Counts the waits inside the block, by the operation that waited. On a real GPU all of them are named "waits", and
    waits for events are not counted."""
    counts: Counter[str] = Counter()
    host_waits: Callable[[], dict[str, int]] | None = getattr(torch.cuda, "host_waits", None)
    if host_waits is not None:
        host_waits()  # drops the waits from before the block
        yield counts
        counts.update(host_waits())
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = sum(MESSAGE in str(warning.message) for warning in caught)
    counts.update({"waits": waits} if waits else {})
