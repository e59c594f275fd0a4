"""Entry points of child processes. Imports nothing heavy, because the supervisor imports this module too."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from decentnode.launch.children.messages import Request, Task
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import SUSPENDING, keep_sigterm
from decentnode.launch.files.run_dir import node_dir

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent, the fork server, ends; Linux only. parent: the expected
    parent's process id, if that may be 1."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1 if parent is None else os.getppid() != parent:
            os._exit(1)


def apply_environment(request: Request) -> None:
    """Sets the current folder and environment variables to those that the caller has now. The fork server may have been
    started with earlier ones."""
    if request.folder:
        os.chdir(request.folder)
    for name, value in request.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def protect(forked: bool = False) -> None:
    """Ignores the signals of a terminal, which only the supervisor handles, and makes this process end with the fork
    server, or with the caller if it is `forked` from that.
    """
    caller = multiprocessing.parent_process()
    die_with_parent(caller.pid if forked and caller is not None else None)
    if forked:
        # A fork has none of the caller's threads: an operation on OpenMP's thread pool would wait for them forever
        import torch

        torch.set_num_threads(1)
        # and the caller's output streams may be a notebook's, which need a thread to write
        sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    gc.enable()
    for number in (signal.SIGINT, signal.SIGHUP, *SUSPENDING):
        signal.signal(number, signal.SIG_IGN)


def redirect_output(path: Path) -> None:
    """Redirects what this process and its libraries print to the file `path`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def share_output(run_dir: str, uids: Sequence[int]) -> None:
    """Links the output file of the process's first node into the folders of its other nodes."""
    for uid in uids[1:]:
        with contextlib.suppress(FileExistsError):  # a restarted process finds the links of the one before
            os.symlink(f"../{node_dir(run_dir, uids[0]).name}/stderr.txt", node_dir(run_dir, uid) / "stderr.txt")


def leave(work: Callable[[Pipe], int], connection: Connection) -> None:
    """Calls `work` and ends the process with the exit code that it returns, without waiting for threads that a library
    left behind.

    Before that it waits until the last message is in the pipe, where the supervisor can read it even after this process
    has ended. That may be long if a terminal keeps the supervisor suspended. The wait ends if the supervisor is gone.
    """
    code, channel = 8, Pipe(connection)
    try:
        code = work(channel)
        channel.flush(timeout_seconds=None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare(request: Request, connection: Connection) -> None:
    """Is the entry point of the child that loads the experiment for the supervisor."""
    protect(request.forked)
    apply_environment(request)

    def work(channel: Pipe) -> int:
        from decentnode.launch.supervising.prepare import load_and_send

        return load_and_send(request, channel)

    leave(work, connection)


def node(task: Task, connection: Connection) -> None:
    """Is the entry point of a child that runs nodes."""
    protect(task.request.forked)
    keep_sigterm()
    apply_environment(task.request)
    if task.run_dir is not None:
        redirect_output(node_dir(task.run_dir, task.uids[0]) / "stderr.txt")
        if not task.in_process:
            share_output(task.run_dir, task.uids)

    def work(channel: Pipe) -> int:
        if task.in_process:
            from decentnode.launch.one_process.in_process import run_task
        elif len(task.uids) > 1:
            from decentnode.launch.nodes.several_nodes import run_task
        else:
            from decentnode.launch.nodes.node_process import run_task
        return run_task(task, channel)

    leave(work, connection)
