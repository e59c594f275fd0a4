"""Makes the fork server ignore the signals that the supervisor handles, because all nodes end with the server, and
makes it remove, at its exit, files that a killed supervisor left. The server imports this module first.

Every child holds the pipe whose closing tells the server that it is no longer needed, so that the server is the last
process of a run. A node could not clean up: another node may still create a socket or a publish buffer, and one that is
created after its folder was removed has a name that no later run looks for.
"""

from __future__ import annotations

import atexit
import os

from decentnode import clock
from decentnode.launch.children.signals import ignore_signals
from decentnode.launch.children.sockets import base_folder, remove_stale

WAIT_SECONDS = 5.0
"""Longest wait for the supervisor and the children to end. Files that are left then are removed by the next run."""
POLL_SECONDS = 0.01


def clean_up(server: int, supervisor: int) -> None:
    """Removes the folders of runs that have ended, once `supervisor` and all children of this process have ended.
    Blocking for at most WAIT_SECONDS; does nothing in a process other than `server`."""
    deadline = clock.now() + WAIT_SECONDS
    while os.getpid() == server and clock.now() < deadline:
        # The system closes a dead process's files, which frees its locks, before it gives its children a new parent.
        if os.getppid() != supervisor and not _children():
            remove_stale(base_folder())
            return
        clock.sleep(POLL_SECONDS)


def _children() -> bool:
    """Reaps children that have ended. Returns whether some still run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


ignore_signals()
atexit.register(clean_up, os.getpid(), os.getppid())
