"""Collective operations along the control tree: means, barriers and closing reports. No I/O, no lock, no clock.

generations/tree_collectives.py lets one thread call them at a time, and blocks. now: seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS, RunFacts
from decentnode.communication.zeromq.protocol.tree_mean import OutgoingPart, TreeMeans
from decentnode.errors import Interrupted, PeerFault, PeerLost
from decentnode.wire.bounds import Scalars
from decentnode.wire.messages import Arrive, Message, Part, Report
from decentnode.wire.session import Session


class CollectivePort(Protocol):
    """Sends the messages of the collectives (`NodeProtocol`). Called within calls of `CollectiveState`."""

    def control(self, uid: int, kind: type[Message], values: tuple[object, ...], now: float) -> None:
        """Sends a control message to a peer."""

    def emit(self, pieces: Sequence[OutgoingPart], now: float) -> None:
        """Sends pieces of means; their bytes are read or copied before this returns."""

    def consumed(self, uid: int, size: int) -> None:
        """Frees bytes of a peer's flow-control window, because the message that they carried was consumed."""

    def bulk_moved_at(self, uid: int) -> float:
        """Returns `PeerLink.bulk_moved_at` of the link to a peer."""


class CollectiveState:
    """One node's part in the collective operations of one generation of members."""

    def __init__(self, session: Session, chunk_bytes: int, facts: RunFacts, port: CollectivePort) -> None:
        self.facts, self.uid, self.describe = facts, session.uid, session.describe
        self.means = TreeMeans(session.tree, chunk_bytes)
        self.tree, self._session, self._port = session.tree, session, port
        self._arrived_at: dict[int, str] = {}
        """uid of this node or of a child -> the barrier at which it last arrived and waits."""
        self._subtree_arrived_at: str | None = None
        """The barrier at which this node's whole subtree has arrived, as the parent was told."""
        self._barrier: BarrierWait | None = None
        """The wait at the barrier at which this node is."""
        self._reports: dict[int, Scalars] = {}
        self._left: set[int] = set()
        """Children that have said goodbye."""
        self._last_part_at = -math.inf
        """When the last piece of a mean arrived."""

    # -- means ------------------------------------------------------------------------------------------------

    def begin_mean(self, key: str, share: Tensor, now: float) -> None:
        """Adds this node's share to a mean (`TreeMeans.begin`)."""
        self._emit(self.means.begin(key, share), now)

    def part(self, message: Part, body: memoryview, now: float) -> None:
        """Handles a piece of a mean. Raises PeerFault for one that fits no mean."""
        pieces = self.means.receive(message, body)
        self._last_part_at = now
        self._emit(pieces, now)

    def give_up_mean(self, key: str) -> None:
        """Forgets a mean, because this node does not wait for it any more."""
        self.means.give_up(key)
        self._count_consumed()

    def progress_at(self, whom: Sequence[int]) -> float:
        """Returns when the means last made progress, as far as this node can see: a piece of any of them arrived, or
        bulk data to or from the nodes `whom`, which pieces on the same connection may have to queue behind."""
        return max([self._last_part_at, *map(self._port.bulk_moved_at, whom)])

    def _emit(self, pieces: Sequence[OutgoingPart], now: float) -> None:
        self._port.emit(pieces, now)
        self._count_consumed()
        if self.means.done:
            self.facts.notify()

    def _count_consumed(self) -> None:
        for uid, size in self.means.consumed:
            self._port.consumed(uid, size)
        self.means.consumed.clear()

    # -- barriers ---------------------------------------------------------------------------------------------

    def enter_barrier(self, name: str, timeout_seconds: float, now: float) -> BarrierWait:
        """Notes that this node is at a barrier, and returns its wait for the others."""
        wait = self._barrier = BarrierWait(self, name, timeout_seconds, now)
        self.arrive(name, 0, self.uid, now)
        return wait

    def arrive(self, name: str, down: int, who: int, now: float) -> None:
        """Notes that `who` and its whole subtree arrived at a barrier or, with `down`, that all nodes did.

        Arrivals are cleared as soon as they complete the subtree. A child that arrives at the next barrier of the same
        name before this node has left the first is thus not forgotten. Raises PeerFault if the barrier is reported as
        passed although this node's subtree has not arrived.
        """
        if down and self._subtree_arrived_at != name:
            raise PeerFault("unexpected_message", f"barrier {name!r} passed before node {self.uid} was there")
        if not down:
            self._arrived_at[who] = name
            if any(self._arrived_at.get(uid) != name for uid in (self.uid, *self.tree.children)):
                return
            self._arrived_at.clear()
            self._subtree_arrived_at = name
            if self.tree.parent is not None:
                self._port.control(self.tree.parent, Arrive, (name, 0), now)
                return
        self._subtree_arrived_at = None
        if self._barrier is not None and self._barrier.name == name:
            self._barrier.passed = True
            self._barrier = None
            self.facts.notify()
        for child in self.tree.children:
            self._port.control(child, Arrive, (name, 1), now)

    def missing_at(self, name: str) -> list[int]:
        """Returns the nodes that this node waits for at a barrier: children that have not arrived, or its parent."""
        if self._subtree_arrived_at == name:
            return [] if self.tree.parent is None else [self.tree.parent]
        return [child for child in self.tree.children if self._arrived_at.get(child) != name]

    # -- reports ----------------------------------------------------------------------------------------------

    def report(self, figures: Scalars, now: float) -> None:
        """Sends this node's closing figures to the root of the tree."""
        self._reports[self.uid] = dict(figures)
        if self.tree.parent is not None:
            self._port.control(self.tree.parent, Report, (self.uid, dict(figures)), now)

    def note_report(self, report: Report) -> None:
        """Notes the closing figures of a node, which are forwarded through this node."""
        self._reports[report.uid] = report.figures
        self.facts.notify()

    def unreported(self) -> set[int]:
        """Returns the nodes at and below this one in the tree whose figures have not arrived but still may."""
        lost = {uid for child in self._left for uid in self._session.subtree(child)}
        return set(self._session.subtree()) - self._reports.keys() - lost

    def note_left(self, uid: int) -> None:
        """Notes that a peer said goodbye. If it is a child of this node, no more figures arrive through it."""
        if uid in self.tree.children:
            self._left.add(uid)
            self.facts.notify()

    def reports(self) -> dict[int, dict[str, float | int | str]]:
        """Returns uid -> figures that have arrived, ascending, on the root of the tree; empty on other nodes."""
        return {uid: dict(self._reports[uid]) for uid in sorted(self._reports)} if self.tree.parent is None else {}


