"""What a process does before its interpreter ends: exchanges over, process groups left, their threads joined.

A thread of gloo still holds the tensors of an operation when it has told everybody that the operation is over. To let
go of a tensor that Python knows it has to have the interpreter's lock. Is the interpreter ending by then, CPython (up
to 3.13) ends the thread there and then, by unwinding frames of C++ that must not be unwound: "terminate called without
an active exception", exit code -6, after all work was done. A script of torch's own functions ends in the same way when
it does not destroy its groups. To destroy a group joins its threads, which is safe as long as the interpreter is not
ending yet; a group to which anybody still has a reference keeps its threads, so wrappers let go of theirs first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from decentnode.parallel.buckets import Bucket
    from decentnode.parallel.exchange import BucketExchange

EXIT_SECONDS = 2.0
SETTLE_SECONDS = 0.3
"""How long threads of groups that the script itself still refers to are given to let go of what they hold."""


class Closable(Protocol):
    def close(self) -> None: ...


_processes: set[int] = set()
"""The process that joined a group or made wrappers: one that it forks inherits all this, but not the threads."""
_alive: weakref.WeakSet[Closable] = weakref.WeakSet()
_left: list[tuple[BucketExchange, list[Bucket]]] = []
"""Exchanges whose wrapper is gone while they were in flight: their buffers have to outlive them."""


def leave_at_exit() -> None:
    """This process leaves all process groups of torch.distributed before its interpreter ends. Idempotent."""
    _processes.add(os.getpid())


def close_at_exit(wrapper: Closable) -> None:
    """`wrapper` is closed before; if it is still there. `close` lets go of process groups."""
    _alive.add(wrapper)
    leave_at_exit()


def keep(exchange: BucketExchange, buckets: list[Bucket]) -> None:
    """Until the process ends: what is in flight reads and writes their buffers."""
    _left.append((exchange, buckets))


@atexit.register
def _close_all() -> None:
    if os.getpid() not in _processes:
        return
    for wrapper in list(_alive):
        wrapper.close()
    for exchange, _ in _left:
        exchange.timeout_seconds = EXIT_SECONDS
        with contextlib.suppress(Exception):
            exchange.drain()
    _left.clear()
    leave()


def leave() -> None:
    """Leave all process groups and join their threads; idempotent. Blocking until operations under way are over."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # groups that only rings of references hold
    if _gloo_runs():
        time.sleep(SETTLE_SECONDS)


def _gloo_runs() -> bool:
    """Whether threads are left that do gloo's collective operations."""
    try:
        return any(each.read_text().startswith("pt_gloo_run") for each in Path("/proc/self/task").glob("*/comm"))
    except OSError:  # a thread that ends meanwhile, or another system than Linux
        return True
