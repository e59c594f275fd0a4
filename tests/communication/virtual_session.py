"""Whole nodes without sockets or threads on a virtual network. They consist of session, links, inbox, means, barriers,
reports and membership, as in the transport, and run only when a message arrives or a deadline that they name passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from decentnode.communication.inproc import Hub
from decentnode.communication.parts import Schema
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.run_state import RunFacts, Wait
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.collective_state import CollectiveState, JoinWait, MeanWait, ReportsWait
from decentnode.communication.zeromq.protocol.link_state import copied
from decentnode.communication.zeromq.protocol.message_maker import MessageMaker
from decentnode.communication.zeromq.protocol.node_protocol import NodeProtocol, ProtocolParts
from decentnode.communication.zeromq.protocol.reconfiguration import GenerationWait, Reconfiguration
from decentnode.communication.zeromq.sockets.running_time import RunningTime
from decentnode.errors import AssemblyError, PeerLost, Regrouping
from decentnode.payload import TensorSpec
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.wire.generation import Generation, Limits, Name
from decentnode.wire.membership import Membership
from decentnode.wire.messages import Message, Slot
from decentnode.wire.session import Session
from tests.communication.virtual_links import RUN, VirtualNode

TURNS, ELEMENTS, CHUNK_BYTES = 4, 600, 1024
WINDOW = 4 * (CHUNK_BYTES + MESSAGE_COST)
GRACE_SECONDS, CLOSE_SECONDS, CLOSING_LOOK_SECONDS = 5.0, 5.0, 0.02
PHASES = ("join", "barrier", "mean", "report")
SPEC = Schema(ELEMENTS, {"x": TensorSpec(torch.float32, ELEMENTS)}, True)


class CallbackFacts(RunFacts):
    """Facts that call a function whenever something changed on which a wait may depend."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._on_change = on_change

    def notify(self) -> None:
        self._on_change()


