"""Whom a node's sockets tell what happens on them, and whom they ask what is due."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from decentnode.errors import PeerFault
from decentnode.wire.generation import Caller


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
