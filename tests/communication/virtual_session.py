"""Whole nodes without sockets or threads on a virtual network: session, links, inbox, means, barriers, reports and
membership, put together as the transport does, and driven by nothing but messages and the deadlines that they name."""

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
from tests.communication.virtual_links import RUN, End

TURNS, ELEMENTS, CHUNK_BYTES = 4, 600, 1024
WINDOW = 4 * (CHUNK_BYTES + MESSAGE_COST)
GRACE_SECONDS, CLOSE_SECONDS, CLOSING_LOOK_SECONDS = 5.0, 5.0, 0.02
PHASES = ("join", "barrier", "mean", "report")
SPEC = Schema(ELEMENTS, {"x": TensorSpec(torch.float32, ELEMENTS)}, True)


class Facts(RunFacts):
    """Facts whose waits are steps of one thread."""

    def __init__(self, notified: Callable[[], None]) -> None:
        super().__init__()
        self._notified = notified

    def notify(self) -> None:
        self._notified()


class World:
    """What all nodes of a run have in common, for what must hold."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.arrived: dict[tuple[Name, int], set[int]] = {}
        """(generation, turn) -> who is at its barrier."""


def share(uid: int, turn: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * turn + uid))


def expected_mean(members: tuple[int, ...], turn: int) -> tuple[Tensor, int]:
    """As the in-process twin has it."""
    hub = Hub(len(members))
    hub.generation = Generation(0, members)
    hub.means["k"] = {uid: share(uid, turn) for uid in members}
    return hub.tree_mean("k")


class SessionEnd(End):
    """One node: it joins, then passes a barrier and takes a mean in every turn, reports, and leaves."""

    def __init__(self, uid: int, world: World, network: VirtualNetwork, timeout_seconds: float,
                 limits: Limits | None) -> None:  # fmt: skip
        super().__init__(uid, world.n, network, WINDOW, secure=False)
        self.world, self.timeout_seconds = world, timeout_seconds
        self.facts = Facts(lambda: self.heap.after(0.0, self._go_on))
        self.inbox = InboxState((SPEC,), CHUNK_BYTES, self.facts, self.counters, self)
        maker = MessageMaker(self.session, ZeroMQConfig(checksum="xxh3"))
        self.reconfiguration: Reconfiguration | None = None
        if limits is not None:
            draw = random.Random(f"{uid} origins").randbytes
            membership = Membership(uid, world.n, limits, draw=draw, digest="d")
            self.reconfiguration = Reconfiguration(
                membership, self.links.sender, self.facts, self.counters, self.facts.notify
            )
            self.facts.on_wait_began = lambda _since: self._arm()
        self.protocol = NodeProtocol(ProtocolParts(
            session=self.session, links=self.links, inbox=self.inbox, facts=self.facts, counters=self.counters,
            maker=maker, hold=copied, consumed=self.consumed, has_room=self.has_room, joined=lambda: None,
            reconfiguration=self.reconfiguration,
        ))  # fmt: skip
        self.protocol.take_slot = self._no_slots
        self.collectives = self._take_collectives()
        self.turn, self.turns, self.phase = 0, 0, ""
        self.on_phase: Callable[[], None] = lambda: None
        self.reports: dict[int, dict[str, float | int | str]] = {}
        self.error: Exception | None = None
        self.over = self.dead = False
        self.thaws_at = 0.0
        self._wait: Wait | None = None
        self._story = self._run()

    def _session(self, n: int) -> Session:
        return Session(self.uid, n, "d", RUN if self.uid == 0 else None)

    @staticmethod
    def _no_slots(message: Slot) -> None:
        raise AssertionError(message)

    def _take_collectives(self) -> CollectiveState:
        made = CollectiveState(self.session, CHUNK_BYTES, self.facts, self.protocol)
        self.protocol.collectives = made
        return made

    @property
    def next_deadline(self) -> float:
        return min(self.links.next_deadline, self.protocol.next_deadline)

    def _do_what_is_due(self) -> None:
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
        self._go_on()

    def _enters(self, phase: str) -> None:
        self.phase = phase
        self.on_phase()

    def _run(self) -> Iterator[Wait]:
        self._enters("join")
        limit = self.timeout_seconds + (GRACE_SECONDS if self.uid else 0.0)
        yield JoinWait(self.facts, lambda: self.protocol.joined, lambda: self.protocol.give_up(self.heap.now), limit,
                       GRACE_SECONDS, self.heap.now)  # fmt: skip
        while True:
            try:
                yield from self._turns()
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

    def _turns(self) -> Iterator[Wait]:
        members = self.session.members
        while self.turn < TURNS:
            if self.reconfiguration is not None:
                self.reconfiguration.enter(self.turn)
            self._enters("barrier")
            at = self.world.arrived.setdefault((self.session.name, self.turn), set())
            at.add(self.uid)
            yield self.collectives.enter_barrier("turn", self.timeout_seconds, self.heap.now)
            assert at == set(members), "a barrier is passed before all are there"
            self._enters("mean")
            key = f"turn-{self.turn}"
            self.collectives.begin_mean(key, share(self.uid, self.turn), self.heap.now)
            wait = MeanWait(self.collectives, key, False, self.timeout_seconds, self.heap.now)
            yield wait
            mean, contributors = wait.result or (None, 0)
            expected, count = expected_mean(members, self.turn)
            assert mean is not None and torch.equal(mean, expected) and contributors == count, "bit for bit"
            self.turn += 1
            self.turns += 1
        self._enters("report")
        self.collectives.report({"uid": self.uid, "turns": self.turns}, self.heap.now)
        yield ReportsWait(self.collectives, self.timeout_seconds, self.heap.now)
        self.reports = self.collectives.reports()

    def _regroup(self) -> Iterator[Wait]:
        of = self.reconfiguration
        assert of is not None
        wait = GenerationWait(of, 10 * self.timeout_seconds, 20 * self.timeout_seconds, self._put_away, self.heap.now)
        yield wait
        assert wait.generation is not None
        of.mark_caught_up()
        self.turn = wait.generation.first_round

    def _put_away(self, generation: Generation) -> None:
        def restart(fresh: Collection[int]) -> None:
            self.links.restart(fresh)
            self.credits.clear()
            self.held.clear()

        def begin() -> None:
            self.collectives = self._take_collectives()

        self.protocol.install(generation, restart, begin, self.heap.now)

    def _close(self) -> Iterator[Wait]:
        left = RunningTime(CLOSE_SECONDS, self.heap.now)
        while not self.links.finished(self.heap.now) and not left.over(self.heap.now):
            self._arm()
            yield _Until(self.heap.now + CLOSING_LOOK_SECONDS)
        self.links.goodbye(self.heap.now)
        self.over = True

    # -- what drives it ---------------------------------------------------------------------------------------

    def _awake(self, again: Callable[[], None]) -> bool:
        """Whether the node runs; a frozen one does `again` when it thaws, a dead one never."""
        if self.dead:
            return False
        if self.heap.now < self.thaws_at:
            self.heap.at(self.thaws_at, again)
            return False
        return True

    def _receive(self, plane: int, frames: list[memoryview], uid: int | None) -> None:
        if not self.over and self._awake(lambda: self._receive(plane, frames, uid)):
            super()._receive(plane, frames, uid)

    def _writable(self, uid: int, plane: int) -> None:
        if self._awake(lambda: self._writable(uid, plane)):
            super()._writable(uid, plane)

    def _tick(self) -> None:
        if not self.over and self._awake(self._tick):
            super()._tick()

    def consumed(self, uid: int, size: int) -> None:
        if self.held[uid]:  # not what a generation before this one held
            super().consumed(uid, size)

    def _go_on(self) -> None:
        if self.over or self.error is not None or not self._awake(self._go_on):
            return
        try:
            while not self.dead and self.heap.now >= self.thaws_at:
                if self._wait is not None and not self._wait.step(self.heap.now):
                    self._look_again(self._wait, self._wait.deadline)
                    break
                self._wait = next(self._story, None)
                if self._wait is None:
                    break
        except (PeerLost, AssemblyError, Regrouping) as error:
            try:
                self._wait = self._story.throw(error)  # type: ignore[attr-defined]
                self.heap.after(0.0, self._go_on)
            except (PeerLost, AssemblyError) as fatal:
                self.error = fatal
        if not self.dead:
            self._arm()

    def _look_again(self, wait: Wait, due: float) -> None:
        def look() -> None:
            if self._wait is wait and wait.deadline == due:
                self._go_on()

        assert due > self.heap.now
        self.heap.at(due, look)

    def die(self) -> None:
        self.dead = True
        self.network.dead.add(self.uid)

    def freeze(self, seconds: float) -> None:
        self.thaws_at = self.heap.now + seconds
        self.heap.at(self.thaws_at, self._go_on)


class _Until(Wait):
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def step(self, now: float) -> bool:
        return now >= self.deadline
