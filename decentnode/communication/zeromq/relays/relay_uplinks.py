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

OFFERS = 2
"""Number of relays with which a node registers: if one dies, the other is already connected."""
PING_SECONDS, SILENT_SECONDS = 1.0, 3.0
"""How often a relay is pinged, and after how long a silence it is given up."""
HELLO_SECONDS = 0.25
"""Time between two HELLO frames of a node that its relay does not know yet."""
DOWN_SECONDS = 2.0
"""How long a relay that was given up is not used, if there are others."""
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
    offers: bool
    """Whether others reach this node only through relays, so that it registers with them."""
    keyring: Keyring | None


class Uplink:
    """A connection to a relay."""

    def __init__(self, uid: int, socket_: zmq.Socket[bytes], now: float) -> None:
        self.uid, self.socket = uid, socket_
        self.monitor: zmq.Socket[bytes] = socket_.get_monitor_socket(_BROKEN)
        self.monitor.linger = 0
        self.heard = now
        self.said = -math.inf
        """When it was last sent a HELLO or PING."""
        self.known = False
        """Whether the relay knows this node."""


class UplinkUser(Protocol):
    """Uses the uplinks (`RelayedStreams`), which call these methods."""

    def known(self, now: float) -> None:
        """A relay now knows this node."""

    def refused(self, uplink: Uplink, now: float) -> None:
        """A relay that does not know this node yet refused a stream of it."""

    def take(self, uplink: Uplink, frame: Frame, now: float) -> None:
        """A frame of a stream arrived."""

    def lost(self, uplink: Uplink, now: float) -> None:
        """A relay was given up."""


class Uplinks:
    """The connections of one node to relays. Not thread-safe; `user` has to be set before the first call."""

    user: UplinkUser

    def __init__(self, plan: RelayPlan, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._plan, self._context = plan, context
        self.by_relay: dict[int, Uplink] = {}
        self._down: dict[int, float] = {}
        """Relay -> until when it is not used."""

    def made(self, uid: int, now: float) -> Uplink:
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
        self._greet(uplink, now)
        return uplink

    def usable(self, uid: int, now: float) -> bool:
        """Returns whether a relay was not given up within the last DOWN_SECONDS."""
        return now >= self._down.get(uid, 0.0)

    def tick(self, now: float) -> None:
        """Pings relays that are due, and gives up those that are silent."""
        for uplink in list(self.by_relay.values()):
            if now - uplink.heard > SILENT_SECONDS:
                self._give_up(uplink, now, "is silent")
            elif not uplink.known and now - uplink.said > HELLO_SECONDS:
                self._greet(uplink, now)
            elif now - uplink.said > PING_SECONDS:
                uplink.said = now
                self.say(uplink, Frame(PING))

    def offer(self, now: float) -> None:
        """Connects to up to OFFERS relays, if others reach this node through relays."""
        if not self._plan.offers:
            return
        for uid in relay_order(self._plan.uid, list(self._plan.relays)):
            if len(self.by_relay) >= OFFERS:
                break
            if uid not in self.by_relay and self.usable(uid, now):
                self.made(uid, now)

    def say(self, uplink: Uplink, frame: Frame) -> None:
        """Sends a frame; a relay whose queue is full is given up."""
        if uplink.uid not in self.by_relay:
            return
        try:
            uplink.socket.send(frame.encoded(), zmq.NOBLOCK)
        except zmq.Again:
            self._give_up(uplink, clock.now(), "takes nothing")

    def hear(self, uplink: Uplink, source: zmq.Socket[bytes]) -> None:
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
            uplink.heard = now
            self._take(uplink, frame, now)
            if uplink.uid not in self.by_relay:
                return

    def release(self) -> None:
        """Closes all uplinks. The last frames have LINGER_SECONDS to be sent."""
        for uplink in self.by_relay.values():
            connections.end_monitor(uplink.socket, uplink.monitor)
            uplink.socket.close(linger=int(1000 * LINGER_SECONDS))

    def _greet(self, uplink: Uplink, now: float) -> None:
        uplink.said = now
        identity = self._plan.identity(self._plan.uid)
        self.say(uplink, Frame(HELLO, plane=int(self._plan.offers), number=RELAY_VERSION, body=identity))

    def _take(self, uplink: Uplink, frame: Frame, now: float) -> None:
        if frame.kind == HELLO:
            if frame.number and not uplink.known:
                uplink.known = True
                self.user.known(now)
        elif frame.kind == RESET and uplink.known:
            self._give_up(uplink, now, "knows nothing of this node any more")
        elif frame.kind == RESET:
            self.user.refused(uplink, now)
        else:
            self.user.take(uplink, frame, now)

    def _give_up(self, uplink: Uplink, now: float, why: str) -> None:
        if self.by_relay.pop(uplink.uid, None) is None:
            return
        logger.info("relay %d %s", uplink.uid, why)
        self._down[uplink.uid] = now + DOWN_SECONDS
        connections.end_monitor(uplink.socket, uplink.monitor)
        uplink.socket.close(linger=0)
        self.user.lost(uplink, now)
