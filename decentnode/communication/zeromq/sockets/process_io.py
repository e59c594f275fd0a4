"""One I/O thread for the sockets of all nodes of a process, whose training one other thread steps.

Messages between two nodes of the process do not pass through sockets: they are put directly into the receiver's queue,
without a connection, a handshake or a login. Everything else that links do is the same, so that a node treats nodes of
its own process and of others alike.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping

from decentnode import clock, logs
from decentnode.communication.poller import Poller
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.waker import Waker
from decentnode.communication.zeromq.protocol.credentials import BulkCredential
from decentnode.communication.zeromq.protocol.link_state import BULK, Body
from decentnode.communication.zeromq.sockets.listening_sockets import RECEIVE_BURST
from decentnode.communication.zeromq.sockets.node_sockets import CLOSING_LOOK_SECONDS, JOIN_SECONDS, NodeSockets
from decentnode.communication.zeromq.sockets.running_time import RunningTime
from decentnode.communication.zeromq.sockets.security import Security
from decentnode.communication.zeromq.sockets.socket_handler import Handler

logger = logging.getLogger(__name__)

LOOK_SECONDS = 4.0
"""Time after which all sockets are read, whether or not their descriptors reported something. It is longer than that of
`IoThread`, because there are many sockets, and reading each takes microseconds."""
CLOSE_SECONDS = 2.0
"""How long the thread may take to end."""
MAX_LOCAL_MESSAGES = 2000
"""Most messages of the process's other nodes that wait for one node: as many as between two sockets."""


