"""A node's ZeroMQ sockets, and the calls that other threads schedule on the I/O thread.

There are two planes with their own sockets, control and bulk. A node listens on one ROUTER per plane
(listening_sockets.py) and sends on one DEALER per plane and peer (peer_sockets.py). Frames are only sent from a DEALER
to a ROUTER, except for answers to newcomers and relay frames. The I/O thread that polls and reads the sockets is the
node's own (io_thread.py) or that of all nodes of its process (process_io.py).
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Mapping

import zmq

from decentnode import clock
from decentnode.communication.run_state import Doorbell
from decentnode.communication.zeromq.protocol.credentials import BulkCredential
from decentnode.communication.zeromq.protocol.link_state import Body
from decentnode.communication.zeromq.sockets.listening_sockets import ListeningSockets
from decentnode.communication.zeromq.sockets.peer_sockets import PeerSockets
from decentnode.communication.zeromq.sockets.running_time import RunningTime
from decentnode.communication.zeromq.sockets.security import Authenticator, Security
from decentnode.communication.zeromq.sockets.socket_handler import Handler
from decentnode.communication.zeromq.sockets.socket_parts import SocketParts, WatchedSockets
from decentnode.errors import NodeFailed

MAX_CALLS = 10_000
"""Most calls that wait for the I/O thread; each other thread schedules a few per round."""
CLOSING_LOOK_SECONDS = 0.02
"""How often a closing node checks whether it has finished."""
JOIN_SECONDS = 0.1
"""How often a thread that closes the sockets checks whether the I/O thread still has time."""


class NodeSockets(abc.ABC):
    """The sockets of one node, from before they are bound until they are released."""

    doorbell: Doorbell | None = None
    """The doorbell at which the training thread may wait; None if that thread steps several nodes."""
    sleeps_until: float
    """When the I/O thread wakes up by itself at the latest; `due_by` has to wake it for anything earlier. Infinite
    while the thread determines what is due."""
    send: Callable[[int, int, bytes, Body | None], bool]
    """Sends a message, as `PeerSockets.send` does."""

    def __init__(
        self, uid: int, max_bulk_bytes: int, handler: Handler, security: Security | None = None,
        credentials: Mapping[int, BulkCredential] | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """credentials: with which peers log in to the bulk socket if it does not use CURVE; added as peers ask.
        context: a context that outlives these sockets and is shared by the nodes of a process; None: a context of its
        own.
        """
        self.uid = uid
        self.lock = handler.lock
        """Held by a thread that sends on a socket or uses state of the handler."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._handler, self._security = handler, security
        self._calls: deque[Callable[[], None]] = deque()
        self._left: RunningTime | None = None
        self._woken_for = math.inf
        """The last time for which `due_by` woke the I/O thread, until it has passed. Deadlines that are dropped before,
        like most waits for neighbors, would otherwise cause a wake-up each time."""
        self._watched = WatchedSockets(self._register, self._unregister)
        self._authenticator: Authenticator | None = None
        if security is not None:
            self._authenticator = Authenticator(
                self._context, security.keyring, {} if credentials is None else credentials, handler.connection_event
            )
            self._watched.add(self._authenticator.socket, self._authenticator.answer)
        parts = SocketParts(uid, self._context, handler, security, self._watched)
        self.listening = ListeningSockets(parts, max_bulk_bytes, self._has_urgent_work)
        self.peers = PeerSockets(parts, self._watch_blocked)
        self.send = self.peers.send  # bound directly, without a forwarding method: every message passes through it

    # -- implemented with an I/O thread -----------------------------------------------------------------------

    @abc.abstractmethod
    def start(self) -> None:
        """Starts to poll the sockets on the I/O thread; called once."""

    @abc.abstractmethod
    def due_by(self, when: float) -> None:
        """Notes that a call of the handler made something due at `when`. May be called from any thread; not
        blocking."""

    @abc.abstractmethod
    def close(self, linger_seconds: float) -> None:
        """Releases every socket, once the handler has finished or `linger_seconds` are over. Blocks until then."""

    @abc.abstractmethod
    def _register(self, descriptor: int) -> None:
        """Adds a descriptor of `_watched` to those that are polled."""

    @abc.abstractmethod
    def _unregister(self, descriptor: int) -> None:
        """Undoes `_register`."""

    @abc.abstractmethod
    def _wake_io_thread(self) -> None:
        """Wakes the I/O thread to run the scheduled calls. May be called from any thread."""

    @abc.abstractmethod
    def _is_io_thread(self) -> bool:
        """Returns whether the calling thread is the I/O thread."""

    def _has_urgent_work(self) -> bool:
        """Returns whether the I/O thread has something more urgent to do (`ListeningSockets`)."""
        return False

    # -- any thread -------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Schedules `function` on the I/O thread; not blocking. Raises NodeFailed if MAX_CALLS calls wait already."""
        if len(self._calls) >= MAX_CALLS:
            raise NodeFailed(f"node {self.uid}: the sockets' thread is {MAX_CALLS} calls behind")
        self._calls.append(function)
        self._wake_io_thread()

    @property
    def closing(self) -> bool:
        return self._left is not None

    def joined(self) -> None:
        """Notes that the node has joined, so that failed handshakes are not reported any more."""
        self.peers.joining = False

    def _watch_blocked(self) -> None:
        if not self._is_io_thread():
            self.call(lambda: None)  # wakes the I/O thread, which then watches the blocked socket

    # -- the I/O thread ---------------------------------------------------------------------------------------

    def _tick(self, now: float) -> tuple[float, bool]:
        """Does what is due. Returns (the deadline before the call, whether it had passed)."""
        # set before the deadline is read, so that a thread that changes it meanwhile knows that it has to wake this one
        self.sleeps_until = math.inf
        due = min(self._handler.next_deadline, self._woken_for)
        if now < due:
            return due, False
        self._woken_for = math.inf
        with self.lock:
            self._handler.tick(now)
        return due, True

    def _run_calls(self) -> None:
        while self._calls:
            with self.lock:
                self._calls.popleft()()

    def _over(self) -> bool:
        if self._left is None or self._calls:
            return False
        with self.lock:
            if not self._handler.finished():
                return self._left.over(clock.now())
        now, relayed = clock.now(), self.listening.relayed
        return relayed is None or not relayed.is_needed(now) or self._left.over(now)

    def _release(self) -> None:
        left = 0.0 if self._left is None else max(0.0, self._left.seconds)
        self.peers.release(left)
        self.listening.release(left)
        if self._authenticator is not None:
            self._authenticator.socket.close(linger=0)
        if self._owns_context and not self._context.closed:
            self._context.term()
