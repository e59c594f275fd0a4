"""Waits for news at many descriptors, and costs what the news are rather than the descriptors."""

from __future__ import annotations

import math
import select
import sys


class Poller:
    """Of one thread; `register` and `unregister` may be called from others, which then have to wake it."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._poll = select.poll() if self._epoll is None else None

    def register(self, descriptor: int) -> None:
        """Wait for something to read there, too."""
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
        elif self._poll is not None:
            self._poll.register(descriptor, select.POLLIN)

    def unregister(self, descriptor: int) -> None:
        """Undo `register`, before the descriptor is closed."""
        if self._epoll is not None:
            self._epoll.unregister(descriptor)
        elif self._poll is not None:
            self._poll.unregister(descriptor)

    def poll(self, seconds: float) -> list[int]:
        """Blocking for so long at most, up to the next millisecond, as a sleep that ends before what it is for only
        costs another look. Returns the descriptors where there is something to read."""
        if self._epoll is not None:
            return [found for found, _ in self._epoll.poll(math.ceil(1000 * seconds) / 1000 if seconds > 0 else 0)]
        assert self._poll is not None
        return [found for found, _ in self._poll.poll(math.ceil(1000 * seconds) if seconds > 0 else 0)]

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
