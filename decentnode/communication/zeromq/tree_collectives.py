"""What all nodes do together, along the control tree: means, barriers and closing reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Pending
from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS, RunState
from decentnode.communication.zeromq.tree_mean import OutgoingPart, TreeMeans, own_share
from decentnode.errors import Interrupted, PeerFault, PeerLost
from decentnode.wire.messages import Arrive, Message, Report, Scalars
from decentnode.wire.session import Session


class PendingMean(Pending):
    def __init__(self, owner: TreeCollectives, key: str, closing: bool, shape: torch.Size) -> None:
        self._owner, self._key, self._closing, self._shape = owner, key, closing, shape

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        mean, contributors = self._owner.wait_mean(self._key, self._closing, timeout_seconds)
        return mean.view(self._shape), contributors


class Outlet(Protocol):
    """What sends for the collectives: `NodeProtocol`."""

    def control(self, uid: int, kind: type[Message], *values: object) -> None:
        """Send a control message to a peer."""

    def emit(self, pieces: list[OutgoingPart]) -> None:
        """Send pieces of means."""


class TreeCollectives:
    """The waits are the training thread's; `arrive`, `reported` and `means` are the I/O thread's."""

    def __init__(
        self, session: Session, chunk_bytes: int, status: RunState, call: Callable[[Callable[[], None]], None],
        outlet: Outlet,
    ) -> None:
        """call(function) runs it on the I/O thread, where the outlet is used."""
        self.means = TreeMeans(session.tree, chunk_bytes)
        self._uid, self._session, self._status, self._describe = session.uid, session, status, session.describe
        self._call, self._outlet = call, outlet
        self._here: dict[int, str] = {}
        """The barrier at which this node or a child waits, since it arrived there last."""
        self._gone_up: str | None = None
        """The barrier at which this node's whole subtree is, as its parent knows."""
        self._passed: str | None = None
        self._reports: dict[int, Scalars] = {}

    def reported(self, report: Report) -> None:
        """A node's closing figures passed through here."""
        with self._status.changed:
            self._reports[report.uid] = report.figures
            self._status.notify()

    def mean(self, key: str, tensor: Tensor, closing: bool) -> Pending:
        """What `Communication.mean` does."""
        self._status.raise_if_over()
        share = own_share(tensor)
        self._call(lambda: self._outlet.emit(self.means.begin(key, share)))
        return PendingMean(self, key, closing, tensor.shape)

    def wait_mean(self, key: str, closing: bool, timeout_seconds: float) -> tuple[Tensor, int]:
        """What `Pending.wait` does."""
        began = clock.now()
        deadline = began + timeout_seconds
        with self._status.changed:
            while True:
                self._status.waiting = None
                self._status.raise_if_over()
                result = self.means.take(key)
                if result is not None:
                    return result
                if self._status.stopping and not closing:
                    self._call(lambda: self.means.give_up(key))
                    raise Interrupted(f"{key} given up: the run is stopping")
                remaining = deadline - clock.now()
                if remaining <= 0:
                    whom = self.means.waiting_for(key)
                    names = ", ".join(map(self._describe, whom)) or "the other nodes"
                    raise PeerLost(
                        f"node {self._uid}: nothing from {names} for the mean {key!r} within {timeout_seconds:g} s",
                        whom,
                    )
                self._status.waiting = (tuple(self.means.waiting_for(key)), began)
                self._status.changed.wait(min(remaining, 1.0))

    def barrier(self, name: str, timeout_seconds: float) -> None:
        """What `Communication.barrier` does."""
        self._status.raise_if_over()
        tree = self._session.tree
        self._passed = None
        self._call(lambda: self.arrive(name, 0, self._uid))
        began = clock.now()
        deadline = began + timeout_seconds
        with self._status.changed:
            while self._passed != name:
                self._status.waiting = None
                self._status.raise_if_over()
                remaining = deadline - clock.now()
                late = [child for child in tree.children if self._here.get(child) != name]
                if self._gone_up == name:
                    late = [] if tree.parent is None else [tree.parent]
                if remaining <= 0:
                    names = ", ".join(map(self._describe, late))
                    raise PeerLost(
                        f"node {self._uid}: barrier {name!r} not passed within {timeout_seconds:g} s, waiting for "
                        f"{names}",
                        late,
                    )
                self._status.waiting = (tuple(late), began)
                self._status.changed.wait(min(remaining, 1.0))
            self._status.waiting = None

    def arrive(self, name: str, down: int, who: int) -> None:
        """I/O thread: `who`, with its whole subtree, arrived at a barrier; down: everybody did.

        What arrived is used up in the moment in which it completes something here, so that a child that is at the next
        barrier of the same name before this node's training thread woke up from the first is not forgotten.
        Raises PeerFault where it is said to be passed and this node did not arrive.
        """
        tree = self._session.tree
        with self._status.changed:
            if down and self._gone_up != name:
                raise PeerFault("unexpected_message", f"barrier {name!r} passed before node {self._uid} was there")
            if not down:
                self._here[who] = name
                if any(self._here.get(uid) != name for uid in (self._uid, *tree.children)):
                    return
                self._here.clear()
                self._gone_up = name
            passed = down or tree.parent is None
            if passed:
                self._passed, self._gone_up = name, None
                self._status.notify()
        if not passed and tree.parent is not None:
            self._outlet.control(tree.parent, Arrive, name, 0)
        for child in tree.children if passed else ():
            self._outlet.control(child, Arrive, name, 1)

    def report(self, figures: Scalars) -> None:
        """What `Communication.report` does."""
        with self._status.changed:
            self._reports[self._uid] = dict(figures)
        parent = self._session.tree.parent
        if parent is not None:
            self._call(lambda: self._outlet.control(parent, Report, self._uid, dict(figures)))

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        """Elsewhere than on the lowest uid this waits for the subtree, whose reports pass through here."""
        below = set(self._session.subtree())
        limit = min(timeout_seconds, STOPPING_TIMEOUT_SECONDS) if self._status.stopping else timeout_seconds
        deadline = clock.now() + limit
        with self._status.changed:
            while not below <= self._reports.keys() and self._status.failure is None and not self._status.regrouping:
                remaining = deadline - clock.now()
                if remaining <= 0:
                    break
                self._status.changed.wait(min(remaining, 1.0))
            root = self._session.tree.parent is None
            return {uid: dict(self._reports[uid]) for uid in sorted(self._reports)} if root else {}
