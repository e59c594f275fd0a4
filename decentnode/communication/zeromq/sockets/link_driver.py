"""Runs one node's `ReliableLinks`, which have no lock, clock or thread of their own, on its sockets.

The training thread and the I/O thread both send, holding `LinkDriver.lock`, so that a message is sent at once by the
thread that has it. Never take that lock while holding `RunState.changed`.
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
from decentnode.communication.zeromq.sockets.handshakes import HandshakeFailures
from decentnode.communication.zeromq.sockets.io_thread import IoThread
from decentnode.communication.zeromq.sockets.node_sockets import NodeSockets
from decentnode.communication.zeromq.sockets.process_io import HostedSockets
from decentnode.communication.zeromq.sockets.security import Security
from decentnode.errors import PeerFault
from decentnode.wire import codec
from decentnode.wire.generation import Caller
from decentnode.wire.messages import Asked, Declined, Described, Granted, Message
from decentnode.wire.session import Session


class LinkOwner(Protocol):
    """Handles what the links of a driver deliver (`NodeProtocol`). All methods but `crashed` are called with the
    driver's lock held, by the I/O thread or by a thread that sends; `next_deadline` is also read without it."""

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        """See `LinkPort.deliver`."""

    def knocked(self, asked: Asked, caller: Caller, now: float) -> Granted | Described | Declined:
        """See `Reconfiguration.knocked`."""

    @property
    def next_deadline(self) -> float:
        """The latest time at which `tick` has to be called; infinite if nothing is due."""

    def tick(self, now: float) -> None:
        """Does what is due."""

    @property
    def has_room(self) -> Callable[[int], None]:
        """See `LinkPort.has_room`."""

    def crashed(self, error: BaseException) -> None:
        """Called when the I/O thread ends because of an error."""


MAX_KNOCKS = 8
"""Most requests of nodes outside the mapping that are answered per second."""


@dataclass(frozen=True)
class LinkSizes:
    """Bounds on what peers may send."""

    window: int
    """Most bytes of bulk messages that one peer may have sent and this node has not consumed yet."""
    max_bulk_bytes: int
    """Largest bulk frame, in bytes."""

    @classmethod
    def of(cls, chunk_bytes: int, window_bytes: int) -> LinkSizes:
        """Returns the bounds for a config: a window of at least four chunks, and frames of at most one chunk of any
        dtype plus 64 KiB."""
        kinds = (torch.float32, torch.float64)
        largest = max(chunk_elements(chunk_bytes, kind) * kind.itemsize for kind in kinds)
        return cls(max(window_bytes, 4 * (largest + MESSAGE_COST)), largest + (1 << 16))


class Sending(contextlib.AbstractContextManager[None]):
    """A context with the driver's lock, for a thread that sends or changes when something is due. On exit it wakes the
    I/O thread if that would sleep for too long."""

    def __init__(self, driver: LinkDriver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._driver.io.due_by(self._driver.next_deadline)
        self._driver.lock.release()


class LinkDriver:
    """Connects `ReliableLinks` with `NodeSockets`: the handler of the sockets, and the port of the links."""

    def __init__(
        self, session: Session, counters: Counters, sizes: LinkSizes, security: Security | None,
        process: SharedProcess | None = None,
    ) -> None:
        """Opens the sockets. The caller then calls `serve`, binds them and starts the I/O thread.

        process: what the node shares with other nodes of its process; None if it has a process of its own.
        """
        self.lock = threading.RLock()
        """Held around every call of the links."""
        self._counters = counters
        access = BulkAccess(security is not None and security.bulk_needs_credential,
                            security is not None and security.bulk == "aes-gcm")  # fmt: skip
        self._knocks = 0.0, 0
        """(since when requests of newcomers are counted, how many arrived since)."""
        self._credits = ReceiveCredits(sizes.window)
        self._credit_lock = threading.Lock()
        """Guards only the credits: payloads are consumed with `RunState.changed` held, under which `lock` must not be
        taken."""
        self.links = ReliableLinks(session, self, counters, self._credits, access)
        parts = session.uid, sizes.max_bulk_bytes, self, security, access.given
        self.io: NodeSockets = IoThread(*parts) if process is None else HostedSockets(process, *parts)
        self.send, self.renew, self.received = self.io.send, self.io.peers.renew, self.links.receive
        self.carried = self.io.peers.carried
        self._handshake_failures = HandshakeFailures(session, self.io.peers.endpoints)
        self._sending = Sending(self)

    def serve(self, owner: LinkOwner) -> None:
        """Sets the owner, which handles what the links deliver; called before the I/O thread is started."""
        self._owner = owner
        # bound directly: forwarding methods would add a tenth to the cost of a message here
        self.deliver, self.has_room, self.crashed = owner.deliver, owner.has_room, owner.crashed

    # -- any thread -------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Schedules `function` on the I/O thread, with the lock held; not blocking. Raises NodeFailed if too many calls
        wait for that thread."""
        self.io.call(function)

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that holds the lock, for a thread other than the I/O thread that calls the links or the
        owner."""
        return self._sending

    def bulk(self, uids: Sequence[int], message: QueuedMessage) -> None:
        """Sends a message to these peers now, or as soon as windows and sockets allow."""
        sender, io = self.links.sender, self.io
        with self.lock:
            send, now = sender.bulk, clock.now()
            for uid in uids:
                send(uid, message, now)
            if sender.due < io.sleeps_until:
                io.due_by(sender.due)

    def withhold(self, uid: int, key: ExchangeKey) -> None:
        """Calls `LinkSender.withhold`."""
        with self._sending:
            self.links.sender.withhold(uid, key, clock.now())

    def request_acks(self) -> None:
        """Probes every peer now for an acknowledgement of the bulk messages sent so far."""
        with self._sending:
            self.links.sender.request_acks(clock.now())

    def unacked_peers(self) -> list[int]:
        """Returns the peers that have not acknowledged all bulk messages sent to them."""
        with self.lock:
            return self.links.sender.unacked_peers()

    def restart(self, fresh: Collection[int]) -> None:
        """Calls `ReliableLinks.restart` and resets the credits; called with the lock held."""
        self.links.restart(fresh)
        with self._credit_lock:
            self._credits.clear()

    def consumed(self, uid: int, size: int) -> None:
        """Notes that bytes of `uid` were consumed, and grants it more once a quarter of its window is free."""
        with self._credit_lock:
            allowed = self._credits.consumed(uid, size)
        if allowed is not None:
            self.io.call(lambda: self.links.sender.grant(uid, allowed, clock.now()))

    # -- calls of the sockets (socket_handler.py) -------------------------------------------------------------

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
            if kind != "no_files":  # not the fault of a peer
                with self.lock:
                    self._handshake_failures.note_own_refusal(kind, address, detail)
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
        self._handshake_failures.note_peer_refusal(uid, code)

    def disconnected(self, uid: int, plane: int) -> None:
        self.links.disconnected(uid, plane)

    def finished(self) -> bool:
        return self.links.finished(clock.now())

    def goodbye(self) -> None:
        self.links.goodbye(clock.now())
