"""What the nodes of one process share if one thread steps several of them."""

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
"""Longest wait for the last messages of the nodes to leave."""


class LocalReceiver(Protocol):
    """Receives payloads from other nodes of the same process (`same_process.SameProcessPath`)."""

    generation: Name
    """The membership generation whose payloads it accepts."""

    def take(
        self, key: tuple[int, int], source: int, tensors: Mapping[str, Tensor], scalars: Scalars,
        release: Callable[[], None],
    ) -> None:
        """Takes a payload of (round, phase), in memory that nobody writes until it calls `release`, once it has read
        the payload."""


class SocketsThread(Protocol):
    """The transport's thread that serves the sockets of all nodes of a process."""

    def close(self) -> None:
        """Ends the thread, after the communication of every node was closed. Blocks briefly."""


class SharedProcess:
    """State shared by several nodes of one machine in this process. The stepping thread calls all methods unless they
    say otherwise."""

    def __init__(self, uids: tuple[int, ...]) -> None:
        self.uids = set(uids)
        """The nodes of this process that have not failed."""
        self.receivers: dict[int, LocalReceiver] = {}
        """By uid: the receivers of nodes whose generation is in force. Threads that open and close generations also
        write it, each only its own entry."""
        self.idle_seconds = 0.0
        """How long the stepping thread has slept because all its nodes waited for others."""
        self.sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        """The ZeroMQ context of the sockets of all nodes, so that the process has libzmq's own two threads only
        once."""
        self.sockets.set(zmq.MAX_SOCKETS, self.sockets.get(zmq.SOCKET_LIMIT))
        self.io: SocketsThread | None = None
        """The thread that serves the sockets; created with the first node's sockets."""
        self._stepping_thread = 0
        """Id of the stepping thread."""
        self._is_woken = False
        """Whether the stepping thread itself called `wake`, which takes no system call."""
        self._waker = Waker()
        self._poller = Poller()
        self._poller.register(self._waker.descriptor)
        self._callbacks: dict[int, Callable[[], None]] = {self._waker.descriptor: self._waker.clear}

    def wake(self) -> None:
        """Any thread: something that a node waits for may have arrived. Does not block."""
        if threading.get_ident() == self._stepping_thread:
            self._is_woken = True
        else:
            self._waker.wake()

    def watch(self, descriptor: int, take_in: Callable[[], None]) -> None:
        """Any thread: from now on the stepping thread calls `take_in` when the descriptor is readable."""
        self._callbacks[descriptor] = take_in
        self._poller.register(descriptor)
        self.wake()  # a poll in progress does not include the new descriptor

    def forget(self, descriptor: int) -> None:
        """Any thread: undoes `watch`. Call it before the descriptor is closed. Idempotent."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def sleep(self, seconds: float) -> None:
        """Blocks for at most `seconds`, until woken. Processes what neighbors in other processes have announced."""
        started = clock.now()
        self._stepping_thread = threading.get_ident()
        self._take_in(0.0 if self._is_woken else min(seconds, LONGEST_SLEEP_SECONDS))
        self._is_woken = False
        self.idle_seconds += clock.now() - started

    def look(self) -> None:
        """Processes pending announcements without blocking. The queues of announcements are short, and what does not
        fit into them takes a slower path."""
        self._take_in(0.0)

    def _take_in(self, seconds: float) -> None:
        for descriptor in self._poller.poll(seconds):
            take_in = self._callbacks.get(descriptor)
            if take_in is not None:
                take_in()

    def close(self) -> None:
        """Closes the sockets, after the communication of every node was closed. Blocks until the last messages have
        left, for CLOSE_SECONDS at most."""
        if self.io is not None:
            self.io.close()
        terminator = threading.Thread(target=self.sockets.term, name="sockets", daemon=True)
        terminator.start()
        terminator.join(CLOSE_SECONDS)
        self._poller.close()
        self._waker.close()
