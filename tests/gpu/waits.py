"""How often the host waits for the GPU, on a pretended one and on a real one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MESSAGE = "called a synchronizing CUDA operation"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the waits of the block by what waited. A real GPU calls all of them alike, and says nothing of events."""
    found: Counter[str] = Counter()
    host_waits: Callable[[], dict[str, int]] | None = getattr(torch.cuda, "host_waits", None)
    if host_waits is not None:
        host_waits()
        yield found
        found.update(host_waits())
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    found.update({"waits": n} if (n := sum(MESSAGE in str(each.message) for each in seen)) else {})
