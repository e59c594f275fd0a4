"""How a node waits for the next generation of members: in the thread that asks, or in one of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from decentnode import logs
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.run_state import Steps
from decentnode.wire.generation import Generation

THREAD_LOOK_SECONDS = 0.01
"""How often a thread is looked after that said that it is about to end, as it still lives while it says so."""


class NextGeneration(PendingGeneration):
    """Agrees with the others and opens paths on the thread that waits."""

    def __init__(self, begin: Callable[[], Generation]) -> None:
        """begin: as `PendingGeneration.wait`."""
        self._begin = begin

    def wait(self) -> Generation:
        return self._begin()


class NextGenerationApart(PendingGeneration):
    """The same in a thread of its own: to agree with the others, and to open paths, blocks in many places, and the
    thread that steps this node has others to step."""

    def __init__(self, uid: int, begin: Callable[[], Generation], wake: Callable[[], None]) -> None:
        """begin: as `PendingGeneration.wait`. wake: tells the thread that steps this node that its wait is over."""
        self._uid, self._begin, self._wake = uid, begin, wake
        self._found: Generation | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"generation-{uid}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with logs.of_node(self._uid):
                self._found = self._begin()
        except BaseException as error:  # whatever it is, the node has to hear of it
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
    """The wait for the end of a thread that has deadlines of its own (`run_state.Wait`)."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.deadline = 0.0

    def step(self, now: float) -> bool:
        self.deadline = now + THREAD_LOOK_SECONDS
        return not self._thread.is_alive()
