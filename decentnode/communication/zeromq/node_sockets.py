"""A node's ZeroMQ sockets: how they are made, sent through, received from, renewed and released.

Two planes with their own sockets, control and bulk. A node listens on one ROUTER per plane and sends on one DEALER
per plane and peer; frames only ever go from a DEALER to a ROUTER. One thread at a time is at the sockets: the node's
own (io_thread.py), or that of all nodes of its process (process_io.py).

One file: sockets are made, used, renewed and released by one owner, in this order.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from decentnode import clock
from decentnode.communication.parts import Endpoints
from decentnode.communication.run_state import Doorbell
from decentnode.communication.zeromq import connections
from decentnode.communication.zeromq.credentials import BulkCredential
from decentnode.communication.zeromq.link_state import BULK, CONTROL, Body
from decentnode.communication.zeromq.running_time import RunningTime
from decentnode.communication.zeromq.security import GUEST, Authenticator, Security
from decentnode.communication.zeromq.tcp_progress import acknowledged_bytes
from decentnode.errors import NodeFailed, PeerFault
from decentnode.mapping.hosts import by_ipv6, host_of, resolve_all
from decentnode.wire.generation import Caller
from decentnode.wire.relay import RELAY_MESSAGES, ROUTE, RelayHub

logger = logging.getLogger(__name__)

SEND_MESSAGES = 1000
"""Messages that wait in one socket for a peer, before it is full."""
MAX_CALLS = 10_000
"""Calls that wait for the thread at the sockets; each other thread makes a few per round."""
RECEIVE_BURST = 64
"""Messages taken from one socket before the others are looked at; fewer when the training thread has to be let in or
out."""
LINGER_SECONDS = 0.2
"""How long the last messages (a Bye, acknowledgements) have to get into a connection. All else was acknowledged, so
that no buffer on the way is full; libzmq keeps them for that long where a peer that closed at the same time is gone."""
RELAY_LINGER_SECONDS = 2.0
"""How much longer a relay may stay than itself needs to, for the nodes whose bytes it passes on."""
OWN_LINGER_SECONDS = 0.5
"""How long a relay passes on what it said itself at its end."""
CLOSING_LOOK_SECONDS = 0.02
"""How often a node that closes looks whether it has finished."""
JOIN_SECONDS = 0.1
"""How often whoever closes looks whether the thread at the sockets still has time."""
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)

BROKEN_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _address(frame: zmq.Frame) -> str:
    """Where the connection comes from that a frame came on; "" for one within the host."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def nothing() -> None:
    """What there is to take in from a socket that only sends."""


class Handler(Protocol):
    """Who is told what happens on the sockets; all calls come from the thread at the sockets, which holds `lock`
    meanwhile."""

    lock: threading.RLock

    def received(self, plane: int, frames: Sequence[memoryview], uid: int | None, now: float) -> None:
        """One message, of one frame or more; uid: who it is from, where sockets are authenticated."""

    def knocked(self, plane: int, frames: Sequence[memoryview], caller: Caller, now: float) -> bytes | None:
        """A request of a node that is in no mapping; the answer."""

    def relay_refused(self, fault: PeerFault) -> None:
        """A frame came that no end of a relayed connection sends."""

    def log_in(self, uid: int) -> bytes:
        """A credential for one connection to a peer's bulk socket, where that needs one."""

    def writable(self, uid: int, plane: int) -> None:
        """A socket that refused a message takes messages again."""

    @property
    def next_deadline(self) -> float:
        """When `tick` has to be called at the latest; asked without the lock, too."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def connection_event(self, kind: str, address: str, detail: str) -> None:
        """A stranger was refused, or a connection to this node broke."""

    def handshake_refused(self, uid: int, code: int) -> None:
        """With `lock` held: a peer to which this node connects broke the handshake off. code: ZeroMQ's, or 0."""

    def disconnected(self, uid: int, plane: int) -> None:
        """With `lock` held: a connection to a peer broke that only `renew` can make again."""

    def finished(self) -> bool:
        """Asked while closing: whether nothing is left to send or acknowledge."""

    def goodbye(self) -> None:
        """The last chance to send."""

    def crashed(self, error: BaseException) -> None:
        """The I/O thread ends because of an error."""


