"""Tells the other ranks how a script ended, and to how many operations of all ranks one has come, through the store of
the default process group.

What they see by themselves is a connection that closed, memory that was given up, or that a time is up.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from decentnode.errors import told

KEY = "decentnode/ended"
COME = "decentnode/come"
MAX_BYTES = 400
STORE_SECONDS = 1.0
"""How long the store may take: the machine that it is on may be gone."""

_in_use = True
"""Whether the store may be used: where ranks come and go, it may be gone, or closed to strangers."""


def use_store(allowed: bool) -> None:
    """From now on errors are told and looked for, or not."""
    global _in_use
    _in_use = allowed


def tell_end() -> None:
    """Tells the other ranks of the error that this script has just ended with, or that it has ended without one, if it
    is the first in the group. Blocking for STORE_SECONDS at most. To be called as the interpreter ends."""
    error = getattr(sys, "last_value", None)  # set before an uncaught one is printed
    if hasattr(sys, "ps1") or not _usable() or (error is None and not _outlives_ranks()):
        return
    said = "" if error is None else told(error)
    text = f"{dist.get_rank()} {said}".encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")
    _within_time(lambda store: store.compare_set(KEY, "", text))


def _outlives_ranks() -> bool:
    """Whether the store is an agent's of torchrun: one of rank 0 may be gone when all ranks have come to their end, of
    which torch prints a warning."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_end() -> tuple[int, str] | None:
    """The rank whose script ended first, and its error, empty where it had none; None if no end is known. Blocking for
    STORE_SECONDS at most."""
    found = _within_time(lambda store: store.get(KEY) if store.check([KEY]) else b"") if _usable() else b""
    rank, _, text = (found or b"")[:MAX_BYTES].decode(errors="replace").partition(" ")
    if not (rank.isascii() and rank.isdigit()) or int(rank) >= dist.get_world_size():
        return None
    return int(rank), "".join(each if each.isprintable() else "?" for each in text)


_come = 0


def come() -> None:
    """Tells the other ranks that this one has come to one more operation of all ranks. Blocking for STORE_SECONDS at
    most."""
    global _come
    _come += 1
    if _usable():
        _within_time(lambda store: store.set(f"{COME}/{dist.get_rank()}", str(_come)))


def late() -> list[int]:
    """The ranks that have not come to the operation that this one came to last; none where that is not known. Blocking
    for STORE_SECONDS at most."""
    def behind(store: Any) -> list[int]:
        keys = [f"{COME}/{rank}" for rank in range(dist.get_world_size())]
        return [rank for rank, key in enumerate(keys) if not store.check([key]) or int(store.get(key)) < _come]

    return (_within_time(behind) or []) if _usable() else []


def _usable() -> bool:
    return _in_use and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _within_time(work: Callable[[Any], Any]) -> Any:
    """What `work` returns, which is given the store; None where that fails or takes too long."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(work(dist.distributed_c10d._get_default_store()))

    thread = threading.Thread(target=run, name="decentnode-ends", daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return found[0] if found else None
