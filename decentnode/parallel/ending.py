"""What a process has to let go of before it ends: hooks, and exchanges in flight."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import weakref
from typing import Protocol

from decentnode.parallel.buckets import Bucket
from decentnode.parallel.exchange import Exchange
from decentnode.parallel.start import leave

EXIT_SECONDS = 2.0


class Closable(Protocol):
    def close(self) -> None: ...


_processes: set[int] = set()
"""The process that made wrappers. One that it forks inherits them, and what is below, but not their threads."""
_alive: weakref.WeakSet[Closable] = weakref.WeakSet()
_left: list[tuple[Exchange, list[Bucket]]] = []
"""Exchanges whose wrapper is gone while they were in flight: their buffers have to outlive them."""


def close_at_exit(wrapper: Closable) -> None:
    """Hooks that are still there when the interpreter ends, together with gloo's threads, abort the process."""
    _alive.add(wrapper)
    _processes.add(os.getpid())


def keep(exchange: Exchange, buckets: list[Bucket]) -> None:
    """Until the process ends: what is in flight reads and writes their buffers."""
    _left.append((exchange, buckets))


@atexit.register
def _close_all() -> None:
    if os.getpid() not in _processes:
        return
    wrappers = list(_alive)
    for wrapper in wrappers:
        wrapper.close()
    if wrappers or _left:
        for exchange, _ in _left:
            exchange.timeout_seconds = EXIT_SECONDS
            with contextlib.suppress(Exception):
                exchange.drain()
        _left.clear()
        gc.collect()
        leave()
