"""The fork server's own part, which it imports first: it ignores the signals that the supervisor handles, as its end is
that of all nodes, and removes what a killed supervisor left.

Every child holds the pipe by whose end the server learns that nobody needs it any more, so that the server is the last
process of a run. A node could not do it: another node may still make a socket or a publish buffer, and what is made
after its folder is gone bears a name that no later run looks for.
"""

from __future__ import annotations

import atexit
import os

from decentnode import clock
from decentnode.launch.children.signals import ignore
from decentnode.launch.children.sockets import base_folder, remove_stale

WAIT_SECONDS = 5.0
"""Longest wait for the supervisor and the children to be gone. What is left then is removed by the next run."""
POLL_SECONDS = 0.01


def clean_up(server: int, supervisor: int) -> None:
    """Remove the folders of runs that are gone, once `supervisor` and all children of this process have ended. Blocking
    for at most WAIT_SECONDS; does nothing in a process other than `server`."""
    deadline = clock.now() + WAIT_SECONDS
    while os.getpid() == server and clock.now() < deadline:
        # The system gives a process its next parent after it has closed the files of the last: locks are free then.
        if os.getppid() != supervisor and not _children():
            remove_stale(base_folder())
            return
        clock.sleep(POLL_SECONDS)


def _children() -> bool:
    """Reap children that have ended. Returns whether others have not."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


ignore()
atexit.register(clean_up, os.getpid(), os.getppid())
