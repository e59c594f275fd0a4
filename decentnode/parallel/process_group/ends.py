"""Tells the other ranks with which error a script ended, through the store of the default process group.

What they see by themselves is a connection that closed, or memory that was given up.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from decentnode.errors import told

KEY = "decentnode/ended"
MAX_BYTES = 400
STORE_SECONDS = 1.0
"""How long the store may take: the machine that it is on may be gone."""

_in_use = True
"""Whether the store may be used: where ranks come and go, it may be gone, or closed to strangers."""


def use_store(allowed: bool) -> None:
    """From now on errors are told and looked for, or not."""
    global _in_use
    _in_use = allowed


def tell_error() -> None:
    """Tells the other ranks of the error that this script has just ended with, if there is one and it is the first in
    the group. Blocking for STORE_SECONDS at most. To be called as the interpreter ends."""
    error = getattr(sys, "last_value", None)  # set before an uncaught one is printed
    if error is None or hasattr(sys, "ps1") or not _usable():
        return
    text = f"{dist.get_rank()} {told(error)}".encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")
    _within_time(lambda store: store.compare_set(KEY, "", text))


def first_error() -> tuple[int, str] | None:
    """The rank whose script ended with an error first, and that error; None if none is known. Blocking for
    STORE_SECONDS at most."""
    found = _within_time(lambda store: store.get(KEY) if store.check([KEY]) else b"") if _usable() else b""
    rank, _, text = (found or b"")[:MAX_BYTES].decode(errors="replace").partition(" ")
    if not (rank.isascii() and rank.isdigit()) or int(rank) >= dist.get_world_size():
        return None
    return int(rank), "".join(each if each.isprintable() else "?" for each in text)


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
