"""The state of a leader's attempt to make a generation, and the other generations that nodes report to be in."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from decentnode.wire.generation import Generation, Limits, Name
from decentnode.wire.messages import Promise

MAX_OTHER_GENERATIONS = 8
"""Most other generations of which a node keeps the reports."""


@dataclass
class Proposal:
    """A generation that its leader prepares (promises are missing) or commits (all have promised, some are not
    ready)."""

    name: Name
    members: frozenset[int]
    heard_at: dict[int, float]
    """uid -> when the last message of this member arrived."""
    promises: dict[int, Promise] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    committed_at: float = 0.0
    merges: frozenset[Name] = frozenset()
    """Generations on other sides of a partition that merge in this one, this node's own included; usually empty."""

    def silent(self, now: float, limits: Limits, committing: bool, patience: float = math.inf) -> set[int]:
        """Returns the members that were silent for more than `patience` seconds, or `limits.suspect_seconds` if that is
        shorter, and, while committing, those that are not ready after `limits.ready_seconds`."""
        longest = min(patience, limits.suspect_seconds)
        silent = {uid for uid, heard in self.heard_at.items() if now - heard > longest}
        if committing and now - self.committed_at > limits.ready_seconds:
            silent |= self.members - self.ready
        return silent

    def ignore_silence(self, now: float) -> None:
        """Ignores all silence before `now`, because the leader's own process was not scheduled."""
        self.heard_at = dict.fromkeys(self.heard_at, now)
        self.committed_at = now

    def promised_by_all(self) -> bool:
        return self.promises.keys() == self.members

    def resulting_generation(self, servers: Collection[int] = ()) -> Generation | None:
        """Returns the generation that follows from the promises, or None if no member has a model.

        Its first round is the furthest position of a member with a model; members that are behind make their rounds up
        to it alone. If there are servers, it is the position of the furthest server: a client that is one round ahead
        waits in that round for its server, and has done nothing in it yet.
        """
        fresh = frozenset(uid for uid, promise in self.promises.items() if promise.fresh)
        positions = {uid: promise.position for uid, promise in self.promises.items() if uid not in fresh}
        ahead = [positions[uid] for uid in servers if uid in positions] or list(positions.values())
        if not ahead:
            return None
        number, origin = self.name
        stopping = any(promise.stopping for promise in self.promises.values())
        lines = {promise.lineage for uid, promise in self.promises.items() if uid not in fresh}
        return Generation(number, tuple(sorted(self.members)), max(ahead), fresh, origin, stopping, len(lines) > 1)


class OtherGenerations:
    """The other generations that nodes report to be in, while this node is in its own.

    The caller passes to `heard` only answers to messages about this node's generation. Such an answer was sent after
    this node entered its generation, by a node that is in another one.
    """

    def __init__(self, num_nodes: int, limits: Limits) -> None:
        self._majority, self._limits = max(limits.min_nodes, num_nodes // 2 + 1), limits
        self._reports: dict[Name, dict[int, float]] = {}
        """Generation name -> uid -> when that node last reported to be steady in the generation."""

    def __bool__(self) -> bool:
        return bool(self._reports)

    def heard(self, name: Name, source: int, now: float, own: Name) -> bool:
        """Records that `source` is steady in generation `name`. Returns whether so many nodes are steady in it that
        `own` cannot be in force. One node is not enough, because it may have been left behind itself.
        """
        if name not in self._reports and len(self._reports) >= MAX_OTHER_GENERATIONS:
            return False
        reports = self._reports.setdefault(name, {})
        reports[source] = now
        return len(reports) >= (self._limits.min_nodes if name > own else self._majority)

    def expire(self, now: float) -> None:
        """Drops reports older than `suspect_seconds`, because their senders may be in another generation by now."""
        for name, reports in list(self._reports.items()):
            self._reports[name] = {uid: at for uid, at in reports.items() if now - at <= self._limits.suspect_seconds}
            if not self._reports[name]:
                del self._reports[name]

    def clear(self) -> None:
        self._reports.clear()
