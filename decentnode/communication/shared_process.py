"""What the nodes of one process have in common, where one thread steps several of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import zmq
from torch import Tensor

from decentnode import clock
from decentnode.communication.poller import Poller
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS, Waker
from decentnode.wire.bounds import Scalars
from decentnode.wire.generation import Name

CLOSE_SECONDS = 2.0
"""How long the last messages of the nodes may take to leave."""


class LocalReceiver(Protocol):
    """Where payloads of other nodes of the same process are put (`same_process.SameProcessPath`)."""

    generation: Name
    """Of members, that it takes payloads of."""

    def take(
        self, key: tuple[int, int], source: int, tensors: Mapping[str, Tensor], scalars: Scalars,
        let_go: Callable[[], None],
    ) -> None:
        """A payload of (round, phase), in memory that nobody writes; let_go is called once it is read."""


class SocketsThread(Protocol):
    """The thread at the sockets of all nodes of a process; the transport's."""

    def close(self) -> None:
        """Blocking for a moment: end it, after the communication of every node was closed."""


class SharedProcess:
    """Several nodes of one machine in this process. All methods are the stepping thread's, unless they say more."""

    def __init__(self, uids: tuple[int, ...]) -> None:
        self.uids = set(uids)
        """The nodes here that have not failed."""
        self.receivers: dict[int, LocalReceiver] = {}
        """By uid, of those whose generation is in force. Threads that open and close generations write it too: one
        entry each, their own."""
        self.idle_seconds = 0.0
        """How long the stepping thread has slept because every node waited for others."""
        self.sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        """Of the sockets of all nodes, so that the process has libzmq's own two threads once."""
        self.sockets.set(zmq.MAX_SOCKETS, self.sockets.get(zmq.SOCKET_LIMIT))
        self.io: SocketsThread | None = None
        """Made with the first node's sockets."""
        self._stepping = 0
        """The stepping thread."""
        self._woken = False
        """Whether that thread itself has found something to look at, which takes no call of the system."""
        self._waker = Waker()
        self._poller = Poller()
        self._poller.register(self._waker.descriptor)
        self._watched: dict[int, Callable[[], None]] = {self._waker.descriptor: self._waker.clear}

    def wake(self) -> None:
        """Any thread: something that a node waits for may have come. Not blocking."""
        if threading.get_ident() == self._stepping:
            self._woken = True
        else:
            self._waker.wake()

    def watch(self, descriptor: int, take_in: Callable[[], None]) -> None:
        """Any thread: from now on `take_in` is called on the stepping thread when there is something to read."""
        self._watched[descriptor] = take_in
        self._poller.register(descriptor)
        self.wake()  # a poll under way does not see it

    def forget(self, descriptor: int) -> None:
        """Any thread: undo `watch`, before the descriptor is closed. Idempotent."""
        if self._watched.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def sleep(self, seconds: float) -> None:
        """Blocking for so long at most, until woken; takes in what neighbors of other processes have announced."""
        started = clock.now()
        self._stepping = threading.get_ident()
        self._take_in(0.0 if self._woken else min(seconds, LONGEST_SLEEP_SECONDS))
        self._woken = False
        self.idle_seconds += clock.now() - started

    def look(self) -> None:
        """Take in what has been announced; not blocking. The queues of announcements are short, and what does not fit
        them takes a longer path."""
        self._take_in(0.0)

    def _take_in(self, seconds: float) -> None:
        for descriptor in self._poller.poll(seconds):
            take_in = self._watched.get(descriptor)
            if take_in is not None:
                take_in()

    def close(self) -> None:
        """After the communication of every node was closed. Blocking until what they sent last has left, for
        CLOSE_SECONDS at most."""
        if self.io is not None:
            self.io.close()
        last = threading.Thread(target=self.sockets.term, name="sockets", daemon=True)
        last.start()
        last.join(CLOSE_SECONDS)
        self._poller.close()
        self._waker.close()
