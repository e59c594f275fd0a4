"""A node's connections to relays (uplinks): they are opened, pinged, and given up if a relay is silent or gone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from decentnode import clock, entropy
from decentnode.communication.parts import Endpoints
from decentnode.communication.zeromq.sockets import connections
from decentnode.communication.zeromq.sockets.security import Keyring
from decentnode.errors import PeerFault
from decentnode.wire.relay import (
    HELLO,
    PIECE_BYTES,
    PING,
    RELAY_MESSAGES,
    RELAY_VERSION,
    RESET,
    ROUTE_PREFIX,
    Frame,
    relay_order,
)

logger = logging.getLogger(__name__)

REGISTRATIONS = 2
"""Number of relays with which a node registers: if one dies, the other is already connected."""
PING_SECONDS, SILENT_SECONDS = 1.0, 3.0
"""How often a relay is pinged, and after how long a silence it is given up."""
HELLO_SECONDS = 0.25
"""Time between two HELLO frames of a node that its relay does not know yet."""
DOWN_SECONDS = 2.0
"""How long a relay that was given up is not used again."""
LINGER_SECONDS = 0.5
"""How long the last frames have to be sent when uplinks are released."""
BURST = 64
"""Most frames that are read from one relay before other sockets are polled."""
_BROKEN = (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
           | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
           | zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # fmt: skip


@dataclass(frozen=True)
class RelayPlan:
    """The settings of one node for relays."""

    uid: int
    identity: Callable[[int], bytes]
    """Returns the identity of a uid: its public key, or the uid in ASCII digits if nodes have no keys."""
    relays: Sequence[int]
    """Nodes that are relays, ascending."""
    control_of: Callable[[int], tuple[str, bool]]
    """Returns where a relay's control socket listens, and whether over IPv6; also called with this node's uid."""
    own: Endpoints
    """Where this node listens, as it can connect to itself."""
    registers: bool
    """Whether others reach this node only through relays, so that it registers with them."""
    keyring: Keyring | None


class Uplink:
    """A connection to a relay."""

    def __init__(self, uid: int, socket_: zmq.Socket[bytes], now: float) -> None:
        self.uid, self.socket = uid, socket_
        self.monitor: zmq.Socket[bytes] = socket_.get_monitor_socket(_BROKEN)
        self.monitor.linger = 0
        self.last_heard = now
        self.last_sent = -math.inf
        """When it was last sent a HELLO or PING."""
        self.is_known = False
        """Whether the relay knows this node."""


class UplinkUser(Protocol):
    """Uses the uplinks (`RelayedStreams`), which call these methods."""

    def relay_is_ready(self, now: float) -> None:
        """A relay now knows this node."""

    def refused(self, uplink: Uplink, now: float) -> None:
        """A relay that does not know this node yet refused a stream of it."""

    def receive(self, uplink: Uplink, frame: Frame, now: float) -> None:
        """A frame of a stream arrived."""

    def lost(self, uplink: Uplink, now: float) -> None:
        """A relay was given up."""


class Uplinks:
    """The connections of one node to relays. Not thread-safe; `user` has to be set before the first call."""

    user: UplinkUser

    def __init__(self, plan: RelayPlan, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._plan, self._context = plan, context
        self.by_relay: dict[int, Uplink] = {}
        self._unusable_until: dict[int, float] = {}
        """Relay -> until when it is not used."""

    def connect(self, uid: int, now: float) -> Uplink:
        """Returns the connection to a relay, opened if there is none."""
        if uid in self.by_relay:
            return self.by_relay[uid]
        (at, by_ipv6), keyring = self._plan.control_of(uid), self._plan.keyring
        made = connections.sender(self._context, RELAY_MESSAGES, by_ipv6)
        made.rcvhwm = RELAY_MESSAGES
        made.maxmsgsize = 2 * PIECE_BYTES
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        made.setsockopt(zmq.ROUTING_ID, ROUTE_PREFIX + entropy.draw(8))
        if keyring is not None:
            connections.log_in_by_key(made, keyring, uid)
        uplink = self.by_relay[uid] = Uplink(uid, made, now)
        made.connect(at)
        self._send_hello(uplink, now)
        return uplink

    def is_usable(self, uid: int, now: float) -> bool:
        """Returns whether a relay was not given up within the last DOWN_SECONDS."""
        return now >= self._unusable_until.get(uid, 0.0)

    def tick(self, now: float) -> None:
        """Pings relays that are due, and gives up those that are silent."""
        for uplink in list(self.by_relay.values()):
            if now - uplink.last_heard > SILENT_SECONDS:
                self._give_up(uplink, now, "is silent")
            elif not uplink.is_known and now - uplink.last_sent > HELLO_SECONDS:
                self._send_hello(uplink, now)
            elif now - uplink.last_sent > PING_SECONDS:
                uplink.last_sent = now
                self.send(uplink, Frame(PING))

    def register(self, now: float) -> None:
        """Connects to up to REGISTRATIONS relays, if others reach this node through relays."""
        if not self._plan.registers:
            return
        for uid in relay_order(self._plan.uid, list(self._plan.relays)):
            if len(self.by_relay) >= REGISTRATIONS:
                break
            if uid not in self.by_relay and self.is_usable(uid, now):
                self.connect(uid, now)

    def send(self, uplink: Uplink, frame: Frame) -> None:
        """Sends a frame; a relay whose queue is full is given up."""
        if uplink.uid not in self.by_relay:
            return
        try:
            uplink.socket.send(frame.encoded(), zmq.NOBLOCK)
        except zmq.Again:
            self._give_up(uplink, clock.now(), "takes nothing")

    def read(self, uplink: Uplink, source: zmq.Socket[bytes]) -> None:
        """Reads what has arrived at `source`, which is the uplink's socket or the monitor of that socket."""
        if source.closed or uplink.uid not in self.by_relay:
            return
        now = clock.now()
        if source is uplink.monitor:
            self._give_up(uplink, now, "broke the connection")
            return
        for _ in range(BURST):
            try:
                raw = uplink.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            if raw.more:
                self._give_up(uplink, now, "speaks no protocol of relays")
                return
            try:
                frame = Frame.decoded(raw.buffer)
            except PeerFault as fault:
                self._give_up(uplink, now, str(fault))
                return
            uplink.last_heard = now
            self._handle(uplink, frame, now)
            if uplink.uid not in self.by_relay:
                return

    def release(self) -> None:
        """Closes all uplinks. The last frames have LINGER_SECONDS to be sent."""
        for uplink in self.by_relay.values():
            connections.end_monitor(uplink.socket, uplink.monitor)
            uplink.socket.close(linger=int(1000 * LINGER_SECONDS))

    def _send_hello(self, uplink: Uplink, now: float) -> None:
        uplink.last_sent = now
        identity = self._plan.identity(self._plan.uid)
        self.send(uplink, Frame(HELLO, plane=int(self._plan.registers), number=RELAY_VERSION, body=identity))

    def _handle(self, uplink: Uplink, frame: Frame, now: float) -> None:
        if frame.kind == HELLO:
            if frame.number and not uplink.is_known:
                uplink.is_known = True
                self.user.relay_is_ready(now)
        elif frame.kind == RESET and uplink.is_known:
            self._give_up(uplink, now, "knows nothing of this node any more")
        elif frame.kind == RESET:
            self.user.refused(uplink, now)
        else:
            self.user.receive(uplink, frame, now)

    def _give_up(self, uplink: Uplink, now: float, why: str) -> None:
        if self.by_relay.pop(uplink.uid, None) is None:
            return
        logger.info("relay %d %s", uplink.uid, why)
        self._unusable_until[uplink.uid] = now + DOWN_SECONDS
        connections.end_monitor(uplink.socket, uplink.monitor)
        uplink.socket.close(linger=0)
        self.user.lost(uplink, now)
