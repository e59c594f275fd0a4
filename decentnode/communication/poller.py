"""Waits for readable file descriptors, at a cost that depends on how many are ready rather than on how many there
are."""

from __future__ import annotations

import math
import select
import sys


class Poller:
    """Polls descriptors for one thread. Other threads may call `register` and `unregister`, but must then wake that
    thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._poll = select.poll() if self._epoll is None else None

    def register(self, descriptor: int) -> None:
        """Also waits for this descriptor to become readable."""
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
        elif self._poll is not None:
            self._poll.register(descriptor, select.POLLIN)

    def unregister(self, descriptor: int) -> None:
        """Undoes `register`. Call it before the descriptor is closed."""
        if self._epoll is not None:
            self._epoll.unregister(descriptor)
        elif self._poll is not None:
            self._poll.unregister(descriptor)

    def poll(self, seconds: float) -> list[int]:
        """Blocks for at most `seconds`, and returns the descriptors that are readable. Rounds up to the next
        millisecond, because a sleep that ends too early only costs another poll."""
        if self._epoll is not None:
            return [found for found, _ in self._epoll.poll(math.ceil(1000 * seconds) / 1000 if seconds > 0 else 0)]
        assert self._poll is not None
        return [found for found, _ in self._poll.poll(math.ceil(1000 * seconds) if seconds > 0 else 0)]

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
