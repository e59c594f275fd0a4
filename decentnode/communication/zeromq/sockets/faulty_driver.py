"""A `LinkDriver` that injects the link faults of an experiment (decentnode/faults): it loses, damages, repeats, delays
and reorders messages. The faults act between the links and the sockets, so that the links have to recover from them."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import LinkFaults
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL, Body
from decentnode.communication.zeromq.sockets.link_driver import LinkDriver, LinkSizes
from decentnode.communication.zeromq.sockets.security import Security
from decentnode.faults import (
    ActiveFault,
    Break,
    Corrupt,
    Cut,
    Delay,
    Drop,
    Duplicate,
    FaultTimeline,
    HalfOpen,
    MessageFate,
    MessageFates,
    Reorder,
    damaged,
)
from decentnode.wire.session import Session

MAX_HELD = 1000
"""Most delayed messages on one connection, as many as wait in a socket; further ones are refused."""
RETRY_SECONDS = 0.002
"""Time after which a delayed message is tried again if the socket was full."""
Connection = tuple[int, int]
"""(uid, plane)"""


@dataclass(order=True)
class _DelayedMessage:
    """A message that is being delayed."""

    due: float
    order: int
    to: Connection = field(compare=False)
    first: bytes = field(compare=False)
    body: bytes | None = field(compare=False)


class FaultyDriver(LinkDriver):
    """A driver that injects faults into the messages between its links and its sockets."""

    def __init__(
        self, session: Session, counters: Counters, sizes: LinkSizes, security: Security | None,
        process: SharedProcess | None, faults: LinkFaults,
    ) -> None:
        """faults: the fault plan and its seed. Other parameters as for `LinkDriver`."""
        super().__init__(session, counters, sizes, security, process)
        self._uid = session.uid
        kinds = Cut, Break, HalfOpen, Delay, Drop, Corrupt, Duplicate, Reorder
        self._timeline = FaultTimeline(faults.plan, session.uid, kinds, self._fault_began)
        self._fates = MessageFates(faults.seed)
        self.touched: dict[str, int] = {}
        """Kind of fault -> number of messages that it changed; a cut or half-open connection loses them."""
        self._plan = faults.plan
        self._half_open: set[Connection] = set()
        """Half-open connections, which lose every message."""
        self._broken: list[Connection] = []
        """Connections to break at the next tick."""
        self._delayed: list[_DelayedMessage] = []
        """A heap of the delayed messages."""
        self._delayed_count: dict[Connection, int] = {}
        """Connection -> number of its delayed messages."""
        self._last_due: dict[Connection, float] = {}
        """Connection -> when its last delayed message that keeps its order is due."""
        self._refused: set[Connection] = set()
        self._order = itertools.count()
        self._due = math.inf
        """When the first message of `_delayed` is due or a connection breaks; read without the lock."""
        self.send, self.renew = self._send, self._renew

    # -- base.FaultInjector -----------------------------------------------------------------------

    def begin(self, zero: float, again: bool = False) -> None:
        """Notes that the run began at `zero`. again: whether this is a restarted process of the node."""
        with self.sending():
            self._timeline.begin(zero, clock.now(), again)

    def enter(self, round: int) -> None:
        """Notes that the node begins a round."""
        with self.sending():
            self._timeline.enter(round, clock.now())

    def _fault_began(self, found: ActiveFault) -> None:
        fault = found.fault
        self._counters.on_event("fault", None, fault.as_json)
        if isinstance(fault, Break | HalfOpen) and fault.source == self._uid:
            to = fault.to, CONTROL if fault.plane == "control" else BULK
            if isinstance(fault, HalfOpen):
                self._half_open.add(to)
            else:
                self._broken.append(to)
                self._due = -math.inf

    # -- messages to the sockets ------------------------------------------------------------------------------

    def _send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        """Replaces `PeerSockets.send`: sends, changes, delays or drops a message, as its faults say."""
        now, to = clock.now(), (uid, plane)
        found = self._timeline.in_effect(now)
        if to in self._half_open:
            self._count_fault("half_open")
            return True
        if not found and to not in self._delayed_count:
            return self.io.send(uid, plane, first, body)
        fate = self._fates.of(((each.index, each.fault) for each in found), self._uid, uid, plane)
        if fate.fault >= 0:
            self._count_fault(self._plan[fate.fault].do)
        if fate.lost:
            return True
        due = now + fate.overtaken if fate.overtaken else max(now + fate.later, self._last_due.get(to, 0.0))
        if due > now:
            return self._delay(due, to, fate, first, body)
        if fate.flipped is not None:
            first, body = _flip_bits(fate, first, body)
        taken = self.io.send(uid, plane, first, body)
        if taken and fate.twice:
            self.io.send(uid, plane, first, body)
        return taken

    def _count_fault(self, kind: str) -> None:
        self.touched[kind] = self.touched.get(kind, 0) + 1

    def _delay(self, due: float, to: Connection, fate: MessageFate, first: bytes, body: Body | None) -> bool:
        if self._delayed_count.get(to, 0) >= MAX_HELD:
            self._refused.add(to)
            return False
        # copied, because the body's memory may change once the message is acknowledged, which may happen for another
        # transmission of it before this one is sent
        content = None if body is None else _bytes(body)
        if fate.flipped is not None:
            first, content = _flip_bits(fate, first, content)
        for _ in range(1 + fate.twice):
            heapq.heappush(self._delayed, _DelayedMessage(due, next(self._order), to, first, content))
            self._delayed_count[to] = self._delayed_count.get(to, 0) + 1
        if not fate.overtaken:
            self._last_due[to] = due
        if due < self._due:
            self._due = due
            self.io.due_by(due)
        return True

    def _renew(self, uid: int, plane: int) -> None:
        """Replaces `PeerSockets.renew`: what is in flight is lost, including delayed messages."""
        to = uid, plane
        self._half_open.discard(to)
        self._refused.discard(to)
        self._last_due.pop(to, None)
        if self._delayed_count.pop(to, 0):
            self._delayed = [each for each in self._delayed if each.to != to]
            heapq.heapify(self._delayed)
        self.io.peers.renew(uid, plane)

    @property
    def next_deadline(self) -> float:
        return min(super().next_deadline, self._due)

    def tick(self, now: float) -> None:
        broken, self._broken = self._broken, []
        for uid, plane in broken:
            self.disconnected(uid, plane)
        while self._delayed and self._delayed[0].due <= now:
            delayed = heapq.heappop(self._delayed)
            if not self.io.send(*delayed.to, delayed.first, delayed.body):
                self._retry(delayed, now)
                break
            self._release(delayed.to)
        self._due = -math.inf if self._broken else self._delayed[0].due if self._delayed else math.inf
        super().tick(now)

    def _retry(self, delayed: _DelayedMessage, now: float) -> None:
        """Delays all due messages of a full socket a little longer, in unchanged order."""
        late = [each for each in self._delayed if each.to == delayed.to and each.due <= now]
        others = [each for each in self._delayed if not (each.to == delayed.to and each.due <= now)]
        for each in (delayed, *late):
            each.due = now + RETRY_SECONDS
        self._delayed = [*others, delayed, *late]
        heapq.heapify(self._delayed)
        self._last_due[delayed.to] = max(self._last_due.get(delayed.to, 0.0), now + RETRY_SECONDS)

    def _release(self, to: Connection) -> None:
        self._delayed_count[to] -= 1
        if not self._delayed_count[to]:
            del self._delayed_count[to]
        if to in self._refused:
            self._refused.discard(to)
            self.writable(*to)


def _bytes(body: Body) -> bytes:
    return body if isinstance(body, bytes) else bytes(body.buffer)


def _flip_bits(fate: MessageFate, first: bytes, body: Body | None) -> tuple[bytes, bytes | None]:
    assert fate.flipped is not None
    frames = damaged([first] if body is None else [first, _bytes(body)], fate.flipped)
    return frames[0], frames[1] if body is not None else None