class HostedSockets(NodeSockets):
    """The sockets of one of several nodes of a process."""

    def __init__(
        self, process: SharedProcess, uid: int, max_bulk_bytes: int, handler: Handler,
        security: Security | None = None, credentials: Mapping[int, BulkCredential] | None = None,
    ) -> None:
        """Parameters as for `NodeSockets`. With keys each node has its own context, because it needs its own
        authenticator (ZAP), of which libzmq allows one per context."""
        self.loop = ProcessIo.of(process)
        self.started = False
        self.is_queued = False
        """Whether this node is in the loop's queue to be served; used by the loop."""
        self.served_by = math.inf
        """When the loop serves this node next at the latest; used by the loop."""
        self.sleeps_until = math.inf
        self._local_messages: deque[tuple[int, int, list[memoryview]]] = deque()
        """(plane, source, frames) of the messages of the process's other nodes."""
        self._refused: set[tuple[HostedSockets, int]] = set()
        """Nodes (with the plane) whose messages found no room in `_local_messages`."""
        self._released = threading.Event()
        context = process.sockets if security is None else None
        super().__init__(uid, max_bulk_bytes, handler, security, credentials, context)
        self.send = self._send
        self.loop.nodes[uid] = self

    # -- any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.started = True
        for descriptor in list(self._watched.by_descriptor):
            self._register(descriptor)
        self.loop.serve(self)

    def _wake_io_thread(self) -> None:
        self.loop.queue(self)

    def due_by(self, when: float) -> None:
        if when < self.sleeps_until:
            self._woken_for = when
            self.loop.queue(self)

    def close(self, linger_seconds: float) -> None:
        self._left = RunningTime(linger_seconds, clock.now())
        if self.started and self.loop.is_alive():
            self.loop.queue(self)
            left = RunningTime(linger_seconds + 10, clock.now())
            while not self._released.wait(JOIN_SECONDS) and not left.over(clock.now()):
                continue
        elif not self._released.is_set():
            self._release()

    def _send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        peer = self.loop.nodes.get(uid)
        if peer is None:
            return self.peers.send(uid, plane, first, body)
        return peer.receive_local(self, plane, first, body)

    def receive_local(self, source: HostedSockets, plane: int, first: bytes, body: Body | None) -> bool:
        """Queues a message of another node of the process. Called by any thread. Returns False if too many messages
        wait; the `writable` of the source's handler is called once there is room."""
        if len(self._local_messages) >= MAX_LOCAL_MESSAGES:
            self._refused.add((source, plane))
            self.loop.queue(self)
            return False
        # copied, because the sender may overwrite the body's memory once the message is acknowledged, which is before
        # the body is read, and because the body becomes a tensor, which has to be writable
        frames = [memoryview(bytearray(first) if plane == BULK else first)]
        if body is not None:
            frames.append(memoryview(bytearray(body if isinstance(body, bytes) else body.buffer)))
        self._local_messages.append((plane, source.uid, frames))
        self.loop.queue(self)
        return True

    def _register(self, descriptor: int) -> None:
        if self.started:
            self.loop.watch(descriptor, self)

    def _unregister(self, descriptor: int) -> None:
        if self.started:
            self.loop.forget(descriptor)

    def _is_io_thread(self) -> bool:
        return threading.current_thread() is self.loop

    # -- the loop's thread ------------------------------------------------------------------------------------

    def read(self, descriptor: int) -> None:
        """Reads what has arrived at the socket of a descriptor."""
        read_socket = self._watched.by_descriptor.get(descriptor)
        if read_socket is not None:
            read_socket()

    def read_all(self) -> None:
        """Reads all sockets, in case a descriptor did not report that its socket has something to read."""
        for read_socket in list(self._watched.by_descriptor.values()):
            read_socket()

    def serve(self, now: float) -> tuple[float, bool]:
        """Does what is due for this node. Returns (when something is due next, whether more is to be done at once,
        which waits until the other nodes had their turns)."""
        self._deliver_local()
        if self._calls:
            self._run_calls()
        unread = self.listening.unread_planes
        more = bool(unread) and self.listening.read_unread() and bool(unread)
        if self.peers.blocked:
            with self.lock:
                self.peers.unblock()
        due, ticked = self._tick(now)
        if ticked:
            due = self._handler.next_deadline
        return due, more or bool(self._local_messages) or bool(self._calls) or due <= now

    def _deliver_local(self) -> None:
        received, proven = self._handler.received, self._security is not None
        for _ in range(min(len(self._local_messages), RECEIVE_BURST)):
            plane, source, frames = self._local_messages.popleft()
            with self.lock:
                received(plane, frames, source if proven else None, clock.now())
        if self._refused and len(self._local_messages) <= MAX_LOCAL_MESSAGES // 2:
            waiting, self._refused = self._refused, set()
            for source_sockets, plane in waiting:
                source_sockets.has_room(self.uid, plane)

    def has_room(self, uid: int, plane: int) -> None:
        """Notes that another node of the process, which refused a message, accepts messages again."""
        with self.lock:
            self._handler.writable(uid, plane)
        self.loop.queue(self)

    def finish(self) -> bool:
        """Releases the sockets of a closing node if nothing is left to send. Returns whether they are released."""
        if not self._over():
            return False
        with self.lock:
            self._handler.goodbye()
        self.release_sockets()
        return True

    def fail(self, error: BaseException) -> None:
        """Ends this node, but no other node of the process, because of an error."""
        logger.exception("the sockets failed")
        self._handler.crashed(error)
        self.release_sockets()

    def release_sockets(self) -> None:
        """Releases the sockets; the loop no longer polls them."""
        for descriptor in self._watched.by_descriptor:
            self._unregister(descriptor)
        self.started = False
        self._release()

    def _release(self) -> None:
        if self.loop.nodes.get(self.uid) is self:
            del self.loop.nodes[self.uid]
        try:
            super()._release()
        finally:
            self._released.set()


