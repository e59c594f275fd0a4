"""What all nodes do together, along the control tree: means, barriers and closing reports. No I/O, no lock, no clock.

`tree_collectives.py` lets one thread in at a time and blocks. now: seconds of any monotonic clock.
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
    """What sends for the collectives (`NodeProtocol`). Called from within calls of `CollectiveState`."""

    def control(self, uid: int, kind: type[Message], values: tuple[object, ...], now: float) -> None:
        """Send a control message to a peer."""

    def emit(self, pieces: Sequence[OutgoingPart], now: float) -> None:
        """Send pieces of means; their bytes are read, or copied, before this returns."""

    def consumed(self, uid: int, size: int) -> None:
        """Bytes of a peer's window are free again, as what they were is used up."""


class CollectiveState:
    """One node's part in the collective calls of one generation of members."""

    def __init__(self, session: Session, chunk_bytes: int, facts: RunFacts, port: CollectivePort) -> None:
        self.facts, self.uid, self.describe = facts, session.uid, session.describe
        self.means = TreeMeans(session.tree, chunk_bytes)
        self.tree, self._session, self._port = session.tree, session, port
        self._here: dict[int, str] = {}
        """The barrier at which this node or a child waits, since it arrived there last."""
        self._gone_up: str | None = None
        """The barrier at which this node's whole subtree is, as its parent knows."""
        self._barrier: BarrierWait | None = None
        """The one at which this node is."""
        self._reports: dict[int, Scalars] = {}
        self._left: set[int] = set()
        """Children that said their last word."""
        self.part_came = -math.inf
        """When a piece of a mean came last."""

    # -- means ------------------------------------------------------------------------------------------------

    def begin_mean(self, key: str, share: Tensor, now: float) -> None:
        """This node's share of a mean (`TreeMeans.begin`)."""
        self._emit(self.means.begin(key, share), now)

    def part(self, message: Part, body: memoryview, now: float) -> None:
        """A piece of a mean came. Raises PeerFault for one that fits none."""
        pieces = self.means.receive(message, body)
        self.part_came = now
        self._emit(pieces, now)

    def give_up_mean(self, key: str) -> None:
        """Nobody waits for this mean any more."""
        self.means.give_up(key)
        self._count_consumed()

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
        """This node is at a barrier. Returns its wait for the others."""
        wait = self._barrier = BarrierWait(self, name, timeout_seconds, now)
        self.arrive(name, 0, self.uid, now)
        return wait

    def arrive(self, name: str, down: int, who: int, now: float) -> None:
        """`who`, with its whole subtree, arrived at a barrier; down: everybody did.

        What arrived is used up in the moment in which it completes something here, so that a child that is at the next
        barrier of the same name before this node has gone on from the first is not forgotten.
        Raises PeerFault where it is said to be passed and this node did not arrive.
        """
        if down and self._gone_up != name:
            raise PeerFault("unexpected_message", f"barrier {name!r} passed before node {self.uid} was there")
        if not down:
            self._here[who] = name
            if any(self._here.get(uid) != name for uid in (self.uid, *self.tree.children)):
                return
            self._here.clear()
            self._gone_up = name
            if self.tree.parent is not None:
                self._port.control(self.tree.parent, Arrive, (name, 0), now)
                return
        self._gone_up = None
        if self._barrier is not None and self._barrier.name == name:
            self._barrier.passed = True
            self._barrier = None
            self.facts.notify()
        for child in self.tree.children:
            self._port.control(child, Arrive, (name, 1), now)

    def missing_at(self, name: str) -> list[int]:
        """Whom this node waits for at a barrier: children that have not arrived, or its parent."""
        if self._gone_up == name:
            return [] if self.tree.parent is None else [self.tree.parent]
        return [child for child in self.tree.children if self._here.get(child) != name]

    # -- reports ----------------------------------------------------------------------------------------------

    def report(self, figures: Scalars, now: float) -> None:
        """This node's closing figures, which go to the root of the tree."""
        self._reports[self.uid] = dict(figures)
        if self.tree.parent is not None:
            self._port.control(self.tree.parent, Report, (self.uid, dict(figures)), now)

    def reported(self, report: Report) -> None:
        """A node's closing figures passed through here."""
        self._reports[report.uid] = report.figures
        self.facts.notify()

    def unreported(self) -> set[int]:
        """The nodes at and below this one in the tree whose figures have not come, and may still come."""
        lost = {uid for child in self._left for uid in self._session.subtree(child)}
        return set(self._session.subtree()) - self._reports.keys() - lost

    def left(self, uid: int) -> None:
        """A peer said its last word: where it is a child of this node, no more figures come through it."""
        if uid in self.tree.children:
            self._left.add(uid)
            self.facts.notify()

    def reports(self) -> dict[int, dict[str, float | int | str]]:
        """On the root of the tree the figures that have come, by uid, ascending; empty elsewhere."""
        return {uid: dict(self._reports[uid]) for uid in sorted(self._reports)} if self.tree.parent is None else {}


