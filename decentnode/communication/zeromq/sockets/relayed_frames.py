"""Bytes between other nodes that a node passes on, as frames that come and go at its control socket."""

from __future__ import annotations

import math

import zmq

from decentnode import clock
from decentnode.communication.zeromq.sockets.socket_handler import Handler
from decentnode.errors import PeerFault
from decentnode.wire.relay import RELAY_MESSAGES, RelayHub

LINGER_SECONDS = 2.0
"""How much longer a relay may stay than itself needs to, for the nodes whose bytes it passes on."""
OWN_LINGER_SECONDS = 0.5
"""How long a relay passes on what it said itself at its end."""


class RelayedFrames:
    """Those of a node that is a relay. The thread at the sockets."""

    def __init__(self, hub: RelayHub, listener: zmq.Socket[bytes], handler: Handler, identity: bytes) -> None:
        """listener: the node's control socket, not bound yet. identity: how the hub knows the node itself."""
        self.hub = hub
        self._listener, self._handler, self._identity = listener, handler, identity
        self._until = math.inf
        """When it stops to pass on bytes of others, once the node itself is done."""
        listener.sndhwm = RELAY_MESSAGES
        listener.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def pass_on(self, route: bytes, key: bytes, frame: memoryview) -> None:
        """A frame of a relayed connection came from the end `route`, which has proved this key (b"" for none). An end
        that does not take what is for it is given up, and begins anew."""
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
                hub.lost(to)

    def needed(self, now: float) -> bool:
        """Whether the node, which has nothing more to say, stays for those whose bytes it passes on: they have their
        last words still to say."""
        if not self.hub.busy(self._identity):
            return False
        if self._until == math.inf:
            self._until = now + LINGER_SECONDS
        return now < self._until