class ProcessIo(threading.Thread):
    """The I/O thread of a process with several nodes. It runs until `close`, which is called after the sockets of every
    node were closed."""

    def __init__(self) -> None:
        super().__init__(name="io", daemon=True)
        self.nodes: dict[int, HostedSockets] = {}
        """uid -> the node's sockets, until they are released."""
        self._waker, self._poller = Waker(), Poller()
        self._watched: dict[int, HostedSockets] = {}
        """Polled descriptor -> the node to which it belongs."""
        self._to_serve: deque[HostedSockets] = deque()
        """Queue of the nodes to serve, each at most once."""
        self._due: list[tuple[float, int, HostedSockets]] = []
        """A heap of (deadline, tie-breaker, node); a node may have further entries that are out of date."""
        self._order = itertools.count()
        self._closing: set[HostedSockets] = set()
        self._next_look = self._next_closing_look = 0.0
        self._starting = threading.Lock()
        self._over = False

    @classmethod
    def of(cls, process: SharedProcess) -> ProcessIo:
        """Returns the I/O thread of a process, created with its first node."""
        if process.io is None:
            process.io = cls()
        assert isinstance(process.io, ProcessIo)
        return process.io

    # -- any thread -------------------------------------------------------------------------------------------

    def serve(self, node: HostedSockets) -> None:
        """Starts to serve a node, and the thread with the first one."""
        with self._starting:
            if self.ident is None:
                self.start()
        self.queue(node)

    def queue(self, node: HostedSockets) -> None:
        """Queues a node to be served soon. May be called from any thread; not blocking."""
        if not node.is_queued:
            node.is_queued = True
            self._to_serve.append(node)
            if threading.get_ident() != self.ident:
                self._waker.wake()

    def watch(self, descriptor: int, node: HostedSockets) -> None:
        """Polls a descriptor, and calls `read` of the node when there is something to read."""
        self._watched[descriptor] = node
        self._poller.register(descriptor)
        self._waker.wake()

    def forget(self, descriptor: int) -> None:
        """Undoes `watch`."""
        if self._watched.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def close(self) -> None:
        """Ends the thread; blocks for up to CLOSE_SECONDS."""
        self._over = True
        self._waker.wake()
        if self.ident is not None:
            self.join(CLOSE_SECONDS)

    # -- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._poller.register(self._waker.descriptor)
        try:
            while not self._over:
                self._step()
        except BaseException as error:
            for node in list(self.nodes.values()):
                node.fail(error)
            raise
        finally:
            self._poller.close()
            self._waker.close()

    def _step(self) -> None:
        """Polls the sockets until the next deadline at the latest, reads what has arrived, and serves queued nodes."""
        now = clock.now()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            for node in list(self.nodes.values()):
                if node.started:
                    self._guarded(node, node.read_all)
                    self.queue(node)
        if self._closing and now >= self._next_closing_look:
            self._next_closing_look = now + CLOSING_LOOK_SECONDS
            for node in self._closing:
                self.queue(node)
        while self._due and self._due[0][0] <= now:
            due, _, node = heapq.heappop(self._due)
            if due == node.served_by:
                node.served_by = math.inf
            self.queue(node)
        for descriptor in self._poller.poll(0.0 if self._to_serve else self._patience(now)):
            watching = self._watched.get(descriptor)
            if watching is not None:
                self._guarded(watching, lambda node=watching, at=descriptor: node.read(at))  # type: ignore[misc]
                self.queue(watching)
            elif descriptor == self._waker.descriptor:
                self._waker.clear()
        for _ in range(len(self._to_serve)):
            self._serve(self._to_serve.popleft())

    def _patience(self, now: float) -> float:
        until = min(self._next_look, self._due[0][0] if self._due else math.inf)
        return max(0.0, (min(until, self._next_closing_look) if self._closing else until) - now)

    def _serve(self, node: HostedSockets) -> None:
        node.is_queued = False  # reset first, so that anything new queues the node again
        if node.started:
            self._guarded(node, lambda: self._serve_started(node))

    def _serve_started(self, node: HostedSockets) -> None:
        due, more = node.serve(clock.now())
        if more:
            self.queue(node)
        if due < node.served_by:
            node.served_by = due
            heapq.heappush(self._due, (due, next(self._order), node))
        node.sleeps_until = node.served_by
        if node.closing:
            self._closing.add(node)
            if node.finish():
                self._closing.discard(node)

    def _guarded(self, node: HostedSockets, work: Callable[[], None]) -> None:
        with logs.of_node(node.uid):
            try:
                work()
            except Exception as error:
                self._closing.discard(node)
                with contextlib.suppress(Exception):
                    node.fail(error)
