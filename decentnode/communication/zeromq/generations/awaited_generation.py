"""The wait of a node for the next generation of members: in the calling thread, or in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from decentnode import logs
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.run_state import Steps
from decentnode.wire.generation import Generation

THREAD_LOOK_SECONDS = 0.01
"""How often `ThreadWait` checks whether its thread has ended: a thread that wakes its waiter is itself still alive."""


class BlockingPendingGeneration(PendingGeneration):
    """Agrees with the other nodes and opens the new paths in the thread that waits."""

    def __init__(self, begin: Callable[[], Generation]) -> None:
        """begin: does what `PendingGeneration.wait` does."""
        self._begin = begin

    def wait(self) -> Generation:
        return self._begin()


class ThreadedPendingGeneration(PendingGeneration):
    """Agrees with the other nodes and opens the new paths in a thread of its own.

    Both block in many places, and the thread that steps this node has other nodes to step.
    """

    def __init__(self, uid: int, begin: Callable[[], Generation], wake: Callable[[], None]) -> None:
        """begin: does what `PendingGeneration.wait` does. wake: wakes the thread that steps this node at the end."""
        self._uid, self._begin, self._wake = uid, begin, wake
        self._found: Generation | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"generation-{uid}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with logs.of_node(self._uid):
                self._found = self._begin()
        except BaseException as error:  # `wait` raises it in the node's own thread
            self._error = error
        finally:
            self._wake()

    def steps(self) -> Steps[Generation]:
        yield ThreadWait(self._thread)
        return self.wait()

    def wait(self) -> Generation:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found


class ThreadWait:
    """The wait for the end of a thread, which has its own deadlines (`run_state.Wait`)."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.deadline = 0.0

    def step(self, now: float) -> bool:
        self.deadline = now + THREAD_LOOK_SECONDS
        return not self._thread.is_alive()
