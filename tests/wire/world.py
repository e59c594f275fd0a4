"""Memberships of a run over a simulated network: messages get lost, come late or twice, processes die and return."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from decentnode.wire import codec
from decentnode.wire.generation import Broken, Generation, Going, Install, Limits, Name, Outside
from decentnode.wire.membership import Membership
from decentnode.wire.messages import MAX_ROUND, NO_RUN, Message

RUN = b"theirrun"
TICK, SUSPECT = 0.25, 2.0


@dataclass
class Process:
    """A membership, and an owner that turns rounds while it may."""

    membership: Membership
    frozen: bool = False
    inbox: list[Message] = field(default_factory=list)
    """What came while it was frozen."""
    going: list[Generation] = field(default_factory=list)
    broken: int = 0
    waits_since: float | None = None
    """When its training began to wait for others."""

    @property
    def bound_to(self) -> Name | None:
        """The generation that this process is in, or got ready for and did not give up."""
        membership = self.membership
        if membership.steady:
            return membership.generation.name
        next_one = membership.message_generation
        got_ready = membership.stage in ("committing", "committed") and next_one != membership.generation
        return next_one.name if got_ready else None


class World:
    """Processes and a network with a virtual clock."""

    membership: type[Membership] = Membership

    def __init__(
        self, num_nodes: int, *, seed: int = 0, loss: float = 0.0, min_nodes: int | None = None,
        rounds: int | None = None, needed: Collection[int] = (), merges: bool = False,
    ) -> None:
        """merges: all sides of a broken network go on; the least number of nodes is one then, unless it is given."""
        self.num_nodes, self.loss, self.random = num_nodes, loss, random.Random(seed)
        least = (1 if merges else num_nodes // 2 + 1) if min_nodes is None else min_nodes
        last = MAX_ROUND if rounds is None else rounds
        self.limits = Limits(SUSPECT, 20.0, least, last, frozenset(needed), merges)
        self.draw = random.Random(f"{seed} origins").randbytes
        self.now = 100.0
        self.averages = True
        """With `merges`: whether members come to an end with averaging their models."""
        self.processes = {uid: Process(self.make(uid, RUN)) for uid in range(num_nodes)}
        self.cut: set[frozenset[int]] = set()
        self.late = 0.0
        """Share of messages of which another copy comes seconds later."""
        self.said: list[Message] = []
        self._queue: list[tuple[float, int, int, Message]] = []
        self._order = itertools.count()
        self.agreed: dict[int, Generation] = {}
        """By number, the latest of each."""
        self.known: dict[Name, Generation] = {}
        self.installed: set[tuple[int, Name]] = set()
        """(uid, generation) of all times."""

    def use(self, membership: type[Membership]) -> None:
        """Another one from the start; before anything happened."""
        self.membership = membership
        self.processes = {uid: Process(self.make(uid, RUN)) for uid in range(self.num_nodes)}

    def make(self, uid: int, run: bytes) -> Membership:
        return self.membership(uid, self.num_nodes, self.limits, draw=self.draw, digest="d", run=run)

    # -- faults -----------------------------------------------------------------------------------------------

    def kill(self, uid: int) -> None:
        self.processes.pop(uid, None)

    def restart(self, uid: int) -> None:
        process = self.processes[uid] = Process(self.make(uid, NO_RUN))
        self._handle(uid, process.membership.leave(self.now, "started again"))

    def freeze(self, uid: int) -> None:
        if uid in self.processes:
            self.processes[uid].frozen = True

    def thaw(self, uid: int) -> None:
        process = self.processes.get(uid)
        if process is not None and process.frozen:
            process.frozen = False
            for message in process.inbox:
                self.take(uid, message)
            process.inbox.clear()

    def cut_off(self, uids: Collection[int]) -> None:
        """These and the others no longer hear each other."""
        others = set(range(self.num_nodes)) - set(uids)
        self.cut |= {frozenset((a, b)) for a in uids for b in others}

    # -- time -------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def step(self) -> None:
        self.now += TICK
        while self._queue and self._queue[0][0] <= self.now:
            _, _, to, message = heapq.heappop(self._queue)
            process = self.processes.get(to)
            if process is None:
                continue
            if process.frozen:
                process.inbox.append(message)
            else:
                self.take(to, message)
        for uid, process in sorted(self.processes.items()):
            if not process.frozen:
                self._turn_round(process)
                self._tick(uid, process)

    def _tick(self, uid: int, process: Process) -> None:
        """By what `next_deadline` says alone, so that whatever that forgets is never done."""
        membership, whom = process.membership, tuple(self.waited_for(uid))
        if not whom:
            process.waits_since = None
        elif process.waits_since is None:
            process.waits_since = self.now
        since = process.waits_since
        if self.now >= membership.next_deadline(since):
            self._handle(uid, membership.tick(self.now, whom, math.inf if since is None else since))
            assert membership.next_deadline(since) > self.now, "what was due has been done"

    def _turn_round(self, process: Process) -> None:
        membership = process.membership
        if membership.steady and membership.position < self.limits.rounds and not membership.stopping:
            membership.position += self.random.random() < 0.3
        if self.limits.merges and self.averages and membership.steady and self.random.random() < 0.7:
            membership.lineage = membership.generation.name  # its owner has averaged with the others, where it had to

    def waited_for(self, uid: int) -> Iterable[int]:
        """Whom the training of `uid` waits for."""
        membership = self.processes[uid].membership
        return [other for other in membership.generation.members if other != uid and other not in membership.left]

    def take(self, uid: int, message: Message) -> None:
        self._handle(uid, self.processes[uid].membership.receive(codec.decode(codec.encode(message)), self.now))

    def _handle(self, uid: int, events: list[object]) -> None:
        process = self.processes[uid]
        for event in events:
            if isinstance(event, Install):
                self.installed.add((uid, event.generation.name))
                self._handle(uid, process.membership.installed(event.generation, self.now))
            elif isinstance(event, Going):
                self._entered(process, event.generation)
            elif isinstance(event, Broken):
                process.broken += 1
            else:
                assert isinstance(event, Outside)
        self.send(uid, process.membership)

    def send(self, uid: int, membership: Membership) -> None:
        outbox, membership.outbox = membership.outbox, []
        for to, message in outbox:
            assert to != uid
            self.said.append(message)
            if frozenset((uid, to)) not in self.cut and self.random.random() >= self.loss:
                self._post(to, message, self.random.uniform(0.0, 0.3))
                if self.late and self.random.random() < self.late:
                    self._post(to, message, self.random.uniform(0.3, 6 * SUSPECT))

    def _post(self, to: int, message: Message, delay: float) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), to, message))

    # -- what must hold ---------------------------------------------------------------------------------------

    def _entered(self, process: Process, generation: Generation) -> None:
        process.going.append(generation)
        known = self.known.setdefault(generation.name, generation)
        assert known == generation, "two generations of one name"
        self.agreed[generation.number] = generation
        trains = generation.first_round < self.limits.rounds and not generation.stopping
        if trains:
            assert len(generation.members) >= self.limits.min_nodes, "too few go on"
            assert self.limits.needed.issubset(generation.members), "clients go on without their server"
        for other in generation.members:  # nobody goes before everybody is ready
            assert (other, generation.name) in self.installed, "went before all were ready"
        if process.membership.uid in generation.fresh:
            process.membership.fresh = False  # its owner takes the mean of the others
        assert len(self.in_force()) <= 1 or self.limits.min_nodes <= self.num_nodes // 2, "two are in force"

    def in_force(self) -> list[Generation]:
        """Those that have all their members, and in which rounds may begin."""
        bound: dict[Name, set[int]] = {}
        for uid, process in self.processes.items():
            name = process.bound_to
            if name is not None:
                bound.setdefault(name, set()).add(uid)
        entered = [self.known[name] for name in bound if name in self.known]
        whole = [each for each in entered if bound[each.name] >= {*each.members}]
        return [each for each in whole if each.first_round < self.limits.rounds and not each.stopping]

    def settled(self) -> bool:
        """Whether all that live are steady in one generation, which they make up."""
        found = {process.membership.generation for process in self.processes.values()}
        steady = all(process.membership.steady for process in self.processes.values())
        return steady and len(found) == 1 and next(iter(found)).members == tuple(sorted(self.processes))
