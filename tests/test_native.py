"""Loops spread over threads, in a process that forks."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from decentnode import native


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_spreads_its_loops_over_threads_of_its_own() -> None:
    """The parent's pool has none in the child: what is handed to it would wait for ever."""
    both = threading.Barrier(2)
    native.spread(lambda _: both.wait(20), [(1,), (2,)], threads=2)  # now both threads are there, and idle
    child = os.fork()
    if child == 0:
        here: list[int] = []
        native.spread(here.append, [(1,), (2,), (3,)], threads=2)
        os._exit(0 if sorted(here) == [1, 2, 3] else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child's loops never ran")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
