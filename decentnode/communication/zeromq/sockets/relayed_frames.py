"""Forwards bytes between other nodes, as relay frames that arrive at and are sent from a node's control socket."""

from __future__ import annotations

import math

import zmq

from decentnode import clock
from decentnode.communication.zeromq.sockets.socket_handler import Handler
from decentnode.errors import PeerFault
from decentnode.wire.relay import RELAY_MESSAGES, RelayHub

LINGER_SECONDS = 2.0
"""How much longer than necessary a relay may stay for the nodes whose bytes it forwards."""
OWN_LINGER_SECONDS = 0.5
"""How long a relay forwards its own last messages."""


class RelayedFrames:
    """The relay function of one node. Used by the I/O thread."""

    def __init__(self, hub: RelayHub, listener: zmq.Socket[bytes], handler: Handler, identity: bytes) -> None:
        """listener: the node's control socket, not bound yet. identity: the node's own identity at the hub."""
        self.hub = hub
        self._listener, self._handler, self._identity = listener, handler, identity
        self._until = math.inf
        """When the node stops forwarding for others, once it is done itself."""
        listener.sndhwm = RELAY_MESSAGES
        listener.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def forward(self, route: bytes, key: bytes, frame: memoryview) -> None:
        """Handles a relay frame from the node at `route`, which has proved this key (b"" for none), and sends the
        frames that result. A node whose queue is full is dropped and has to connect again."""
        hub = self.hub
        try:
            hub.take(route, key, frame, clock.now())
        except PeerFault as fault:
            self._handler.relay_refused(fault)
        while hub.outbox:
            to, out = hub.outbox.pop(0)
            try:
                self._listener.send_multipart([to, out.encoded()], zmq.NOBLOCK)
            except zmq.ZMQError:
                hub.disconnect(to)

    def is_needed(self, now: float) -> bool:
        """Returns whether this node, which is done itself, stays for the nodes whose bytes it forwards, so that they
        can send their last messages."""
        if not self.hub.forwards_for_others(self._identity):
            return False
        if self._until == math.inf:
            self._until = now + LINGER_SECONDS
        return now < self._until
