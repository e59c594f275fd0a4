"""Wakes a thread that polls descriptors."""

from __future__ import annotations

import contextlib
import socket

LONGEST_SLEEP_SECONDS = 1.0
"""After which a waiting thread looks again, whether something woke it or not."""


class Waker:
    """A pair of sockets: a byte comes out of `descriptor` once somebody calls `wake`."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self._awake = False
        """Whether a byte is under way, so that many calls cost one."""
        self.descriptor = self._out.fileno()

    def wake(self) -> None:
        """Any thread; not blocking, also once it is closed."""
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._in.send(b"!")

    def clear(self) -> None:
        """The thread that polls: it is awake."""
        with contextlib.suppress(BlockingIOError):
            self._out.recv(4096)
        self._awake = False

    def close(self) -> None:
        self._in.close()
        self._out.close()