class MeanWait:
    """The wait for a mean (`run_state.Wait`); `result` is (mean [N], contributors) once it is over."""

    def __init__(
        self, collectives: CollectiveState, key: str, closing: bool, timeout_seconds: float, now: float
    ) -> None:
        """closing: as in `Communication.mean`. timeout_seconds: longest time without progress.

        The time-out starts again with every piece of any mean, because a large model takes as long as the link needs,
        and pieces show that the others make progress. At the end of the run it also starts again when other bulk data
        arrives from a node that is waited for, and when such a node acknowledges bulk data of this node: after a stop,
        the payload of a round that the other node does not make any more may fill a slow link for a whole round before
        the first piece gets through. Such payloads are finite, so that the wait still ends; before the end of the run
        they need not be, as a node of an asynchronous schedule may train on without the mean.

        In a run with generations of members the time-out is multiplied by the number of tree links that the awaited
        pieces may still have to travel to this node: dead nodes are detected in another way there, and a node must not
        be excluded before it has given up the nodes that it waits for itself.
        """
        self._collectives, self._key, self._closing, self._timeout_seconds = collectives, key, closing, timeout_seconds
        self._began = self._since = now
        self.deadline = now + timeout_seconds
        self.result: tuple[Tensor, int] | None = None

    def postpone(self, seconds: float) -> None:
        """Implements `run_state.PostponableWait.postpone`."""
        self._since += seconds
        self.deadline += seconds

    def step(self, now: float) -> bool:
        """Returns whether the wait is over. Raises what every wait raises once the generation is over, PeerLost with
        the nodes that are late, and Interrupted on a stop."""
        collectives, facts, key = self._collectives, self._collectives.facts, self._key
        facts.waiting = None
        facts.raise_if_over()
        self.result = collectives.means.take(key)
        if self.result is not None:
            return True
        if facts.stopping and not self._closing:
            collectives.give_up_mean(key)
            raise Interrupted(f"{key} given up: the run is stopping")
        whom = collectives.means.waiting_for(key)
        self._since = max(self._since, collectives.progress_at(whom if self._closing else ()))
        links = collectives.tree.links_around if collectives.tree.parent in whom else collectives.tree.levels_below
        patience = self._timeout_seconds * (links if facts.watches else 1)
        self.deadline = self._since + patience
        if now >= self.deadline:
            names = ", ".join(map(collectives.describe, whom)) or "the other nodes"
            raise PeerLost(
                f"node {collectives.uid}: nothing from {names} for the mean {key!r} within {patience:g} s", whom
            )
        facts.wait_for(tuple(whom), self._began)
        return False


