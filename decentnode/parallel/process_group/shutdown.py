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
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode import clock
from decentnode.parallel.process_group.rank_status import report_end

EXIT_SECONDS = 2.0
NAMED_THREADS = "2.8"
"""The first torch which certainly names the threads of gloo, and joins them without the interpreter's lock."""
SETTLE_SECONDS = 0.6
"""How long the threads of groups get to release their tensors: of groups that the script itself still references, and
of all groups with torch before 2.8."""


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
_must_free_frames = "torch._dynamo" not in sys.modules


def leave_at_exit() -> None:
    """Makes this process leave all groups of torch.distributed before its interpreter ends. Idempotent."""
    _processes.add(os.getpid())


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
    let_threads_release_tensors()  # a wrapper may hold the last reference to a group that the script has destroyed
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
        let_threads_release_tensors()
        dist.destroy_process_group()
    gc.collect()  # frees groups that only reference cycles hold
    if _has_gloo_threads():
        clock.sleep(SETTLE_SECONDS)


def let_threads_release_tensors() -> None:
    """Is to be called before a group is dropped. Torch before 2.8 joins the group's threads while it holds the
    interpreter's lock, for which a thread waits for ever that still has to release a tensor. Such threads get
    SETTLE_SECONDS, which blocks this thread; with later versions this returns at once."""
    if torch.__version__ < NAMED_THREADS:
        clock.sleep(SETTLE_SECONDS)


def _has_gloo_threads() -> bool:
    """Returns whether the process may still have threads of gloo."""
    if torch.__version__ < NAMED_THREADS:
        return True
    try:
        return any(each.read_text().startswith("pt_gloo_run") for each in Path("/proc/self/task").glob("*/comm"))
    except OSError:  # a thread ended meanwhile, or this is not Linux
        return True
