"""Starts the fork server: one process imports torch, and every node is forked from it
(docs/explanation/architecture.rst, "Processes").

Measured on two cores for the quickstart's 16 nodes: 2.1 s from the command until all are connected, 36 MB per node.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import types
from collections.abc import Iterator
from multiprocessing import popen_forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.util import Finalize
from typing import Any

from decentnode.launch.children.messages import Request
from decentnode.launch.children.signals import signals_blocked
from decentnode.launch.children.sockets import SocketDir
from decentnode.system import raise_open_files_limit

PRELOAD = ["decentnode.launch.children.server_cleanup", "decentnode.launch.children.preload"]

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
"""No thread pool may exist in the server before a fork; each node sets its own number of threads with torch."""


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for the duration of a block; those that the user has set stay as they are."""
    added = [key for key in values if key not in os.environ]
    os.environ.update({key: values[key] for key in added})
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _use_private_folder() -> None:
    """Puts the server's socket into a folder that is removed even if this process is killed; multiprocessing removes
    its own folder (pymp-...) only at a regular exit. Does nothing if the process already has such a folder.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        folder = SocketDir()
        config["tempdir"] = folder.path
        Finalize(None, folder.remove, exitpriority=-100)  # last, like multiprocessing's own; not in forked processes


COMPILES = "DECENTNODE_PRELOAD_COMPILER"
"""Environment variable that makes the server import torch's compiler, too."""


PRIVATE = "DECENTNODE_PRELOAD_PRIVACY"
"""Environment variable that makes the server import what private training needs, too."""


EXPERIMENT = "DECENTNODE_PRELOAD_EXPERIMENT"
"""Environment variable with the file and the overrides of the experiment, as JSON: the server parses them once, and not
every node for itself."""
MAX_EXPERIMENT = 1 << 16
"""The most characters of EXPERIMENT; Linux takes half as many bytes again."""


def _guessed(request: Request) -> dict[str, str]:
    """Returns the environment variables that tell the server what the request's nodes will need."""
    guesses = {COMPILES: may_compile(request), PRIVATE: may_be_private(request)}
    text = json.dumps([request.config, request.overrides])
    return {name: "1" for name, wanted in guesses.items() if wanted} | (
        {EXPERIMENT: text} if len(text) <= MAX_EXPERIMENT else {}
    )


def may_compile(request: Request) -> bool:
    """Returns whether the request's text looks as if nodes compile their models (`training.compile`). It is a guess,
    because the experiment is not loaded yet; a wrong one only costs the time or the memory of an import."""
    return _may_have(request, "compile")


def may_be_private(request: Request) -> bool:
    """Returns a guess whether the training is private (`training.privacy`), as `may_compile` does."""
    return _may_have(request, "privacy")


def _may_have(request: Request, key: str) -> bool:
    environ = {name: value for name, value in request.environ.items() if key.upper() in name}
    text = repr([request.layers, request.overrides, environ])
    path = request.config
    for _ in range(8):  # the file and the files that it extends
        try:
            with open(path, encoding="utf-8") as file:
                content = file.read(1 << 20)
        except (OSError, ValueError):
            break
        text += "\n" + re.sub(r"#.*", "", content)
        extends = re.search(r"^extends:\s*['\"]?([^'\"\s]+)", content, re.MULTILINE)
        if extends is None:
            break
        path = os.path.join(os.path.dirname(path), extends[1])
    found = re.search(key + r"['\"]?\s*[:=]\s*(?!null|~|None|false|False)['\"\w{]", text, re.IGNORECASE)
    return found is not None


class _Server(ForkServer):
    """A fork server for nodes alone. That of `multiprocessing` serves the processes that the calling script starts: if
    it ran already, nodes would find neither imported modules nor the current environment variables; if it began with
    a run, the script's processes would ignore SIGTERM, without which a pool waits for them forever, and never collect
    garbage."""

    _forkserver_pid: int | None

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(PRELOAD)
        self.environment: dict[str, str] = {}
        """The environment variables at its start."""

    def start(self, request: Request | None) -> None:
        """Does nothing if it runs already. Otherwise as `start`."""
        pid = self._forkserver_pid
        with _environment(MALLOC | THREADS | ({} if request is None else _guessed(request))), signals_blocked():
            self.ensure_running()
        if self._forkserver_pid != pid:
            self.environment = dict(os.environ)


@functools.cache
def _server_of(_process: int) -> _Server:
    """Returns the server of a process. A fork of one with a server has its own: only a parent can see that it runs."""
    return _Server()


def _connect(files: list[int]) -> tuple[int, int]:
    return _server_of(os.getpid()).connect_to_new_process(files)


class _Popen(popen_forkserver.Popen):
    """Starts a process as that of `multiprocessing` does, but asks this module's server."""

    _launch = types.FunctionType(vars(popen_forkserver.Popen)["_launch"].__code__, {
        **vars(popen_forkserver),
        "forkserver": types.SimpleNamespace(connect_to_new_process=_connect, read_signed=read_signed),
    })  # fmt: skip


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


def start(request: Request | None = None) -> ForkServerContext:
    """Starts the server if it does not run yet. Returns at once; the server imports torch while the caller continues.

    The server ends when this process does, and so do its children. request: the experiment that they will run, if
    known.
    """
    raise_open_files_limit()  # the server and its children inherit it
    _use_private_folder()
    resource_tracker.ensure_running()  # before signals are blocked below, because starting it unblocks them
    _server_of(os.getpid()).start(request)
    return _Context()


def changed_variables() -> dict[str, str | None]:
    """Returns the environment variables that changed since the server was started; None for one that was removed."""
    before = _server_of(os.getpid()).environment
    names = {*os.environ, *before} if before else set()
    return {name: os.environ.get(name) for name in sorted(names) if os.environ.get(name) != before.get(name)}
