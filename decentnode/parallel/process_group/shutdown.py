"""Ends exchanges, leaves process groups and joins their threads before a process's interpreter ends.

A thread of gloo still holds the tensors of an operation after it has reported that the operation is finished. To
release a tensor that Python knows, it needs the interpreter's lock. If the interpreter is ending by then, CPython (up
to 3.13) ends the thread at once, by unwinding frames of C++ that must not be unwound: "terminate called without an
active exception", exit code -6, after all work was done. A script that uses torch alone and does not destroy its groups
ends in the same way. Destroying a group joins its threads, which is safe as long as the interpreter is not ending yet.
A group that is still referenced keeps its threads, so wrappers drop their references first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode import clock
from decentnode.parallel.process_group.rank_status import report_end

if dist.is_available():
    # Its functions have the default group at their import as an argument's default, and would reference it to the end.
    # The first optimizer imports it with torch's compiler: here no group has been made yet.
    import torch.distributed.nn.functional

EXIT_SECONDS = 2.0
NAMED_THREADS = "2.8"
"""The first torch which certainly names the threads of gloo, and joins them without the interpreter's lock."""
SETTLE_SECONDS = 0.6
"""How long the threads of groups that the script itself still references get to release their tensors."""
BUSY_SECONDS = 10.0
"""How much longer they get as long as one of them runs or waits for a processor."""
POLL_SECONDS = 0.01


class Closable(Protocol):
    def close(self) -> object: ...


class InFlight(Protocol):
    def finish_all(self, seconds: float) -> None:
        """Waits for pending operations, so many seconds at most. Blocking."""


_processes: set[int] = set()
"""The processes that joined a group or made wrappers. A forked child inherits this module's state, but no threads."""
_wrappers: weakref.WeakKeyDictionary[Closable, frozenset[int]] = weakref.WeakKeyDictionary()
"""Objects to close before the process ends, each with the ids of the parameters that it steps. References to the
parameters would keep a wrapper alive if a script's hook on a parameter refers to the wrapper."""
_kept: list[tuple[InFlight, object]] = []
"""Exchanges in flight whose wrapper is gone: their buffers have to outlive them."""
_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups whose threads are joined without the interpreter's lock."""
_must_free_frames = "torch._dynamo" not in sys.modules
"""Whether torch's compiler was not imported yet when this module was, so that an optimizer may import it later."""


def leave_at_exit() -> None:
    """Makes this process leave all groups of torch.distributed before its interpreter ends. Idempotent."""
    _processes.add(os.getpid())
    join_threads_without_lock()


def close_at_exit(wrapper: Closable, params: Sequence[Tensor] = ()) -> None:
    """Makes this process close `wrapper` before it ends, if it still exists. Its `close` must drop its references to
    process groups. params: those that it steps in backward passes."""
    _wrappers[wrapper] = frozenset(map(id, params))
    leave_at_exit()
    _free_frames_of_import()


def _free_frames_of_import() -> None:
    """Frees what the import of torch's compiler has left behind, once.

    The first optimizer of a process imports the compiler, which raises and catches errors meanwhile. Their tracebacks
    are reference cycles that hold all function calls in progress, with their variables: a wrapper that the script drops
    would not be closed before the next garbage collection, nor other ranks told that this one has ended."""
    global _must_free_frames
    if _must_free_frames and "torch._dynamo" in sys.modules:
        _must_free_frames = False
        gc.collect()


def close_others(wrapper: Closable, params: Iterable[Tensor]) -> bool:
    """Closes the other wrappers of any of these parameters, because two would both step in a backward pass; returns
    whether one of them was open. wrapper: the one that stays open."""
    mine = set(map(id, params))
    others = [each for each, theirs in _wrappers.items() if each is not wrapper and not mine.isdisjoint(theirs)]
    closed = [each.close() for each in others]
    return any(closed)


def mark_closed(wrapper: Closable) -> None:
    """Records that the wrapper is closed and exchanges no parameters any more."""
    if wrapper in _wrappers:
        _wrappers[wrapper] = frozenset()


def exchanged_by_wrapper(params: Iterable[Tensor]) -> bool:
    """Returns whether a wrapper that is still open steps any of these parameters."""
    stepped = [each for each in _wrappers.values() if each]
    return bool(stepped) and any(id(p) in each for p in params for each in stepped)


def keep_until_exit(exchange: InFlight, memory: object) -> None:
    """Keeps memory until the process ends, because operations in flight of the exchange read and write it."""
    _kept.append((exchange, memory))


@atexit.register
def _close_all() -> None:
    if os.getpid() not in _processes:
        return
    report_end()  # before the others see that this rank has left
    for wrapper in reversed(list(_wrappers)):  # reversed, as a wrapper uses the job, which was registered before it
        wrapper.close()
    for exchange, _ in _kept:
        with contextlib.suppress(Exception):
            exchange.finish_all(EXIT_SECONDS)
    _kept.clear()
    leave_groups()


def leave_groups() -> None:
    """Leaves all process groups and joins their threads. Idempotent; blocking until pending operations have ended."""
    if dist.is_available() and dist.is_initialized():
        join_threads_without_lock()
        dist.destroy_process_group()
    gc.collect()  # frees groups that only reference cycles hold
    if _states_of_gloo_threads():
        clock.sleep(SETTLE_SECONDS)
    until = clock.now() + BUSY_SECONDS
    while "R" in _states_of_gloo_threads() and clock.now() < until:
        clock.sleep(POLL_SECONDS)


def new_group(ranks: Sequence[int], timeout: timedelta | None = None) -> Any:
    """Makes a process group of these ranks, on all ranks in the same order. Blocking."""
    group = dist.new_group(list(ranks), timeout=timeout)
    join_threads_without_lock()
    return group


def join_threads_without_lock() -> None:
    """Makes torch before 2.8 join a group's threads without the interpreter's lock when the group is dropped. Is to be
    called for groups that exist, before anything may drop one; idempotent.

    Otherwise a thread that still has to release a tensor waits for the lock, and the process for the thread, for ever.
    These versions destroy a group with the lock, but a backend without it if Python has the last reference to it.
    """
    if torch.__version__ >= NAMED_THREADS or not dist.is_available():
        return
    for group in dist.distributed_c10d._world.pg_map:
        if group not in _groups:
            _groups.add(group)
            backends = [group._get_backend(device) for device in group._device_types]
            weakref.finalize(group, backends.clear).atexit = False


def _states_of_gloo_threads() -> str:
    """Returns a letter for each thread that may be one of gloo, as /proc has it: R runs or waits for a processor. Torch
    before 2.8 names no thread, so that any other one counts."""
    own, found = f"{threading.get_native_id()} (", ""
    files = list(Path("/proc/self/task").glob("*/stat"))
    for each in files:
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            name, _, rest = each.read_text().rpartition(") ")
            if not name.startswith(own) and (torch.__version__ < NAMED_THREADS or "(pt_gloo_run" in name):
                found += rest[0]
    return found if files else "?"
