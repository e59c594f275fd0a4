"""The I/O of one simulated process: receives bytes, passes them to the protocol, and runs what is due at its deadlines.

It takes the place of the daemon's I/O thread, socket owner and link driver: one thread, no sockets, no locks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.zeromq.protocol.credentials import BulkAccess
from decentnode.communication.zeromq.protocol.link_state import Body, HeldBody, QueuedMessage, ReceiveCredits
from decentnode.communication.zeromq.protocol.node_protocol import NodeProtocol
from decentnode.communication.zeromq.protocol.reliable_links import ReliableLinks
from decentnode.communication.zeromq.sockets.link_driver import LinkSizes
from decentnode.simulate.world.event_queue import DeadlineTimer
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.wire import framing
from decentnode.wire.messages import Message
from decentnode.wire.session import Session


class ProcessIO:
    """Drives the links and the protocol of one process by arriving messages and by deadlines, and by nothing else. It
    implements the ports of the links and of the sender."""

    def __init__(self, session: Session, counters: Counters, network: VirtualNetwork, sizes: LinkSizes) -> None:
        self.uid, self.heap, self.network = session.uid, network.heap, network
        self.credits = ReceiveCredits(sizes.window)
        self.links = ReliableLinks(session, self, counters, self.credits, BulkAccess(False, False))
        self.links.sender.control_kind = framing.XXH3
        self.closed = False
        """Whether the process has ended: it receives nothing, and has no deadlines."""
        self.settled: Callable[[], None] = lambda: None
        """Called after every event of the process."""
        self.resends_under_lease = 0
        """Number of messages that were sent again from memory that is under lease; the reader resets it."""
        self._calls: deque[Callable[[], None]] = deque()
        self._timer = DeadlineTimer(self.heap, lambda: self.next_deadline, self._tick)
        self._socket = network.attach(self.uid, self._receive, self._writable)

    def serve(self, protocol: NodeProtocol, has_room: Callable[[int], None]) -> None:
        """Sets the receiver of the links' messages. Must be called before anything happens."""
        self._protocol, self.has_room = protocol, has_room

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` at the end of the current event."""
        self._calls.append(function)

    def settle(self) -> None:
        """Ends the current event of the process: runs the functions that `call` deferred, and schedules the next
        deadline."""
        while self._calls:
            self._calls.popleft()()
        self._timer.set()
        self.settled()

    # -- events -----------------------------------------------------------------------------------------------

    def suspend(self, until: float) -> None:
        """Suspends the process until this time."""
        self._socket.suspended_until = max(until, self.suspended_until)

    @property
    def suspended_until(self) -> float:
        """The time until which the process is suspended."""
        return self._socket.suspended_until

    def _receive(self, plane: int, frames: list[memoryview], uid: int | None) -> None:
        if not self.closed:
            self.links.receive(plane, frames, uid, self.heap.now)
            self.settle()

    def _writable(self, uid: int, plane: int) -> None:
        if self.heap.now < self.suspended_until:
            self.heap.at(self.suspended_until, lambda: self._writable(uid, plane))
        elif not self.closed:
            self.links.sender.writable(uid, plane, self.heap.now)
            self.settle()

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of the process."""
        return math.inf if self.closed else min(self.links.next_deadline, self._protocol.next_deadline)

    def _tick(self) -> None:
        now = self.heap.now
        if now < self.suspended_until:
            self.heap.at(self.suspended_until, self._tick)
            return
        if self.closed:
            return
        if now >= self._protocol.next_deadline:
            self._protocol.tick(now)
        if now >= self.links.next_deadline:
            self.links.tick(now)
        self.settle()

    # -- the links' port --------------------------------------------------------------------------------------

    def send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        is_accepted = self.network.send(self.uid, uid, plane, [first] if body is None else [first, body])
        if is_accepted and isinstance(body, ZeroCopyBody):
            self.resends_under_lease += uid in body.sent_to
            body.sent_to.add(uid)
        return is_accepted

    def carried(self, uid: int, plane: int) -> int | None:  # noqa: ARG002
        return None

    def renew(self, uid: int, plane: int) -> None:
        self.network.renew(self.uid, uid, plane)

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        self._protocol.deliver(message, body, now)

    def consumed(self, uid: int, size: int) -> None:
        allowed = self.credits.consumed(uid, size)
        if allowed is not None:
            self.call(lambda: self.links.sender.grant(uid, allowed, self.heap.now))

    # -- the sender's port ------------------------------------------------------------------------------------

    def bulk(self, uids: Sequence[int], message: QueuedMessage) -> None:
        for uid in uids:
            self.links.sender.bulk(uid, message, self.heap.now)

    def withhold(self, uid: int, key: ExchangeKey) -> None:
        self.links.sender.withhold(uid, key, self.heap.now)

    def request_acks(self) -> None:
        self.links.sender.request_acks(self.heap.now)

    def unacked_peers(self) -> list[int]:
        """Returns the same as `LinkSender.unacked_peers`."""
        return self.links.sender.unacked_peers()


class ZeroCopyBody:
    """The body of a message that is sent without a copy (`HeldBody`): like a zero-copy socket, the network reads the
    memory only when the message arrives."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.sent_to: set[int] = set()
        """uids to which it was sent."""

    def __len__(self) -> int:
        return self.buffer.nbytes


def hold_body(body: memoryview, shared: bool) -> Body:
    """Returns the body of a message, as `link_state.Hold` does."""
    zero_copy: HeldBody = ZeroCopyBody(body)
    return zero_copy if shared else bytes(body)