class RunRecord:
    """What all nodes of a run write down, to check invariants over all of them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.arrived: dict[tuple[Name, int], set[int]] = {}
        """(generation, turn) -> the nodes that have arrived at the barrier of this turn."""


def contribution(uid: int, turn: int) -> Tensor:
    """Returns the tensor of which node `uid` takes the mean with the others in a turn."""
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * turn + uid))


def expected_mean(members: tuple[int, ...], turn: int) -> tuple[Tensor, int]:
    """Returns the mean and the number of contributors that the in-process twin computes, which must be equal to the
    bit."""
    hub = Hub(len(members))
    hub.generation = Generation(0, members)
    hub.means["k"] = {uid: contribution(uid, turn) for uid in members}
    return hub.take_mean("k")


class SessionNode(VirtualNode):
    """A node that joins, passes a barrier and takes a mean in every turn, reports, and leaves."""

    def __init__(self, uid: int, record: RunRecord, network: VirtualNetwork, timeout_seconds: float,
                 limits: Limits | None) -> None:  # fmt: skip
        super().__init__(uid, record.n, network, WINDOW, secure=False)
        self.record, self.timeout_seconds = record, timeout_seconds
        self.closing = False
        """Whether the means are those of the end of a run."""
        self.facts = CallbackFacts(lambda: self.heap.after(0.0, self._advance))
        self.inbox = InboxState((SPEC,), CHUNK_BYTES, self.facts, self.counters, self)
        maker = self.maker = MessageMaker(self.session, ZeroMQConfig(checksum="xxh3"))
        self.reconfiguration: Reconfiguration | None = None
        if limits is not None:
            draw = random.Random(f"{uid} origins").randbytes
            membership = Membership(uid, record.n, limits, draw=draw, digest="d")
            self.reconfiguration = Reconfiguration(
                membership, self.links.sender, self.facts, self.counters, self.facts.notify
            )
            self.facts.on_wait_began = lambda _since: self._arm()
        self.protocol = NodeProtocol(ProtocolParts(
            session=self.session, links=self.links, inbox=self.inbox, facts=self.facts, counters=self.counters,
            maker=maker, hold=copied, consumed=self.consumed, has_room=self.has_room, joined=lambda: None,
            reconfiguration=self.reconfiguration,
        ))  # fmt: skip
        self.protocol.take_slot = self._refuse_slot
        self.collectives = self._new_collectives()
        self.turn, self.turns_completed, self.phase = 0, 0, ""
        self.on_phase: Callable[[], None] = lambda: None
        """Called when the node enters a phase; set by tests."""
        self.reports: dict[int, dict[str, float | int | str]] = {}
        self.error: Exception | None = None
        self.closed = self.dead = False
        self.thaws_at = 0.0
        """Until when the node is frozen."""
        self._steps = self._run()

    def _session(self, n: int) -> Session:
        return Session(self.uid, n, "d", RUN if self.uid == 0 else None)

    @staticmethod
    def _refuse_slot(message: Slot) -> None:
        raise AssertionError(message)

    def _new_collectives(self) -> CollectiveState:
        collectives = CollectiveState(self.session, CHUNK_BYTES, self.facts, self.protocol)
        self.protocol.collectives = collectives
        return collectives

    @property
    def next_deadline(self) -> float:
        return min(self.links.next_deadline, self.protocol.next_deadline)

    def _do_due_work(self) -> None:
        now = self.heap.now
        if now >= self.protocol.next_deadline:
            self.protocol.tick(now)
        if now >= self.links.next_deadline:
            self.links.tick(now)

    # -- the ports --------------------------------------------------------------------------------------------

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        if body is not None:
            self.held[message.source] += body.nbytes + MESSAGE_COST
            assert self.held[message.source] <= WINDOW
        self.protocol.deliver(message, body, now)

    def ask(self, uids: list[int]) -> None:
        self.protocol.ask_overdue(uids, self.heap.now)

    def ready(self) -> None:
        self.facts.notify()

    # -- the node ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._advance()

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.on_phase()

    def _run(self) -> Iterator[Wait]:
        self._enter_phase("join")
        limit = self.timeout_seconds + (GRACE_SECONDS if self.uid else 0.0)
        yield JoinWait(self.facts, lambda: self.protocol.joined, lambda: self.protocol.give_up(self.heap.now), limit,
                       GRACE_SECONDS, self.heap.now)  # fmt: skip
        while True:
            try:
                yield from self._make_turns()
                break
            except (Regrouping, PeerLost) as lost:
                if self.reconfiguration is None:
                    raise
                if not isinstance(lost, Regrouping):
                    if not lost.missing:
                        raise
                    self.reconfiguration.suspect(lost.missing, str(lost), self.heap.now)
            yield from self._regroup()
        yield from self._close()

    def _make_turns(self) -> Iterator[Wait]:
        members = self.session.members
        while self.turn < TURNS:
            if self.reconfiguration is not None:
                self.reconfiguration.enter(self.turn)
            self._enter_phase("barrier")
            arrived = self.record.arrived.setdefault((self.session.name, self.turn), set())
            arrived.add(self.uid)
            yield self.collectives.enter_barrier("turn", self.timeout_seconds, self.heap.now)
            assert arrived == set(members), "the node passed a barrier before all had arrived"
            self._enter_phase("mean")
            key = f"turn-{self.turn}"
            self.collectives.begin_mean(key, contribution(self.uid, self.turn), self.heap.now)
            wait = MeanWait(self.collectives, key, self.closing, self.timeout_seconds, self.heap.now)
            yield wait
            mean, contributors = wait.result or (None, 0)
            expected, count = expected_mean(members, self.turn)
            assert mean is not None and torch.equal(mean, expected) and contributors == count, "the mean has other bits"
            self.turn += 1
            self.turns_completed += 1
        self._enter_phase("report")
        self.collectives.report({"uid": self.uid, "turns": self.turns_completed}, self.heap.now)
        yield ReportsWait(self.collectives, self.timeout_seconds, self.heap.now)
        self.reports = self.collectives.reports()

    def _regroup(self) -> Iterator[Wait]:
        reconfiguration = self.reconfiguration
        assert reconfiguration is not None
        wait = GenerationWait(reconfiguration, 10 * self.timeout_seconds, 20 * self.timeout_seconds, self._install,
                              self.heap.now)  # fmt: skip
        yield wait
        assert wait.generation is not None
        reconfiguration.mark_caught_up()
        self.turn = wait.generation.first_round

    def _install(self, generation: Generation) -> None:
        def restart(fresh: Collection[int]) -> None:
            self.links.restart(fresh)
            self.credits.clear()
            self.held.clear()

        def begin() -> None:
            self.collectives = self._new_collectives()

        self.protocol.install(generation, restart, begin, self.heap.now)

    def _close(self) -> Iterator[Wait]:
        left = RunningTime(CLOSE_SECONDS, self.heap.now)
        while not self.links.finished(self.heap.now) and not left.over(self.heap.now):
            self._arm()
            yield _Until(self.heap.now + CLOSING_LOOK_SECONDS)
        self.links.goodbye(self.heap.now)
        self.closed = True

    # -- calls of the network and the event queue -------------------------------------------------------------

    def _is_awake(self, retry: Callable[[], None]) -> bool:
        """Returns whether the node runs. If it is frozen, `retry` is called when it thaws; if it is dead, never."""
        if self.dead:
            return False
        if self.heap.now < self.thaws_at:
            self.heap.at(self.thaws_at, retry)
            return False
        return True

    def _receive(self, plane: int, frames: list[memoryview], uid: int | None) -> None:
        if not self.closed and self._is_awake(lambda: self._receive(plane, frames, uid)):
            super()._receive(plane, frames, uid)

    def _writable(self, uid: int, plane: int) -> None:
        if self._is_awake(lambda: self._writable(uid, plane)):
            super()._writable(uid, plane)

    def _tick(self) -> None:
        if not self.closed and self._is_awake(self._tick):
            super()._tick()

    def consumed(self, uid: int, size: int) -> None:
        if self.held[uid]:  # bytes of an earlier generation are no longer counted
            super().consumed(uid, size)

    def _advance(self) -> None:
        if self.closed or self.error is not None or not self._is_awake(self._advance):
            return
        try:
            while not self.dead and self.heap.now >= self.thaws_at:
                if self._wait is not None and not self._wait.step(self.heap.now):
                    self._step_at(self._wait, self._wait.deadline)
                    break
                self._wait = next(self._steps, None)
                if self._wait is None:
                    break
        except (PeerLost, AssemblyError, Regrouping) as error:
            try:
                self._wait = self._steps.throw(error)  # type: ignore[attr-defined]
                self.heap.after(0.0, self._advance)
            except (PeerLost, AssemblyError) as fatal:
                self.error = fatal
        if not self.dead:
            self._arm()

    def die(self) -> None:
        self.dead = True
        self.network.dead.add(self.uid)

    def freeze(self, seconds: float) -> None:
        self.thaws_at = self.heap.now + seconds
        self.heap.at(self.thaws_at, self._advance)


class _Until(Wait):
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def step(self, now: float) -> bool:
        return now >= self.deadline
