"""What the leader knows of its attempt, what others say of generations elsewhere, and who answers pings."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from decentnode.wire.generation import Generation, Limits, Name
from decentnode.wire.messages import Promise

MAX_RIVALS = 8
"""Most generations elsewhere that a node keeps count of."""


@dataclass
class Proposal:
    """A generation that its leader prepares (promises are missing) or commits (all promised, some are not ready)."""

    name: Name
    members: frozenset[int]
    heard: dict[int, float]
    """When each member last spoke."""
    promises: dict[int, Promise] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    committed_at: float = 0.0
    merges: frozenset[Name] = frozenset()
    """Generations that went on apart and become one with this."""

    def silent(self, now: float, limits: Limits, committing: bool, patience: float = math.inf) -> set[int]:
        """Returns members that send nothing for `patience`, of `limits.suspect_seconds` at most, and, while committing,
        those that live but are not ready after `limits.ready_seconds`."""
        longest = min(patience, limits.suspect_seconds)
        silent = {uid for uid, heard in self.heard.items() if now - heard > longest}
        if committing and now - self.committed_at > limits.ready_seconds:
            silent |= self.members - self.ready
        return silent

    def forgive(self, now: float) -> None:
        """Count no silence before `now`: the leader's own process did not run."""
        self.heard = dict.fromkeys(self.heard, now)
        self.committed_at = now

    def promised_by_all(self) -> bool:
        return self.promises.keys() == self.members

    def outcome(self, servers: Collection[int] = ()) -> Generation | None:
        """Returns the generation that all promised, which begins with the round after the furthest member's: those that
        are behind make theirs up to it alone. Where there are servers, it is that of the furthest server: a client that
        is a round further waits in it for its server, and has made nothing of it. None where no member has a model."""
        fresh = frozenset(uid for uid, promise in self.promises.items() if promise.fresh)
        positions = {uid: promise.position for uid, promise in self.promises.items() if uid not in fresh}
        ahead = [positions[uid] for uid in servers if uid in positions] or list(positions.values())
        if not ahead:
            return None
        number, origin = self.name
        stopping = any(promise.stopping for promise in self.promises.values())
        lines = {promise.line for uid, promise in self.promises.items() if uid not in fresh}
        return Generation(number, tuple(sorted(self.members)), max(ahead), fresh, origin, stopping, len(lines) > 1)


class Rivals:
    """Other generations that nodes say to be in, while this node is in its own.

    The caller passes to `heard` only answers about the generation that this node is in: such an answer was sent when
    this node had entered its own already, by a node that is in another.
    """

    def __init__(self, num_nodes: int, limits: Limits) -> None:
        self._majority, self._limits = max(limits.min_nodes, num_nodes // 2 + 1), limits
        self._said: dict[Name, dict[int, float]] = {}
        """Name -> uid -> when it last said to be steady in that generation."""

    def __bool__(self) -> bool:
        return bool(self._said)

    def heard(self, name: Name, source: int, now: float, own: Name) -> bool:
        """Note that `source` is steady in `name`. Returns whether so many are that `own` cannot be in force.

        One node is not enough: it may have been left behind itself.
        """
        if name not in self._said and len(self._said) >= MAX_RIVALS:
            return False
        said = self._said.setdefault(name, {})
        said[source] = now
        return len(said) >= (self._limits.min_nodes if name > own else self._majority)

    def expire(self, now: float) -> None:
        """Forget what was said more than `suspect_seconds` ago: its senders may be in another generation by now."""
        for name, said in list(self._said.items()):
            self._said[name] = {uid: at for uid, at in said.items() if now - at <= self._limits.suspect_seconds}
            if not self._said[name]:
                del self._said[name]

    def clear(self) -> None:
        self._said.clear()
