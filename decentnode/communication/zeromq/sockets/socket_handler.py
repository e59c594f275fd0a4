"""The interface of the object that handles the events of a node's sockets (`LinkDriver`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from decentnode.errors import PeerFault
from decentnode.wire.generation import Caller


class Handler(Protocol):
    """Handles the events of the sockets. Its methods are called by the I/O thread or, while it sends, by another
    thread; with `lock` held unless noted."""

    lock: threading.RLock

    def received(self, plane: int, frames: Sequence[memoryview], uid: int | None, now: float) -> None:
        """Handles one message of one or more frames. uid: its sender, if sockets are authenticated."""

    def knocked(self, plane: int, frames: Sequence[memoryview], caller: Caller, now: float) -> bytes | None:
        """Returns the answer to a request of a node outside the mapping; None for no answer."""

    def relay_refused(self, fault: PeerFault) -> None:
        """Handles an invalid relay frame; called without the lock."""

    def log_in(self, uid: int) -> bytes:
        """Returns a credential for one connection to a peer's bulk socket, if credentials are used."""

    def writable(self, uid: int, plane: int) -> None:
        """Called when a socket that refused a message accepts messages again."""

    @property
    def next_deadline(self) -> float:
        """The latest time at which `tick` has to be called; also read without the lock."""

    def tick(self, now: float) -> None:
        """Does what is due."""

    def connection_event(self, kind: str, address: str, detail: str) -> None:
        """Called when a stranger was refused, a handshake failed, a connection to this node broke, or this process has
        too many open files; without the lock in most cases."""

    def handshake_refused(self, uid: int, code: int) -> None:
        """Called when a peer to which this node connects broke off the handshake. code: ZeroMQ's, or 0."""

    def disconnected(self, uid: int, plane: int) -> None:
        """Called when a connection to a peer broke that only `PeerSockets.renew` can make again."""

    def finished(self) -> bool:
        """Returns, while closing, whether nothing is left to send or acknowledge."""

    def goodbye(self) -> None:
        """Sends the last messages."""

    def crashed(self, error: BaseException) -> None:
        """Called without the lock when the I/O thread ends because of an error."""
