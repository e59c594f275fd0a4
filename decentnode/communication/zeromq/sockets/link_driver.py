"""Runs one node's reliable links on its sockets: the lock, the clock and the I/O thread around a machine without any.

The training thread and the I/O thread both send, each holding `LinkDriver.lock`: a message leaves at once from whoever
has it. Never take that lock while holding `RunState.changed`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.chunking import MESSAGE_COST, chunk_elements
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.protocol.credentials import BulkAccess
from decentnode.communication.zeromq.protocol.link_state import CONTROL, QueuedMessage, ReceiveCredits
from decentnode.communication.zeromq.protocol.reliable_links import ReliableLinks
from decentnode.communication.zeromq.sockets.handshakes import Handshakes
from decentnode.communication.zeromq.sockets.io_thread import IoThread
from decentnode.communication.zeromq.sockets.node_sockets import NodeSockets
from decentnode.communication.zeromq.sockets.process_io import HostedSockets
from decentnode.communication.zeromq.sockets.security import Security
from decentnode.errors import PeerFault
from decentnode.wire import codec
from decentnode.wire.generation import Caller
from decentnode.wire.messages import Asked, Described, Granted, Message, Turned
from decentnode.wire.session import Session


class LinkOwner(Protocol):
    """Whom a driver tells what its links bring (`NodeProtocol`). All but `crashed` are called with the driver's lock
    held, from the thread at the sockets or from one that sends."""

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        """As `LinkPort.deliver`."""

    def knocked(self, asked: Asked, caller: Caller, now: float) -> Granted | Described | Turned:
        """As `Reconfiguration.knocked`."""

    @property
    def next_deadline(self) -> float:
        """When `tick` has to be called at the latest; infinite while nothing waits for the clock."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    @property
    def has_room(self) -> Callable[[int], None]:
        """As `LinkPort.has_room`."""

    def crashed(self, error: BaseException) -> None:
        """The thread at the sockets ends because of an error."""


MAX_KNOCKS = 8
"""Requests of nodes that are in no mapping that are answered per second."""


@dataclass(frozen=True)
class LinkSizes:
    """Bounds on what peers may send."""

    window: int
    """Most bytes of bulk that one peer may have under way to this node and not used up."""
    max_bulk_bytes: int
    """Of one bulk frame."""

    @classmethod
    def of(cls, chunk_bytes: int, window_bytes: int) -> LinkSizes:
        """Those of a config: a window has room for four chunks at least, a frame for a chunk of any kind and 64 KiB."""
        kinds = (torch.float32, torch.float64)
        largest = max(chunk_elements(chunk_bytes, kind) * kind.itemsize for kind in kinds)
        return cls(max(window_bytes, 4 * (largest + MESSAGE_COST)), largest + (1 << 16))