class NodeSockets(abc.ABC):
    """The sockets of one node, and the calls of other threads for the thread that is at them."""

    doorbell: Doorbell | None = None
    """Where the training thread may wait; None where it steps several nodes."""
    sleeps_until: float
    """Whoever is at the sockets comes back by then by itself; before, `due_by` has to tell it. Infinite while it finds
    out."""

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
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._owns_context = context is None
        self.endpoints: dict[int, Endpoints] = {}
        """Where every peer listens; `connect_to` sets it."""
        self._by_ipv6: dict[str, bool] = {}
        self.relay: RelayHub | None = None
        """What passes on bytes between others where this node is a relay; set before the start."""
        self._relays_until = math.inf
        self.joining = True
        """Whether it is told of handshakes that peers break off; from the start until the node has joined."""
        self._handler, self._security = handler, security
        self._senders: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._sender_monitors: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._blocked: set[tuple[int, int]] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._left: RunningTime | None = None
        self._noted = math.inf
        """The last that `due_by` woke somebody for, until it is over: what is settled before, as most waits for
        neighbors are, would bring about a wake-up each time otherwise."""
        self._watched: dict[int, Callable[[], None]] = {}
        """By descriptor of a socket: takes in all that is there. ZeroMQ's descriptors tell of news once, and polling
        them alone costs a tenth of what zmq_poll does: nothing may be left behind but what `_behind` says."""
        self._behind: set[int] = set()
        """Listeners (by plane) where messages may be left."""
        self._door: Authenticator | None = None
        if security is not None:
            self._door = Authenticator(
                self.context, security.keyring, {} if credentials is None else credentials, handler.connection_event
            )
            self._look_after(self._door.socket, self._door.answer)
        self.listeners = [self._listener(CONTROL, connections.MAX_CONTROL_BYTES), self._listener(BULK, max_bulk_bytes)]
        self._monitors = [self._monitor(listener) for listener in self.listeners]

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
        """Whether the thread at the sockets has something more urgent to do than to take in the rest of a burst."""
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

    # -- before the start -------------------------------------------------------------------------------------

    def connect_to(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Where peers listen. Blocking while their hosts' names are looked up, for RESOLVE_SECONDS at most.

        libzmq looks every name up again for every connection, but takes an address of one family only: of IPv4 where
        the name has such addresses. A name that is not known yet (its machine may be on its path) is left to IPv6, for
        which libzmq takes an IPv4 address where there is no other.
        """
        self.endpoints.update(endpoints)
        hosts = {host for pair in endpoints.values() for each in pair if (host := host_of(each))}
        self._by_ipv6.update((host, by_ipv6(found)) for host, found in resolve_all(hosts).items())

    def _listener(self, plane: int, max_bytes: int) -> zmq.Socket[bytes]:
        security = self._security
        made = connections.listener(
            self.context, max_bytes, None if security is None else security.keyring,
            plain=security is not None and plane == BULK and security.bulk_needs_credential,
        )  # fmt: skip
        self._look_after(made, lambda: self._receive(plane, made))
        return made

    def _look_after(self, socket_: zmq.Socket[bytes], take_in: Callable[[], None]) -> None:
        descriptor = int(socket_.getsockopt(zmq.FD))
        self._watched[descriptor] = take_in
        self._register(descriptor)

    def _look_no_more(self, socket_: zmq.Socket[bytes]) -> None:
        """Undo `_look_after`, before the socket is closed; nothing happens where it is not looked after."""
        descriptor = int(socket_.getsockopt(zmq.FD))
        if self._watched.pop(descriptor, None) is not None:
            self._unregister(descriptor)

    def _monitor(self, listener: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        monitor: zmq.Socket[bytes] = listener.get_monitor_socket(BROKEN_HANDSHAKES | zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        self._look_after(monitor, lambda: self._hear(monitor))
        return monitor

    # -- the thread at the sockets, or one that sends ---------------------------------------------------------

    def joined(self) -> None:
        """The node has joined, and hears of handshakes no more."""
        self.joining = False

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

    def _catch_up(self) -> bool:
        """Take in messages that were left; whether there were any."""
        left = [plane for plane in self._behind if int(self.listeners[plane].getsockopt(zmq.EVENTS)) & _READABLE]
        self._behind.clear()
        for plane in left:
            self._receive(plane, self.listeners[plane])
        return bool(left)

    def _unblock(self) -> None:
        """Sockets that refused a message are the I/O thread's alone until they take messages again."""
        for uid, plane in list(self._blocked):
            sender = self._senders[uid, plane]
            if int(sender.getsockopt(zmq.FD)) not in self._watched:
                self._look_after(sender, nothing)
            while int(sender.getsockopt(zmq.EVENTS)) & _WRITABLE:
                self._blocked.discard((uid, plane))
                self._handler.writable(uid, plane)
                if (uid, plane) not in self._blocked:
                    self._release_blocked(uid, plane, sender)
                    break

    def _release_blocked(self, uid: int, plane: int, sender: zmq.Socket[bytes]) -> None:
        self._blocked.discard((uid, plane))
        self._look_no_more(sender)

    def _over(self) -> bool:
        if self._left is None or self._calls:
            return False
        with self.lock:
            if not self._handler.finished():
                return self._left.over(clock.now())
        now = clock.now()
        if self.relay is None or not self.relay.busy(self._identity()):
            return True
        if self._relays_until == math.inf:  # those that it relays for have their last words still to say
            self._relays_until = now + RELAY_LINGER_SECONDS
        return now >= self._relays_until or self._left.over(now)

    def _relay_own_last_words(self, hub: RelayHub) -> None:
        """What this node itself said at the end goes through its own relay, too. Blocking for OWN_LINGER_SECONDS at
        most; nothing but frames of relays is taken any more."""
        listener, until = self.listeners[CONTROL], clock.now() + OWN_LINGER_SECONDS
        while hub.serves(self._identity()) and (remaining := until - clock.now()) > 0:
            if not listener.poll(math.ceil(1000 * remaining)):
                return
            with contextlib.suppress(zmq.Again):
                while True:
                    route = listener.recv(_NOW)
                    last = listener.recv(_NOW, copy=False)
                    frames = [last.buffer]
                    while last.more:
                        last = listener.recv(_NOW, copy=False)
                        frames.append(last.buffer)
                    if route.startswith(ROUTE):
                        user = str(last.get("User-Id")).encode() if self._security is not None else b""
                        self._pass_on(CONTROL, listener, route, frames, user)

    def _identity(self) -> bytes:
        return b"%d" % self.uid if self._security is None else self._security.keyring.public[self.uid]

    def _run_calls(self) -> None:
        while self._calls:
            with self.lock:
                self._calls.popleft()()

    def _receive(self, plane: int, listener: zmq.Socket[bytes]) -> None:
        secure = self._security is not None
        recv, received, lock = listener.recv, self._handler.received, self.lock
        for _ in range(RECEIVE_BURST):
            try:
                route = recv(_NOW)  # the sender's routing id, which proves nothing
            except zmq.Again:
                return
            frame = recv(_NOW, copy=False)
            frames = [frame.buffer]  # which keeps the frame
            while frame.more:
                frame = recv(_NOW, copy=False)
                frames.append(frame.buffer)
            user = str(frame.get("User-Id")).encode() if secure else b""
            if route[0] and route.startswith(ROUTE):
                self._pass_on(plane, listener, route, frames, user)
                continue
            if route[0]:  # it chose its own: a newcomer, which waits for an answer
                self._answer(plane, listener, route, frames, user, _address(frame))
                continue
            uid = None
            if secure:
                found = self._uid_of(user)
                if found is None:
                    self._handler.connection_event("stranger", "", "who speaks before it is admitted")
                    continue
                uid = found
            with lock:
                received(plane, frames, uid, clock.now())
            if self._wanted_back():
                break
        self._behind.add(plane)

    def _uid_of(self, user: bytes) -> int | None:
        """Who is at a connection; None where that one has no uid (yet)."""
        if not user.startswith(GUEST):
            return int(user)
        assert self._security is not None
        return self._security.keyring.uid_of.get(user.removeprefix(GUEST))

    def _key_of(self, user: bytes) -> bytes:
        """The public key that a connection has proved; b"" where none is."""
        if self._security is None:
            return b""
        return user.removeprefix(GUEST) if user.startswith(GUEST) else self._security.keyring.public[int(user)]

    def _pass_on(
        self, plane: int, listener: zmq.Socket[bytes], route: bytes, frames: list[memoryview], user: bytes
    ) -> None:
        """A frame of a relayed connection. An end that does not take what is for it is given up, and begins anew."""
        hub = self.relay
        if hub is None or plane != CONTROL or len(frames) != 1:
            return
        try:
            hub.take(route, self._key_of(user), frames[0], clock.now())
        except PeerFault as fault:
            self._handler.relay_refused(fault)
        while hub.outbox:
            to, frame = hub.outbox.pop(0)
            try:
                listener.send_multipart([to, frame.encoded()], zmq.NOBLOCK)
            except zmq.ZMQError:
                hub.lost(to)

    def be_relay(self, hub: RelayHub) -> None:
        """Before the start: pass on bytes between others."""
        self.relay = hub
        self.listeners[CONTROL].sndhwm = RELAY_MESSAGES
        self.listeners[CONTROL].setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _answer(
        self, plane: int, listener: zmq.Socket[bytes], route: bytes, frames: list[memoryview], user: bytes,
        address: str,
    ) -> None:
        """Somebody asks to be admitted: answer on the same connection, or not at all."""
        key = self._key_of(user)
        with self.lock:
            reply = self._handler.knocked(plane, frames, Caller(key.decode(), address), clock.now())
        if reply is not None:
            with contextlib.suppress(zmq.ZMQError):
                listener.send_multipart([route, reply], zmq.NOBLOCK)

    def add_peer(self, uid: int, endpoints: Endpoints) -> None:
        """With `lock` held: a peer listens at these addresses (no names), which may be others than before."""
        self.endpoints[uid] = endpoints
        self._by_ipv6[host_of(endpoints[CONTROL])] = ":" in host_of(endpoints[CONTROL])
        for plane in (CONTROL, BULK):
            self.renew(uid, plane)

    def _hear(self, monitor: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
                at, kind, detail = bytes(event["endpoint"]).decode(errors="replace"), "connection_lost", ""
                if event["event"] != zmq.EVENT_DISCONNECTED:
                    kind, detail = "handshake_failed", connections.WHY_BROKEN.get(int(event["value"]), "")
                self._handler.connection_event(kind, at, detail)

    def _watch_sender(self, uid: int, plane: int, monitor: zmq.Socket[bytes]) -> None:
        """Hear how connections to a peer fare."""
        with self.lock:  # under which alone a monitor is closed
            broken = False
            with contextlib.suppress(zmq.Again):
                while self._sender_monitors.get((uid, plane)) is monitor:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)
                    broken |= bool(event["event"] & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED))
                    if event["event"] & BROKEN_HANDSHAKES:
                        coded = event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                        self._handler.handshake_refused(uid, int(event["value"]) if coded else 0)
            if broken and self._by_credential(plane):
                self._handler.disconnected(uid, plane)

    def _by_credential(self, plane: int) -> bool:
        return plane == BULK and self._security is not None and self._security.bulk_needs_credential

    def send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        """With `lock` held: hand over one message; False when the socket is full, `writable` is then called later."""
        if (uid, plane) in self._blocked:
            return False
        sender = self._senders.get((uid, plane)) or self._connect(uid, plane)
        try:
            if body is None:
                sender.send(first, _NOW)
            else:
                sender.send(first, _MORE)
                sender.send(body, _NOW, copy=False)  # type: ignore[arg-type]  # a Frame, or bytes
        except zmq.Again:
            self._blocked.add((uid, plane))
            if not self._at_sockets():
                self.call(lambda: None)  # the thread at the sockets watches it from now on
            return False
        return True

    def renew(self, uid: int, plane: int) -> None:
        """With `lock` held: give the connection up, with what is under way; the next message makes a new one.

        To close without linger is what makes libzmq abort where half a message was taken: link_state.ONE_FRAME_BYTES.
        """
        sender = self._senders.pop((uid, plane), None)
        if sender is None:
            return
        if (uid, plane) in self._blocked:
            self._release_blocked(uid, plane, sender)
        monitor = self._sender_monitors.pop((uid, plane), None)
        if monitor is not None:
            self._look_no_more(monitor)
            connections.end_monitor(sender, monitor)
        sender.close(linger=0)

    def carried(self, uid: int, plane: int) -> int | None:
        """With `lock` held: as `LinkPort.carried`."""
        return acknowledged_bytes(self.endpoints[uid][plane]) if (uid, plane) in self._senders else None

    def by_ipv6(self, at: str) -> bool:
        """Whether an endpoint is connected to by IPv6."""
        return self._by_ipv6.get(host_of(at), False)

    def _connect(self, uid: int, plane: int) -> zmq.Socket[bytes]:
        at, security = self.endpoints[uid][plane], self._security
        sender = connections.sender(self.context, SEND_MESSAGES, self.by_ipv6(at))
        events = BROKEN_HANDSHAKES if self.joining and plane == CONTROL else 0
        if security is not None and self._by_credential(plane):
            connections.log_in_once(sender, security.keyring, self._handler.log_in(uid))
            events = BROKEN_HANDSHAKES | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        elif security is not None:
            connections.log_in_by_key(sender, security.keyring, uid)
        if events:
            monitor = self._sender_monitors[uid, plane] = sender.get_monitor_socket(events)
            monitor.linger = 0
            self._look_after(monitor, lambda: self._watch_sender(uid, plane, monitor))
        sender.connect(at)
        self._senders[uid, plane] = sender
        return sender

    def _release(self) -> None:
        left = 0.0 if self._left is None else max(0.0, self._left.seconds)
        for which, monitor in self._sender_monitors.items():
            connections.end_monitor(self._senders[which], monitor)
        for each in self._senders.values():
            each.close(linger=int(1000 * min(left, LINGER_SECONDS)))
        if self.relay is not None and left and not self.listeners[CONTROL].closed:
            self._relay_own_last_words(self.relay)
        for listener, monitor in zip(self.listeners, self._monitors, strict=True):
            connections.end_monitor(listener, monitor)
            listener.close(linger=0)
        if self._door is not None:
            self._door.socket.close(linger=0)
        if self._owns_context and not self.context.closed:
            self.context.term()
