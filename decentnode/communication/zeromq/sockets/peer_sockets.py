"""The sockets on which a node sends, one for each peer and plane: connecting, sending, renewing and closing them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from decentnode.communication.parts import Endpoints
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL, Body
from decentnode.communication.zeromq.sockets import connections
from decentnode.communication.zeromq.sockets.socket_parts import BROKEN_HANDSHAKES, MORE, NOW, WRITABLE, SocketParts
from decentnode.communication.zeromq.sockets.tcp_progress import acknowledged_bytes
from decentnode.mapping.hosts import by_ipv6, host_of, only_first_tried, resolve_all

SEND_MESSAGES = 1000
"""Most messages that wait in the socket to one peer."""
LINGER_SECONDS = 0.2
"""How long the last messages (a Bye, acknowledgements) have to be sent. A short time is enough, because all others were
acknowledged, so that no buffer on the way is full. libzmq waits for the whole time if the peer has closed as well."""


def read_nothing() -> None:
    """Reads nothing: the `take_in` of a socket that only sends."""


class PeerSockets:
    """The sending sockets of one node; each is created for the first message to its peer.

    Used by the I/O thread and by threads that send, with `Handler.lock` held, except for `connect_to` before the start.
    """

    def __init__(self, parts: SocketParts, watch_blocked: Callable[[], None]) -> None:
        """watch_blocked: called when a socket refused a message; makes the I/O thread call `unblock`."""
        self.endpoints: dict[int, Endpoints] = {}
        """uid -> where the peer listens; `connect_to` sets it."""
        self.joining = True
        """Whether failed handshakes are reported to the handler: until the node has joined."""
        self.blocked: set[tuple[int, int]] = set()
        """(uid, plane) of sockets that refused a message and that the I/O thread watches."""
        self.senders: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._monitors: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._addresses: dict[str, list[str]] = {}
        """host -> its addresses, as they were found by `connect_to`."""
        self._parts, self._handler, self._watch_blocked = parts, parts.handler, watch_blocked

    def connect_to(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Sets where peers listen. Blocks for up to RESOLVE_SECONDS while their host names are looked up.

        libzmq looks every name up again for every connection, but uses only addresses of one family. Names with IPv4
        addresses use IPv4. A name that cannot be resolved yet (its machine may still be starting) uses IPv6, for which
        libzmq also accepts an IPv4 address if there is no other.
        """
        self.endpoints.update(endpoints)
        hosts = {host for pair in endpoints.values() for each in pair if (host := host_of(each))}
        self._addresses.update(resolve_all(hosts))

    def untried_addresses(self) -> str:
        """Returns the end of a sentence about peers that do not answer: the names with several addresses among the
        hosts to which this node has connected."""
        hosts = dict.fromkeys(host_of(self.endpoints[uid][plane]) for uid, plane in self.senders)
        return "".join(only_first_tried(host, self._addresses.get(host, [])) for host in hosts)

    def add_peer(self, uid: int, endpoints: Endpoints) -> None:
        """Adds a peer that listens at these numeric addresses, or changes its addresses. Called with `Handler.lock`
        held."""
        self.endpoints[uid] = endpoints
        self._addresses[host_of(endpoints[CONTROL])] = [host_of(endpoints[CONTROL])]
        for plane in (CONTROL, BULK):
            self.renew(uid, plane)

    def by_ipv6(self, at: str) -> bool:
        """Returns whether connections to an endpoint use IPv6."""
        found = self._addresses.get(host_of(at))
        return found is not None and by_ipv6(found)

    def send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        """Passes one message to the socket of a peer. Called with `Handler.lock` held.

        Returns False if the socket is full, and `Handler.writable` is called later, or if this process has too many
        open files to create the socket, which the next call tries again.
        """
        if (uid, plane) in self.blocked:
            return False
        sender = self.senders.get((uid, plane)) or self._open_socket(uid, plane)
        if sender is None:
            return False
        try:
            if body is None:
                sender.send(first, NOW)
            else:
                sender.send(first, MORE)
                sender.send(body, NOW, copy=False)  # type: ignore[arg-type]  # a Frame, or bytes
        except zmq.Again:
            self.blocked.add((uid, plane))
            self._watch_blocked()
            return False
        return True

    def _open_socket(self, uid: int, plane: int) -> zmq.Socket[bytes] | None:
        """Returns a new socket that connects to a peer; None if this process has too many open files, which may be
        caused by strangers that connect to it."""
        at = self.endpoints[uid][plane]
        try:
            sender = connections.sender(self._parts.context, SEND_MESSAGES, self.by_ipv6(at))
            try:
                self._connect(uid, plane, sender)
            except BaseException:
                sender.close(linger=0)
                raise
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._handler.connection_event("no_files", at, "no connection is made")
            return None
        return sender

    def _connect(self, uid: int, plane: int, sender: zmq.Socket[bytes]) -> None:
        at, security = self.endpoints[uid][plane], self._parts.security
        events = BROKEN_HANDSHAKES if self.joining and plane == CONTROL else 0
        if security is not None and self._parts.by_credential(plane):
            connections.log_in_once(sender, security.keyring, self._handler.log_in(uid))
            events = BROKEN_HANDSHAKES | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        elif security is not None:
            connections.log_in_by_key(sender, security.keyring, uid)
        if events:
            monitor = self._monitors[uid, plane] = sender.get_monitor_socket(events)
            monitor.linger = 0
            self._parts.watched.add(monitor, lambda: self._read_monitor(uid, plane, monitor))
        sender.connect(at)
        self.senders[uid, plane] = sender

    def _read_monitor(self, uid: int, plane: int, monitor: zmq.Socket[bytes]) -> None:
        """Reads the events of connections to a peer, and reports failed handshakes and broken connections."""
        with self._handler.lock:  # a monitor is closed only with this lock held
            broken = False
            with contextlib.suppress(zmq.Again):
                while self._monitors.get((uid, plane)) is monitor:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)
                    broken |= bool(event["event"] & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED))
                    if event["event"] & BROKEN_HANDSHAKES:
                        coded = event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                        self._handler.handshake_refused(uid, int(event["value"]) if coded else 0)
            if broken and self._parts.by_credential(plane):
                self._handler.disconnected(uid, plane)

    def unblock(self) -> None:
        """Reports sockets that refused a message and are writable again. Called by the I/O thread, which alone uses
        such sockets until then."""
        for uid, plane in list(self.blocked):
            sender = self.senders[uid, plane]
            if sender not in self._parts.watched:
                self._parts.watched.add(sender, read_nothing)
            while int(sender.getsockopt(zmq.EVENTS)) & WRITABLE:
                self.blocked.discard((uid, plane))
                self._handler.writable(uid, plane)
                if (uid, plane) not in self.blocked:
                    self._stop_watching(uid, plane, sender)
                    break

    def _stop_watching(self, uid: int, plane: int, sender: zmq.Socket[bytes]) -> None:
        self.blocked.discard((uid, plane))
        self._parts.watched.remove(sender)

    def renew(self, uid: int, plane: int) -> None:
        """Closes the connection to a peer, dropping what is in flight; the next message makes a new one. Called with
        `Handler.lock` held.

        Closing without linger is what may make libzmq abort if it has taken half a message: link_state.ONE_FRAME_BYTES.
        """
        sender = self.senders.pop((uid, plane), None)
        if sender is None:
            return
        if (uid, plane) in self.blocked:
            self._stop_watching(uid, plane, sender)
        monitor = self._monitors.pop((uid, plane), None)
        if monitor is not None:
            self._parts.watched.remove(monitor)
            connections.end_monitor(sender, monitor)
        sender.close(linger=0)

    def carried(self, uid: int, plane: int) -> int | None:
        """Implements `LinkPort.carried`. Called with `Handler.lock` held."""
        return acknowledged_bytes(self.endpoints[uid][plane]) if (uid, plane) in self.senders else None

    def release(self, left_seconds: float) -> None:
        """Closes every socket. left_seconds: longest time for the last messages to be sent."""
        for which, monitor in self._monitors.items():
            connections.end_monitor(self.senders[which], monitor)
        for each in self.senders.values():
            each.close(linger=int(1000 * min(left_seconds, LINGER_SECONDS)))
