"""A node's ZeroMQ sockets, and the calls of other threads for the thread that is at them.

Two planes with their own sockets, control and bulk. A node listens on one ROUTER per plane (listening_sockets.py) and
sends on one DEALER per plane and peer (peer_sockets.py); frames only ever go from a DEALER to a ROUTER. One thread at
a time is at the sockets: the node's own (io_thread.py), or that of all nodes of its process (process_io.py).
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
"""Calls that wait for the thread at the sockets; each other thread makes a few per round."""
CLOSING_LOOK_SECONDS = 0.02
"""How often a node that closes looks whether it has finished."""
JOIN_SECONDS = 0.1
"""How often whoever closes looks whether the thread at the sockets still has time."""


class NodeSockets(abc.ABC):
    """The sockets of one node, from before they are bound until they are released."""

    doorbell: Doorbell | None = None
    """Where the training thread may wait; None where it steps several nodes."""
    sleeps_until: float
    """Whoever is at the sockets comes back by then by itself; before, `due_by` has to tell it. Infinite while it finds
    out."""
    send: Callable[[int, int, bytes, Body | None], bool]
    """As `PeerSockets.send`."""

    def __init__(
        self, uid: int, max_bulk_bytes: int, handler: Handler, security: Security | None = None,
        credentials: Mapping[int, BulkCredential] | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """credentials: what lets peers into the bulk socket where it does not use CURVE; filled as they ask. context:
        one that outlives these sockets, which nodes of a process share; one of its own when None."""
        self.uid = uid
        self.lock = handler.lock
        """Held by whoever uses a socket for sending, or any state of the handler."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._handler, self._security = handler, security
        self._calls: deque[Callable[[], None]] = deque()
        self._left: RunningTime | None = None
        self._noted = math.inf
        """The last that `due_by` woke somebody for, until it is over: what is settled before, as most waits for
        neighbors are, would bring about a wake-up each time otherwise."""
        self._watched = WatchedSockets(self._register, self._unregister)
        self._door: Authenticator | None = None
        if security is not None:
            self._door = Authenticator(
                self._context, security.keyring, {} if credentials is None else credentials, handler.connection_event
            )
            self._watched.add(self._door.socket, self._door.answer)
        parts = SocketParts(uid, self._context, handler, security, self._watched)
        self.listening = ListeningSockets(parts, max_bulk_bytes, self._wanted_back)
        self.peers = PeerSockets(parts, self._watch_blocked)
        self.send = self.peers.send  # not a method that passes on: every message goes through it

    # -- whoever looks after the sockets ----------------------------------------------------------------------

    @abc.abstractmethod
    def start(self) -> None:
        """From now on a thread is at the sockets. Once."""

    @abc.abstractmethod
    def due_by(self, when: float) -> None:
        """Any thread: a call of the handler has made something due at `when`; not blocking."""

    @abc.abstractmethod
    def close(self, linger_seconds: float) -> None:
        """Blocking: release every socket, once the handler has finished or `linger_seconds` are over."""

    @abc.abstractmethod
    def _register(self, descriptor: int) -> None:
        """Poll a descriptor of `_watched`, too."""

    @abc.abstractmethod
    def _unregister(self, descriptor: int) -> None:
        """Undo `_register`."""

    @abc.abstractmethod
    def _rouse(self) -> None:
        """Any thread: have calls made soon."""

    @abc.abstractmethod
    def _at_sockets(self) -> bool:
        """Whether the calling thread is the one that looks after the sockets."""

    def _wanted_back(self) -> bool:
        """As `ListeningSockets` asks."""
        return False

    # -- any thread -------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` soon on the thread at the sockets; not blocking. Raises NodeFailed when that thread no longer
        comes to it."""
        if len(self._calls) >= MAX_CALLS:
            raise NodeFailed(f"node {self.uid}: the sockets' thread is {MAX_CALLS} calls behind")
        self._calls.append(function)
        self._rouse()

    @property
    def closing(self) -> bool:
        return self._left is not None

    def joined(self) -> None:
        """The node has joined, and hears of handshakes no more."""
        self.peers.joining = False

    def _watch_blocked(self) -> None:
        if not self._at_sockets():
            self.call(lambda: None)  # the thread at the sockets watches it from now on

    # -- the thread at the sockets ----------------------------------------------------------------------------

    def _tick(self, now: float) -> tuple[float, bool]:
        """Do what is due. Returns when something was due next, and whether that was now."""
        # before the deadline is asked for, so that a thread that changes it meanwhile sees that it has to tell this one
        self.sleeps_until = math.inf
        due = min(self._handler.next_deadline, self._noted)
        if now < due:
            return due, False
        self._noted = math.inf
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
        return relayed is None or not relayed.needed(now) or self._left.over(now)

    def _release(self) -> None:
        left = 0.0 if self._left is None else max(0.0, self._left.seconds)
        self.peers.release(left)
        self.listening.release(left)
        if self._door is not None:
            self._door.socket.close(linger=0)
        if self._owns_context and not self._context.closed:
            self._context.term()