class Sending(contextlib.AbstractContextManager[None]):
    """The driver's lock for a thread that sends, or changes when something is due: the thread at the sockets hears of
    it where it would sleep for longer."""

    def __init__(self, driver: LinkDriver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._driver.io.due_by(self._driver.next_deadline)
        self._driver.lock.release()


class LinkDriver:
    """The I/O shell of `ReliableLinks`: the handler of `NodeSockets`, and the port of the links."""

    def __init__(
        self, session: Session, counters: Counters, sizes: LinkSizes, security: Security | None,
        process: SharedProcess | None = None,
    ) -> None:
        """Opens sockets; they are bound, and the thread is started, later, with `serve` before. process: what the node
        shares with others of its process, where there are any."""
        self.lock = threading.RLock()
        """Held around every call of the links."""
        self._counters = counters
        access = BulkAccess(security is not None and security.bulk_needs_credential,
                            security is not None and security.bulk == "aes-gcm")  # fmt: skip
        self._knocks = 0.0, 0
        """Since when requests of newcomers are counted, and how many came."""
        self._credits = ReceiveCredits(sizes.window)
        self._credit_lock = threading.Lock()
        """Of the credits alone: payloads are used up with `RunState.changed` held, under which `lock` is not taken."""
        self.links = ReliableLinks(session, self, counters, self._credits, access)
        parts = session.uid, sizes.max_bulk_bytes, self, security, access.given
        self.io: NodeSockets = IoThread(*parts) if process is None else HostedSockets(process, *parts)
        self.send, self.renew, self.received = self.io.send, self.io.peers.renew, self.links.receive
        self.carried = self.io.peers.carried
        self._handshakes = Handshakes(session, self.io.peers.endpoints)
        self._sending = Sending(self)

    def serve(self, owner: LinkOwner) -> None:
        """Before the thread is started: who hears what the links bring."""
        self._owner = owner
        # not methods that pass on: that would be a tenth of what a message costs here
        self.deliver, self.has_room, self.crashed = owner.deliver, owner.has_room, owner.crashed

    # -- any thread -------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` soon on the thread at the sockets, with the lock held; not blocking. Raises NodeFailed when
        that thread no longer comes to it."""
        self.io.call(function)

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """The lock, for a thread that is not at the sockets and calls the links or the owner."""
        return self._sending

    def bulk(self, uids: Sequence[int], message: QueuedMessage) -> None:
        """Send a message to these peers now, or as soon as windows and sockets allow."""
        sender, io = self.links.sender, self.io
        with self.lock:
            send, now = sender.bulk, clock.now()
            for uid in uids:
                send(uid, message, now)
            if sender.due < io.sleeps_until:
                io.due_by(sender.due)

    def withhold(self, uid: int, key: ExchangeKey) -> None:
        """As `LinkSender.withhold`."""
        with self._sending:
            self.links.sender.withhold(uid, key, clock.now())

    def hurry(self) -> None:
        """Ask every peer now what it has of the bulk sent so far."""
        with self._sending:
            self.links.sender.hurry(clock.now())

    def owing(self) -> list[int]:
        """Peers that have not acknowledged all of the bulk that was sent to them."""
        with self.lock:
            return self.links.sender.owing()

    def restart(self, fresh: Collection[int]) -> None:
        """As `ReliableLinks.restart`; with the lock held."""
        self.links.restart(fresh)
        with self._credit_lock:
            self._credits.clear()

    def consumed(self, uid: int, size: int) -> None:
        """Bytes of `uid` are used up: it is granted more once a good part of its window is free again."""
        with self._credit_lock:
            allowed = self._credits.consumed(uid, size)
        if allowed is not None:
            self.io.call(lambda: self.links.sender.grant(uid, allowed, clock.now()))

    # -- what happens at the sockets (socket_handler.py) -------------------------------------------------------

    def writable(self, uid: int, plane: int) -> None:
        self.links.sender.writable(uid, plane, clock.now())

    @property
    def next_deadline(self) -> float:
        return min(self.links.sender.due, self._owner.next_deadline)

    def tick(self, now: float) -> None:
        if now >= self._owner.next_deadline:
            self._owner.tick(now)
        if now >= self.links.next_deadline:
            self.links.tick(now)

    def log_in(self, uid: int) -> bytes:
        return self.links.sender.log_in(uid)

    def connection_event(self, kind: str, address: str, detail: str = "") -> None:
        if kind != "connection_lost":
            self.links.refuse(PeerFault(kind, f"{address} {detail}".strip()))
            if kind != "no_files":  # of which a peer has no part
                with self.lock:
                    self._handshakes.refused_here(kind, address, detail)
        elif self.links.breaks_matter:
            self._counters.on_event(kind, None, address)

    def knocked(self, plane: int, frames: Sequence[memoryview], caller: Caller, now: float) -> bytes | None:
        if now - self._knocks[0] >= 1.0:
            self._knocks = now, 0
        self._knocks = self._knocks[0], self._knocks[1] + 1
        try:
            if self._knocks[1] > MAX_KNOCKS:
                raise PeerFault("hello_flood", "of newcomers")
            if plane != CONTROL or len(frames) != 1:
                raise PeerFault("wrong_plane" if plane != CONTROL else "malformed_multipart", "of a newcomer")
            asked = codec.decode(bytes(frames[0]))
            if not isinstance(asked, Asked):
                raise PeerFault("unexpected_message", f"{type(asked).__name__} of a newcomer")
            return codec.encode(self._owner.knocked(asked, caller, now))
        except PeerFault as fault:
            self.links.refuse(fault)
            return None

    def relay_refused(self, fault: PeerFault) -> None:
        self.links.refuse(fault)

    def handshake_refused(self, uid: int, code: int) -> None:
        self._handshakes.refused_there(uid, code)

    def disconnected(self, uid: int, plane: int) -> None:
        self.links.disconnected(uid, plane)

    def finished(self) -> bool:
        return self.links.finished(clock.now())

    def goodbye(self) -> None:
        self.links.goodbye(clock.now())
