"""The fork server: one process imports torch, and every node is forked from it (docs/explanation/architecture.rst,
"Processes").

Measured on two cores for the quickstart's 16 nodes: 2.1 s from the command until all are connected, 36 MB per node.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.util import Finalize

from decentnode.launch.children.signals import held
from decentnode.launch.children.sockets import SocketDir

PRELOAD = ["decentnode.launch.children.server_end", "decentnode.launch.children.preload"]

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 16),
    "MALLOC_ARENA_MAX": "1",
}
"""glibc maps every block over 32 MiB anew and returns it when freed, so that each large gradient costs page faults
(25,000 for 100 MB). From one heap that is never trimmed the pages are reused: 42 instead of 78 ms for a step of a
multilayer perceptron with 25 M parameters, batch 8, on one core."""

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""No pool of threads may exist in the server before a fork; a node sets its own number with torch."""


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in a block; those that the user has set stay as they are."""
    added = [key for key in values if key not in os.environ]
    os.environ.update({key: values[key] for key in added})
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _take_folder() -> None:
    """Let the server's socket lie in a folder that is removed also when this process is killed: multiprocessing's
    own (pymp-...) is removed by an orderly end alone. Nothing is done where the process has such a folder already.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        folder = SocketDir()
        config["tempdir"] = folder.path
        Finalize(None, folder.remove, exitpriority=-100)  # last, as multiprocessing does; not in forked processes


def start() -> ForkServerContext:
    """Start the server if it does not run yet. Returns at once; the server imports torch while the caller goes on.

    The server ends when this process does, and takes its children along.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    _take_folder()
    resource_tracker.ensure_running()  # to start it unblocks signals
    with _environment(MALLOC | THREADS), held():
        multiprocessing.forkserver.ensure_running()
    if not _taken:
        _taken.update(os.environ)
    return context


_taken: dict[str, str] = {}
"""The environment when the server was started."""


def changed_variables() -> dict[str, str | None]:
    """Returns the environment variables that were changed since the server took them; None for one that is gone."""
    names = {*os.environ, *_taken} if _taken else set()
    return {name: os.environ.get(name) for name in sorted(names) if os.environ.get(name) != _taken.get(name)}
