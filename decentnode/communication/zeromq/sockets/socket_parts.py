"""What the sockets of one node have in common, whether it sends or receives through them."""

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
    """The sockets that the thread at a node's sockets waits at. That thread, or with `Handler.lock` held."""

    def __init__(self, register: Callable[[int], None], unregister: Callable[[int], None]) -> None:
        """register, unregister (descriptor): poll a descriptor, too, and no more."""
        self._register, self._unregister = register, unregister
        self.by_descriptor: dict[int, Callable[[], None]] = {}
        """Takes in all that is there. ZeroMQ's descriptors tell of news once, and polling them alone costs a tenth of
        what zmq_poll does: nothing may be left behind but what `ListeningSockets.behind` says."""

    def add(self, socket_: zmq.Socket[bytes], take_in: Callable[[], None]) -> None:
        descriptor = int(socket_.getsockopt(zmq.FD))
        self.by_descriptor[descriptor] = take_in
        self._register(descriptor)

    def __contains__(self, socket_: zmq.Socket[bytes]) -> bool:
        return int(socket_.getsockopt(zmq.FD)) in self.by_descriptor

    def remove(self, socket_: zmq.Socket[bytes]) -> None:
        """Undo `add`, before the socket is closed; nothing happens where it is not watched."""
        descriptor = int(socket_.getsockopt(zmq.FD))
        if self.by_descriptor.pop(descriptor, None) is not None:
            self._unregister(descriptor)


@dataclass(frozen=True)
class SocketParts:
    """Of one node."""

    uid: int
    context: zmq.Context[zmq.Socket[bytes]]
    handler: Handler
    security: Security | None
    watched: WatchedSockets

    def by_credential(self, plane: int) -> bool:
        """Whether sockets of this plane take a credential for each connection rather than CURVE."""
        return plane == BULK and self.security is not None and self.security.bulk_needs_credential
