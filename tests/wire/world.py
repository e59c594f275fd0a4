"""A run's `Membership` state machines on a simulated network with a virtual clock. Messages are lost, delayed or
duplicated; processes die, freeze and are restarted. The invariants of agreement are checked at every step."""

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
"""Seconds per step of the virtual clock, and `Limits.suspect_seconds`."""


@dataclass
class Process:
    """A node's process: its membership, and the state of the training that owns it."""

    membership: Membership
    frozen: bool = False
    inbox: list[Message] = field(default_factory=list)
    """Messages that arrived while the process was frozen."""
    entered: list[Generation] = field(default_factory=list)
    """Every generation that the process entered (`Going`), in order."""
    num_broken: int = 0
    """How many `Broken` events its membership has returned."""
    waiting_since: float | None = None
    """When its training began to wait for other nodes; None while it does not wait."""

    @property
    def bound_to(self) -> Name | None:
        """The name of the generation that this process is in, or got ready for and did not abandon; else None."""
        membership = self.membership
        if membership.steady:
            return membership.generation.name
        pending = membership.message_generation
        got_ready = membership.stage in ("committing", "committed") and pending != membership.generation
        return pending.name if got_ready else None


class World:
    """Processes and a network with a virtual clock."""

    membership_class: type[Membership] = Membership

    def __init__(
        self, num_nodes: int, *, seed: int = 0, loss: float = 0.0, min_nodes: int | None = None,
        rounds: int | None = None, needed: Collection[int] = (), merges: bool = False,
    ) -> None:
        """loss: share of messages that are lost. min_nodes: by default a majority, or 1 with `merges`. needed, merges:
        as in `Limits`."""
        self.num_nodes, self.loss, self.random = num_nodes, loss, random.Random(seed)
        least = (1 if merges else num_nodes // 2 + 1) if min_nodes is None else min_nodes
        last = MAX_ROUND if rounds is None else rounds
        self.limits = Limits(SUSPECT, 20.0, least, last, frozenset(needed), merges)
        self.random_bytes = random.Random(f"{seed} origins").randbytes
        self.now = 100.0
        self.members_average = True
        """With `merges`: whether members complete the averaging of their models after a merge."""
        self.processes = {uid: Process(self._new_membership(uid, RUN)) for uid in range(num_nodes)}
        self.broken_links: set[frozenset[int]] = set()
        """Pairs of uids between which no message passes."""
        self.late_share = 0.0
        """Share of messages of which a second copy arrives seconds later."""
        self.sent: list[Message] = []
        """All messages that processes sent, including lost ones."""
        self._queue: list[tuple[float, int, int, Message]] = []
        self._order = itertools.count()
        self.generations_by_number: dict[int, Generation] = {}
        """For each number, the generation that was entered last."""
        self.generations_by_name: dict[Name, Generation] = {}
        """All generations that any process has entered."""
        self._installed: set[tuple[int, Name]] = set()
        """(uid, generation) of every `Install` event so far."""

    def replace_memberships(self, membership_class: type[Membership]) -> None:
        """Makes all nodes use `membership_class`, also after restarts. To be called before the first step."""
        self.membership_class = membership_class
        self.processes = {uid: Process(self._new_membership(uid, RUN)) for uid in range(self.num_nodes)}

    def _new_membership(self, uid: int, run: bytes) -> Membership:
        return self.membership_class(uid, self.num_nodes, self.limits, draw=self.random_bytes, digest="d", run=run)

    # -- faults -----------------------------------------------------------------------------------------------

    def kill(self, uid: int) -> None:
        self.processes.pop(uid, None)

    def restart(self, uid: int) -> None:
        process = self.processes[uid] = Process(self._new_membership(uid, NO_RUN))
        self.handle_events(uid, process.membership.leave(self.now, "started again"))

    def freeze(self, uid: int) -> None:
        if uid in self.processes:
            self.processes[uid].frozen = True

    def thaw(self, uid: int) -> None:
        process = self.processes.get(uid)
        if process is not None and process.frozen:
            process.frozen = False
            for message in process.inbox:
                self.deliver(uid, message)
            process.inbox.clear()

    def cut_off(self, uids: Collection[int]) -> None:
        """Breaks every link between `uids` and the other nodes."""
        others = set(range(self.num_nodes)) - set(uids)
        self.broken_links |= {frozenset((a, b)) for a in uids for b in others}

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
                self.deliver(to, message)
        for uid, process in sorted(self.processes.items()):
            if not process.frozen:
                self._train(process)
                self._tick(uid, process)

    def _tick(self, uid: int, process: Process) -> None:
        """Ticks the membership only when `next_deadline` says so: work for which it names no deadline is never done,
        and the test fails."""
        membership, awaited = process.membership, tuple(self.awaited_by(uid))
        if not awaited:
            process.waiting_since = None
        elif process.waiting_since is None:
            process.waiting_since = self.now
        since = process.waiting_since
        if self.now >= membership.next_deadline(since):
            self.handle_events(uid, membership.tick(self.now, awaited, math.inf if since is None else since))
            assert membership.next_deadline(since) > self.now, "a tick left something undone that was due"

    def _train(self, process: Process) -> None:
        """Completes a round with probability 0.3 and, with `merges`, averages the models after a merge with probability
        0.7."""
        membership = process.membership
        if membership.steady and membership.position < self.limits.rounds and not membership.stopping:
            membership.position += self.random.random() < 0.3
        if self.limits.merges and self.members_average and membership.steady and self.random.random() < 0.7:
            membership.lineage = membership.generation.name  # says that the owner has averaged its model if it had to

    def awaited_by(self, uid: int) -> Iterable[int]:
        """Returns the nodes for which the training of `uid` waits: here all members that have not left."""
        membership = self.processes[uid].membership
        return [other for other in membership.generation.members if other != uid and other not in membership.left]

    def deliver(self, uid: int, message: Message) -> None:
        """Passes a message, encoded and decoded again, to the membership of `uid`."""
        self.handle_events(uid, self.processes[uid].membership.receive(codec.decode(codec.encode(message)), self.now))

    def handle_events(self, uid: int, events: list[object]) -> None:
        process = self.processes[uid]
        for event in events:
            if isinstance(event, Install):
                self._installed.add((uid, event.generation.name))
                self.handle_events(uid, process.membership.installed(event.generation, self.now))
            elif isinstance(event, Going):
                self._enter(process, event.generation)
            elif isinstance(event, Broken):
                process.num_broken += 1
            else:
                assert isinstance(event, Outside)
        self.send_outbox(uid, process.membership)

    def send_outbox(self, uid: int, membership: Membership) -> None:
        """Puts the messages in the membership's outbox on the network, which may lose, delay or duplicate them."""
        outbox, membership.outbox = membership.outbox, []
        for to, message in outbox:
            assert to != uid
            self.sent.append(message)
            if frozenset((uid, to)) not in self.broken_links and self.random.random() >= self.loss:
                self._enqueue(to, message, self.random.uniform(0.0, 0.3))
                if self.late_share and self.random.random() < self.late_share:
                    self._enqueue(to, message, self.random.uniform(0.3, 6 * SUSPECT))

    def _enqueue(self, to: int, message: Message, delay: float) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), to, message))

    # -- invariants -------------------------------------------------------------------------------------------

    def _enter(self, process: Process, generation: Generation) -> None:
        """Notes that a process entered `generation`, and checks what must hold then."""
        process.entered.append(generation)
        known = self.generations_by_name.setdefault(generation.name, generation)
        assert known == generation, "two generations of one name"
        self.generations_by_number[generation.number] = generation
        trains = generation.first_round < self.limits.rounds and not generation.stopping
        if trains:
            assert len(generation.members) >= self.limits.min_nodes, "too few continue"
            assert self.limits.needed.issubset(generation.members), "clients continue without their server"
        for other in generation.members:
            assert (other, generation.name) in self._installed, "went before all were ready"
        if process.membership.uid in generation.fresh:
            process.membership.fresh = False  # its owner adopts the mean of the other models
        assert len(self.generations_in_force()) <= 1 or self.limits.min_nodes <= self.num_nodes // 2, "two are in force"

    def generations_in_force(self) -> list[Generation]:
        """Returns the generations to which a process of every member belongs and in which rounds may begin."""
        bound: dict[Name, set[int]] = {}
        for uid, process in self.processes.items():
            name = process.bound_to
            if name is not None:
                bound.setdefault(name, set()).add(uid)
        entered = [self.generations_by_name[name] for name in bound if name in self.generations_by_name]
        complete = [generation for generation in entered if bound[generation.name] >= {*generation.members}]
        return [each for each in complete if each.first_round < self.limits.rounds and not each.stopping]

    def is_settled(self) -> bool:
        """Returns whether all live processes are steady in one generation whose members are exactly their uids."""
        generations = {process.membership.generation for process in self.processes.values()}
        steady = all(process.membership.steady for process in self.processes.values())
        return steady and len(generations) == 1 and next(iter(generations)).members == tuple(sorted(self.processes))
