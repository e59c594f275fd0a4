"""A node's connections to relays: made, asked whether they live, and given up where a relay is silent or gone."""

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
    ROUTE,
    Frame,
    order,
)

logger = logging.getLogger(__name__)

OFFERS = 2
"""Relays at which a node offers itself: where one dies, the other is there already."""
PING_SECONDS, SILENT_SECONDS = 1.0, 3.0
"""How often a relay is asked whether it lives, and after how long a silence it is given up."""
HELLO_SECONDS = 0.25
"""Time between two questions of a node that its relay does not know yet."""
DOWN_SECONDS = 2.0
"""How long a relay that was given up is left alone, where there are others."""
LINGER_SECONDS = 0.5
"""How long the last frames have to get into a connection, at the end."""
BURST = 64
"""Frames taken from one relay before other sockets are looked at."""
_BROKEN = (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
           | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
           | zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # fmt: skip


@dataclass(frozen=True)
class RelayPlan:
    """What one node has to know of relays."""

    uid: int
    identity: Callable[[int], bytes]
    """Of a uid: its public key, or where nodes have none, the uid in ASCII digits."""
    relays: Sequence[int]
    """Nodes that are relays, ascending."""
    control_of: Callable[[int], tuple[str, bool]]
    """Where a relay's control socket listens, and whether by IPv6; asked for this node itself, too."""
    own: Endpoints
    """Where this node listens, for itself."""
    offers: bool
    """Whether others reach it through relays alone."""
    keyring: Keyring | None


class Uplink:
    """A connection to a relay."""

    def __init__(self, uid: int, socket_: zmq.Socket[bytes], now: float) -> None:
        self.uid, self.socket = uid, socket_
        self.monitor: zmq.Socket[bytes] = socket_.get_monitor_socket(_BROKEN)
        self.monitor.linger = 0
        self.heard = now
        self.said = -math.inf
        """When it was last asked something."""
        self.known = False
        """Whether the relay knows this node."""


class UplinkUser(Protocol):
    """Who goes through uplinks (`RelayedStreams`)."""

    def known(self, now: float) -> None:
        """A relay has come to know this node."""

    def refused(self, uplink: Uplink, now: float) -> None:
        """A relay that does not know this node yet takes no streams of it."""

    def take(self, uplink: Uplink, frame: Frame, now: float) -> None:
        """A frame of a stream came."""

    def lost(self, uplink: Uplink, now: float) -> None:
        """A relay was given up."""


class Uplinks:
    """Those of one node. Used from one thread, with `user` set before."""

    user: UplinkUser

    def __init__(self, plan: RelayPlan, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._plan, self._context = plan, context
        self.by_relay: dict[int, Uplink] = {}
        self._down: dict[int, float] = {}
        """Relay -> until when it is left alone."""

    def made(self, uid: int, now: float) -> Uplink:
        """The connection to a relay, made where there is none."""
        if uid in self.by_relay:
            return self.by_relay[uid]
        (at, by_ipv6), keyring = self._plan.control_of(uid), self._plan.keyring
        made = connections.sender(self._context, RELAY_MESSAGES, by_ipv6)
        made.rcvhwm = RELAY_MESSAGES
        made.maxmsgsize = 2 * PIECE_BYTES
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        made.setsockopt(zmq.ROUTING_ID, ROUTE + entropy.draw(8))
        if keyring is not None:
            connections.log_in_by_key(made, keyring, uid)
        uplink = self.by_relay[uid] = Uplink(uid, made, now)
        made.connect(at)
        self._greet(uplink, now)
        return uplink

    def usable(self, uid: int, now: float) -> bool:
        """Whether a relay is not left alone for now."""
        return now >= self._down.get(uid, 0.0)

    def tick(self, now: float) -> None:
        """Ask relays whether they live, and give up those that are silent."""
        for uplink in list(self.by_relay.values()):
            if now - uplink.heard > SILENT_SECONDS:
                self._give_up(uplink, now, "is silent")
            elif not uplink.known and now - uplink.said > HELLO_SECONDS:
                self._greet(uplink, now)
            elif now - uplink.said > PING_SECONDS:
                uplink.said = now
                self.say(uplink, Frame(PING))

    def offer(self, now: float) -> None:
        """Have this node known to enough relays, where others reach it through them."""
        if not self._plan.offers:
            return
        for uid in order(self._plan.uid, list(self._plan.relays)):
            if len(self.by_relay) >= OFFERS:
                break
            if uid not in self.by_relay and self.usable(uid, now):
                self.made(uid, now)

    def say(self, uplink: Uplink, frame: Frame) -> None:
        """Send a frame; a relay that takes nothing is given up."""
        if uplink.uid not in self.by_relay:
            return
        try:
            uplink.socket.send(frame.encoded(), zmq.NOBLOCK)
        except zmq.Again:
            self._give_up(uplink, clock.now(), "takes nothing")

    def hear(self, uplink: Uplink, source: zmq.Socket[bytes]) -> None:
        """There is something to read at `source`: its socket, or what watches that one."""
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
        """Close all of them. The last frames have LINGER_SECONDS to leave."""
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
