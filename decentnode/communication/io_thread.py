"""The one thread that owns a node's ZeroMQ sockets: it moves frames and knows nothing of models.

Two planes with their own sockets, control and bulk. A node listens on one ROUTER per plane and sends on one DEALER
per plane and peer; frames only ever go from a DEALER to a ROUTER.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

logger = logging.getLogger(__name__)

Endpoints = tuple[str, str]
"""Addresses of a node's control and bulk socket, such as ("tcp://10.0.0.7:20000", "tcp://10.0.0.7:20001")."""

CONTROL, BULK = 0, 1
MAX_CONTROL_BYTES = 1 << 20
RECEIVE_BURST = 64
"""Messages taken from one socket before the others are looked at."""
IDLE_SECONDS = 0.25

HEARTBEATS_MS = {CONTROL: (1000, 5000, 5000), BULK: (5000, 30000, 30000)}
"""Interval, time-out and time to live of ZeroMQ's heartbeats on tcp. Bulk is patient: a heartbeat cannot overtake
the chunk being sent, and on a slow link one chunk takes seconds."""


@dataclass
class Link:
    """The sending side towards one peer."""

    uid: int
    endpoints: Endpoints
    sockets: list[zmq.Socket[bytes] | None] = field(default_factory=lambda: [None, None])
    queue: deque[tuple[zmq.Frame, zmq.Frame, int]] = field(default_factory=deque)
    """Bulk messages that may not leave yet: (header, body, cost)."""
    sent: int = 0
    """Cost of the bulk messages sent so far."""
    allowed: int = 0
    """What the peer lets `sent` grow to."""
    blocked: bool = False


class IoThread(threading.Thread):
    """Runs until `close`. Other threads reach it through `call` alone."""

    def __init__(
        self,
        name: str,
        window_bytes: int,
        max_bulk_bytes: int,
        on_control: Callable[[bytes, str], None],
        on_bulk: Callable[[bytes, memoryview | None, str], None],
        on_tick: Callable[[float], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """on_control(header, user id) and on_bulk(header, body, user id) run on this thread, as does on_tick."""
        super().__init__(name=name, daemon=True)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.links: dict[int, Link] = {}
        self._window = window_bytes
        self._on_control, self._on_bulk, self._on_tick, self._on_crash = on_control, on_bulk, on_tick, on_crash
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._awake = threading.Event()
        self._closing = False
        self._linger_ms = 0
        self.poller = zmq.Poller()
        self.listeners = [self._listener(CONTROL, MAX_CONTROL_BYTES), self._listener(BULK, max_bulk_bytes)]

    # -- any thread -------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the I/O thread soon; not blocking."""
        self._calls.append(function)
        if not self._awake.is_set():
            self._awake.set()
            with contextlib.suppress(OSError):
                self._wake_in.send(b"!")

    def close(self, linger_seconds: float) -> None:
        """Stop the thread and release every socket. Sent frames may still leave for `linger_seconds`."""
        self._linger_ms = int(1000 * linger_seconds)
        self._closing = True
        if self.is_alive():
            self.call(lambda: None)
            self.join(linger_seconds + 10)
        else:
            self._release()

    # -- before the thread starts -----------------------------------------------------------------------------

    def _listener(self, plane: int, max_bytes: int) -> zmq.Socket[bytes]:
        listener = self.context.socket(zmq.ROUTER)
        listener.maxmsgsize = max_bytes
        listener.rcvhwm = 1000
        listener.linger = 0
        listener.setsockopt(zmq.BACKLOG, 1024)
        self._keep_alive(listener, plane)
        self.poller.register(listener, zmq.POLLIN)
        return listener

    @staticmethod
    def _keep_alive(socket_: zmq.Socket[bytes], plane: int) -> None:
        interval, timeout, ttl = HEARTBEATS_MS[plane]
        socket_.setsockopt(zmq.HEARTBEAT_IVL, interval)
        socket_.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
        socket_.setsockopt(zmq.HEARTBEAT_TTL, ttl)
        socket_.setsockopt(zmq.HANDSHAKE_IVL, 5000)

    def set_link(self, uid: int, endpoints: Endpoints) -> None:
        self.links[uid] = Link(uid, endpoints, allowed=self._window)

    # -- I/O thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.poller.register(self._wake_out, zmq.POLLIN)
            next_tick = 0.0
            while not self._closing or self._calls:
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + IDLE_SECONDS
                    self._on_tick(now)
                ready = dict(self.poller.poll(int(1000 * IDLE_SECONDS)))
                self._run_calls(self._wake_out.fileno() in ready)
                for plane, listener in enumerate(self.listeners):
                    if listener in ready:
                        self._receive(plane, listener)
                for link in [link for link in self.links.values() if link.blocked]:
                    if link.sockets[BULK] in ready:
                        self._pump(link)
        except BaseException as error:
            logger.exception("the I/O thread failed")
            self._on_crash(error)
        finally:
            self._release()

    def _run_calls(self, woken: bool) -> None:
        if woken:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        self._awake.clear()
        while self._calls:
            self._calls.popleft()()

    def _receive(self, plane: int, listener: zmq.Socket[bytes]) -> None:
        for _ in range(RECEIVE_BURST):
            try:
                frames = listener.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            user = ""
            if plane == CONTROL:
                self._on_control(frames[1].bytes if len(frames) == 2 else b"", user)
            else:
                body = frames[2].buffer if len(frames) == 3 else None
                self._on_bulk(frames[1].bytes if len(frames) > 1 else b"", body, user)

    def _socket(self, link: Link, plane: int) -> zmq.Socket[bytes]:
        found = link.sockets[plane]
        if found is None:
            found = self.context.socket(zmq.DEALER)
            found.sndhwm = 1000
            found.linger = 0
            found.setsockopt(zmq.RECONNECT_IVL, 50)
            found.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            found.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
            found.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._keep_alive(found, plane)
            found.connect(link.endpoints[plane])
            link.sockets[plane] = found
        return found

    def send_control(self, uid: int, header: bytes) -> None:
        """I/O thread only. A control message that finds its queue full is dropped: the peer is long gone."""
        try:
            self._socket(self.links[uid], CONTROL).send(header, zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("control message to node %d dropped: its queue is full", uid)

    def send_bulk(self, uid: int, header: zmq.Frame, body: zmq.Frame, cost: int) -> None:
        """I/O thread only: send now or as soon as the peer's window and the socket allow."""
        link = self.links[uid]
        link.queue.append((header, body, cost))
        if not link.blocked:
            self._pump(link)

    def grant(self, uid: int, allowed: int) -> None:
        """I/O thread only: the peer lets more in."""
        link = self.links[uid]
        if allowed > link.allowed:
            link.allowed = allowed
            if not link.blocked:
                self._pump(link)

    def _pump(self, link: Link) -> None:
        sender = self._socket(link, BULK)
        blocked = False
        while link.queue and link.sent + link.queue[0][2] <= link.allowed:
            header, body, cost = link.queue[0]
            try:
                sender.send(header, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
                sender.send(body, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                blocked = True
                break
            link.queue.popleft()
            link.sent += cost
        if blocked != link.blocked:
            link.blocked = blocked
            if blocked:
                self.poller.register(sender, zmq.POLLOUT)
            else:
                self.poller.unregister(sender)

    def _release(self) -> None:
        sockets = [s for link in self.links.values() for s in link.sockets if s is not None]
        for each in sockets + self.listeners:
            each.close(linger=self._linger_ms)
        self._wake_in.close()
        self._wake_out.close()
        if not self.context.closed:
            self.context.term()
