"""Tells the other ranks how a script ended, and to how many operations of all ranks one has come in which process,
through the store of the default process group.

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

from decentnode import clock
from decentnode.errors import told
from decentnode.system import boot_id, process_began

KEY = "decentnode/ended"
COME = "decentnode/come"
MAX_BYTES = 400
STORE_SECONDS = 1.0
"""How long the store may take: the machine that it is on may be gone."""
GONE_SECONDS = 0.2
"""How long a process may take to be gone whose connections the system has closed."""

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
    """Tells the other ranks that this one has come to one more operation of all ranks, and what its process is.
    Blocking for STORE_SECONDS at most."""
    global _come
    _come += 1
    if _usable():
        own = f"{_come} {os.getpid()} {process_began(os.getpid())} {_host()}"
        _within_time(lambda store: store.set(f"{COME}/{dist.get_rank()}", own))


def _host() -> str:
    """Names the part of this host in which numbers of processes mean the same; "" where the system does not tell."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def late() -> list[int]:
    """The ranks that have not come to the operation that this one came to last; none where that is not known. Blocking
    for STORE_SECONDS at most."""
    return [rank for rank, said in enumerate(_all_said()) if not said or int(said[0]) < _come]


def gone() -> list[int]:
    """The ranks of this host that have come to an operation of all ranks once, and whose process is gone. Blocking for
    GONE_SECONDS until there is one, and for STORE_SECONDS at most."""
    here = {rank: (int(said[1]), said[2]) for rank, said in enumerate(_all_said())
            if len(said) == 4 and said[2] and said[3] == _host()}  # fmt: skip
    until = clock.now() + GONE_SECONDS
    while True:
        found = [rank for rank, (pid, began) in here.items() if process_began(pid) != began]
        if found or not here or clock.now() > until:
            return found
        clock.sleep(GONE_SECONDS / 20)


def _all_said() -> list[list[str]]:
    """What every rank has told in `come`, by rank; nothing where that is not known. Blocking for STORE_SECONDS at
    most."""
    def read(store: Any) -> list[list[str]]:
        keys = [f"{COME}/{rank}" for rank in range(dist.get_world_size())]
        return [store.get(key).decode().split(" ", 3) if store.check([key]) else [] for key in keys]

    return (_within_time(read) or []) if _usable() else []


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