class BarrierWait:
    """The wait at a barrier (`run_state.Wait`), which `CollectiveState.enter_barrier` returns."""

    def __init__(self, collectives: CollectiveState, name: str, timeout_seconds: float, now: float) -> None:
        self._collectives, self.name, self._timeout_seconds = collectives, name, timeout_seconds
        self._began, self.deadline = now, now + timeout_seconds
        self.passed = False

    def step(self, now: float) -> bool:
        """Returns whether the wait is over. Raises what every wait raises once the generation is over, and PeerLost
        with the nodes that are late."""
        collectives, facts = self._collectives, self._collectives.facts
        facts.waiting = None
        if self.passed:
            return True
        facts.raise_if_over()
        late = collectives.missing_at(self.name)
        if now >= self.deadline:
            raise PeerLost(
                f"node {collectives.uid}: barrier {self.name!r} not passed within {self._timeout_seconds:g} s, "
                f"waiting for {', '.join(map(collectives.describe, late))}",
                late,
            )
        facts.wait_for(tuple(late), self._began)
        return False


class ReportsWait:
    """The wait for the figures of all nodes below this one in the tree (`run_state.Wait`). It raises nothing: the
    figures that have arrived by its end are used."""

    def __init__(self, collectives: CollectiveState, timeout_seconds: float, now: float) -> None:
        self._collectives = collectives
        self._began, self._timeout_seconds = now, timeout_seconds
        self.deadline = now + timeout_seconds

    def postpone(self, seconds: float) -> None:
        """Implements `run_state.PostponableWait.postpone`."""
        self._began += seconds

    def step(self, now: float) -> bool:
        facts = self._collectives.facts
        limit = min(self._timeout_seconds, STOPPING_TIMEOUT_SECONDS) if facts.stopping else self._timeout_seconds
        self.deadline = self._began + limit
        over = facts.failure is not None or bool(facts.regrouping) or now >= self.deadline
        return over or not self._collectives.unreported()


class JoinWait:
    """The wait for the start of the run (`run_state.Wait`), until every node has joined."""

    def __init__(
        self, facts: RunFacts, joined: Callable[[], bool], give_up: Callable[[], None], timeout_seconds: float,
        grace_seconds: float, now: float,
    ) -> None:
        """give_up: called when the time is over, and then every `grace_seconds` until the failure that it causes is
        known."""
        self._facts, self._joined, self._give_up, self._grace_seconds = facts, joined, give_up, grace_seconds
        self.deadline = now + timeout_seconds

    def step(self, now: float) -> bool:
        """Returns whether every node has joined. Raises AssemblyError with the missing nodes once the time is over."""
        if self._joined():
            return True
        self._facts.raise_if_failed()
        if now >= self.deadline:
            self.deadline = now + self._grace_seconds
            self._give_up()
            self._facts.raise_if_failed()
        return self._joined()