class MeanWait:
    """The wait for a mean (`run_state.Wait`); `result` is (mean [N], contributors) once it is over."""

    def __init__(self, of: CollectiveState, key: str, closing: bool, timeout_seconds: float, now: float) -> None:
        """closing: as in `Communication.mean`. timeout_seconds: without a piece of a mean coming: a large model takes
        as long as the line needs, and pieces show that the others go on. In a run with generations of members so long
        for each link of the tree that lies before: who is dead is found out by other means there, and who waits for a
        node that itself waits for others must not exclude it before it gives up those."""
        self._of, self._key, self._closing, self._timeout_seconds = of, key, closing, timeout_seconds
        self._began = self._since = now
        self.deadline = now + timeout_seconds
        self.result: tuple[Tensor, int] | None = None

    def postpone(self, seconds: float) -> None:
        """As `run_state.PostponableWait.postpone`."""
        self._since += seconds
        self.deadline += seconds

    def step(self, now: float) -> bool:
        """Raises what every wait raises once the generation is over, PeerLost naming those that are late, Interrupted
        on a stop."""
        of, facts, key = self._of, self._of.facts, self._key
        facts.waiting = None
        facts.raise_if_over()
        self.result = of.means.take(key)
        if self.result is not None:
            return True
        if facts.stopping and not self._closing:
            of.give_up_mean(key)
            raise Interrupted(f"{key} given up: the run is stopping")
        whom = of.means.waiting_for(key)
        self._since = max(self._since, of.part_came)
        links = of.tree.around if of.tree.parent in whom else of.tree.below
        patience = self._timeout_seconds * (links if facts.watches else 1)
        self.deadline = self._since + patience
        if now >= self.deadline:
            names = ", ".join(map(of.describe, whom)) or "the other nodes"
            raise PeerLost(
                f"node {of.uid}: nothing from {names} for the mean {key!r} within {patience:g} s", whom
            )
        facts.wait_for(tuple(whom), self._began)
        return False


class BarrierWait:
    """The wait at a barrier (`run_state.Wait`), as `CollectiveState.enter_barrier` makes it."""

    def __init__(self, of: CollectiveState, name: str, timeout_seconds: float, now: float) -> None:
        self._of, self.name, self._timeout_seconds = of, name, timeout_seconds
        self._began, self.deadline = now, now + timeout_seconds
        self.passed = False

    def step(self, now: float) -> bool:
        """Raises what every wait raises once the generation is over, PeerLost naming those that are late."""
        of, facts = self._of, self._of.facts
        facts.waiting = None
        if self.passed:
            return True
        facts.raise_if_over()
        late = of.missing_at(self.name)
        if now >= self.deadline:
            raise PeerLost(
                f"node {of.uid}: barrier {self.name!r} not passed within {self._timeout_seconds:g} s, waiting for "
                f"{', '.join(map(of.describe, late))}",
                late,
            )
        facts.wait_for(tuple(late), self._began)
        return False


class ReportsWait:
    """The wait for the figures of all nodes below this one, which pass through it (`run_state.Wait`). It raises
    nothing: what has come by its end is what there is."""

    def __init__(self, of: CollectiveState, timeout_seconds: float, now: float) -> None:
        self._of = of
        self._began, self._timeout_seconds = now, timeout_seconds
        self.deadline = now + timeout_seconds

    def postpone(self, seconds: float) -> None:
        """As `run_state.PostponableWait.postpone`."""
        self._began += seconds

    def step(self, now: float) -> bool:
        facts = self._of.facts
        limit = min(self._timeout_seconds, STOPPING_TIMEOUT_SECONDS) if facts.stopping else self._timeout_seconds
        self.deadline = self._began + limit
        over = facts.failure is not None or bool(facts.regrouping) or now >= self.deadline
        return over or not self._of.unreported()


class JoinWait:
    """The wait for the start of the run (`run_state.Wait`): until every node has joined."""

    def __init__(
        self, facts: RunFacts, joined: Callable[[], bool], give_up: Callable[[], None], timeout_seconds: float,
        grace_seconds: float, now: float,
    ) -> None:
        """give_up: called when the time is over, and again every `grace_seconds` until the failure that it brings about
        is known."""
        self._facts, self._joined, self._give_up, self._grace_seconds = facts, joined, give_up, grace_seconds
        self.deadline = now + timeout_seconds

    def step(self, now: float) -> bool:
        """Raises AssemblyError naming who is missing."""
        if self._joined():
            return True
        self._facts.raise_if_failed()
        if now >= self.deadline:
            self.deadline = now + self._grace_seconds
            self._give_up()
            self._facts.raise_if_failed()
        return self._joined()
