"""Wakes a thread that polls descriptors."""

from __future__ import annotations

import contextlib
import socket

LONGEST_SLEEP_SECONDS = 1.0
"""Time after which a waiting thread checks again, whether or not something woke it."""


class Waker:
    """A pair of sockets: `descriptor` becomes readable once some thread calls `wake`."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self._is_signaled = False
        """Whether a byte is in flight, so that many calls write only one."""
        self.descriptor = self._out.fileno()

    def wake(self) -> None:
        """Any thread: makes `descriptor` readable. Does not block, also after `close`."""
        if not self._is_signaled:
            self._is_signaled = True
            with contextlib.suppress(OSError):
                self._in.send(b"!")

    def clear(self) -> None:
        """Called by the polling thread when it is awake: makes `descriptor` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            self._out.recv(4096)
        self._is_signaled = False

    def close(self) -> None:
        self._in.close()
        self._out.close()
