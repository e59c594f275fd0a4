"""Reports to the other ranks how a script ended, and how many collectives each rank has entered in which process,
through the store of the default process group.

Without these reports ranks only see a closed connection, released memory, or a timeout.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from decentnode import clock
from decentnode.errors import describe_error
from decentnode.system import boot_id, process_start_time

END_KEY = "decentnode/ended"
ENTRY_KEY = "decentnode/come"
MAX_BYTES = 400
STORE_SECONDS = 1.0
"""How long the store may take to answer: its machine may be gone."""
DEATH_SECONDS = 0.2
"""How long a process may take to be gone after the system has closed its connections."""

_rank_0_has_store = False
"""Whether the store is a server in rank 0's process, if this package made the process group."""
_store_allowed = True
"""Whether the store may be used: with missing="regroup" it may be gone, or secured against strangers."""


def allow_store(allowed: bool) -> None:
    """Sets whether errors are reported and looked up from now on."""
    global _store_allowed
    _store_allowed = allowed


def report_end() -> None:
    """Reports the error that this script has just ended with, or that it has ended without one, unless another rank has
    reported before. Blocking for STORE_SECONDS at most. To be called as the interpreter ends."""
    error = getattr(sys, "last_value", None)  # set before an uncaught exception is printed
    if hasattr(sys, "ps1") or not _is_store_usable() or (error is None and not store_outlives_ranks()):
        return
    message = "" if error is None else describe_error(error)
    text = f"{dist.get_rank()} {message}".encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")
    _with_timeout(lambda store: store.compare_set(END_KEY, "", text))


def store_outlives_ranks() -> bool:
    """Returns whether the store belongs to torchrun's agent. A store of rank 0 may be gone when all ranks end, of which
    torch prints a warning."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_reported_end() -> tuple[int, str] | None:
    """Returns the rank whose script ended first, and its error, empty if it had none; None if no end is known. Blocking
    for STORE_SECONDS at most."""
    found = b""
    if _is_store_usable():
        found = _with_timeout(lambda store: store.get(END_KEY) if store.check([END_KEY]) else b"")
    rank, _, text = (found or b"")[:MAX_BYTES].decode(errors="replace").partition(" ")
    if not (rank.isascii() and rank.isdigit()) or int(rank) >= dist.get_world_size():
        return None
    return int(rank), "".join(each if each.isprintable() else "?" for each in text)


def publish_process(store: Any, rank: int) -> None:
    """Publishes the identity of this rank's process before there is a process group. store: of the future group. Raises
    RuntimeError if the store is gone."""
    global _rank_0_has_store
    _rank_0_has_store = not store_outlives_ranks()
    store.set(f"{ENTRY_KEY}/{rank}", _own_entry())


def missing_ranks(store: Any, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Returns (the ranks that have not published their process, those whose process is gone, as far as this host can
    see). Blocking for STORE_SECONDS and DEATH_SECONDS at most. store: as of `publish_process`. size: the number of
    ranks."""
    entries = _with_timeout(lambda given: _read_entries(given, size), store)
    if isinstance(entries, RuntimeError):
        return [], [0] if _rank_0_has_store and rank else []
    return [each for each, entry in enumerate(entries or []) if not entry], _dead_among(entries or [])


_num_entered = 0


def enter_operation() -> None:
    """Publishes that this rank has entered one more collective, and the identity of its process. Blocking for
    STORE_SECONDS at most."""
    global _num_entered
    _num_entered += 1
    if _is_store_usable():
        _with_timeout(lambda store: store.set(f"{ENTRY_KEY}/{dist.get_rank()}", _own_entry()))


def _own_entry() -> str:
    return f"{_num_entered} {os.getpid()} {process_start_time(os.getpid())} {_host()}"


def _host() -> str:
    """Returns a name of this host's process id namespace; "" if the system does not tell."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def lagging_ranks() -> list[int]:
    """Returns the ranks that have not entered the collective that this one entered last; none if that is not known.
    Blocking for STORE_SECONDS at most."""
    return [rank for rank, entry in enumerate(_read_all_entries()) if not entry or int(entry[0]) < _num_entered]


def dead_ranks() -> list[int]:
    """Returns the ranks of this host that have entered a collective or `initialize_dist` before, and whose process is
    gone; also rank 0 of another host if it has the store and the connection to that is closed. Blocking for
    STORE_SECONDS at most, and then for DEATH_SECONDS at most while none is found."""
    if not _is_store_usable():
        return []
    entries = _with_timeout(lambda store: _read_entries(store, dist.get_world_size()))
    if isinstance(entries, RuntimeError):
        return [0] if _rank_0_has_store and dist.get_rank() else []
    return _dead_among(entries or [])


def _dead_among(every: Sequence[Sequence[str]]) -> list[int]:
    """Does the same as `dead_ranks`, from what every rank has published."""
    local_processes = {rank: (int(entry[1]), entry[2]) for rank, entry in enumerate(every)
                       if len(entry) == 4 and entry[2] and entry[3] == _host()}  # fmt: skip
    until = clock.now() + DEATH_SECONDS
    while True:
        found = [rank for rank, (pid, began) in local_processes.items() if process_start_time(pid) != began]
        if found or not local_processes or clock.now() > until:
            return found
        clock.sleep(DEATH_SECONDS / 20)


def _read_all_entries() -> list[list[str]]:
    """Returns what every rank has published in `enter_operation`, by rank; nothing if that is not known. Blocking for
    STORE_SECONDS at most."""
    entries = _with_timeout(lambda store: _read_entries(store, dist.get_world_size())) if _is_store_usable() else None
    return entries if isinstance(entries, list) else []


def _read_entries(store: Any, size: int) -> list[list[str]] | RuntimeError:
    """Returns what each of so many ranks has published; the error if the connection to the store is closed."""
    keys = [f"{ENTRY_KEY}/{rank}" for rank in range(size)]
    try:
        return [store.get(key).decode().split(" ", 3) if store.check([key]) else [] for key in keys]
    except dist.DistNetworkError as error:
        return error


def _is_store_usable() -> bool:
    return _store_allowed and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _with_timeout(work: Callable[[Any], Any], store: Any = None) -> Any:
    """Returns what `work` returns, which is given a store, that of the default process group if None; None if it fails
    or takes longer than STORE_SECONDS."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(work(dist.distributed_c10d._get_default_store() if store is None else store))

    thread = threading.Thread(target=run, name="decentnode-ends", daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return found[0] if found else None
