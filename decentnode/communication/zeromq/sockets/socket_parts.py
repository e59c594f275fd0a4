"""What the sending and the listening sockets of one node have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from decentnode.communication.zeromq.protocol.link_state import BULK
from decentnode.communication.zeromq.sockets.security import Security
from decentnode.communication.zeromq.sockets.socket_handler import Handler

BROKEN_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class WatchedSockets:
    """The sockets that the I/O thread of a node polls. Used by that thread, or with `Handler.lock` held."""

    def __init__(self, register: Callable[[int], None], unregister: Callable[[int], None]) -> None:
        """register(descriptor), unregister(descriptor): start and stop polling a descriptor."""
        self._register, self._unregister = register, unregister
        self.by_descriptor: dict[int, Callable[[], None]] = {}
        """Descriptor -> a function that reads all that has arrived. Polling ZeroMQ's descriptors costs a tenth of
        zmq_poll, but they report news only once (edge-triggered): no message may be left unread, except on the planes
        in `ListeningSockets.unread_planes`."""

    def add(self, socket_: zmq.Socket[bytes], take_in: Callable[[], None]) -> None:
        descriptor = int(socket_.getsockopt(zmq.FD))
        self.by_descriptor[descriptor] = take_in
        self._register(descriptor)

    def __contains__(self, socket_: zmq.Socket[bytes]) -> bool:
        return int(socket_.getsockopt(zmq.FD)) in self.by_descriptor

    def remove(self, socket_: zmq.Socket[bytes]) -> None:
        """Undoes `add`, before the socket is closed; no effect if it is not watched."""
        descriptor = int(socket_.getsockopt(zmq.FD))
        if self.by_descriptor.pop(descriptor, None) is not None:
            self._unregister(descriptor)


@dataclass(frozen=True)
class SocketParts:
    """The objects that the sockets of one node share."""

    uid: int
    context: zmq.Context[zmq.Socket[bytes]]
    handler: Handler
    security: Security | None
    watched: WatchedSockets

    def by_credential(self, plane: int) -> bool:
        """Returns whether sockets of this plane use a credential for each connection instead of CURVE."""
        return plane == BULK and self.security is not None and self.security.bulk_needs_credential
