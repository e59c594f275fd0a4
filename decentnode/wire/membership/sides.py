"""Sides of a network partition that all continue (`Limits.merges`): how they find each other again, and which of them
proposes a common generation.

The leader of a generation pings the nodes of the run that are not in it, less and less often. A node in another
generation answers with that generation's name and members (`Current`). Once all members of another generation have
answered, the leader of the larger of the two prepares a common generation. No node has to be excluded for that, and no
model is lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from decentnode.wire.generation import FIRST, Name
from decentnode.wire.messages import MAX_SIDES, NAME_BYTES

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 4.0
"""First and longest time between two pings of the absent nodes; it doubles while none of them answers."""


def encode_names(names: Collection[Name]) -> bytes:
    """Returns the names of generations as `Prepare` and `Promise` carry them."""
    return b"".join(number.to_bytes(8, "big") + origin for number, origin in sorted(names))


def decode_names(raw: bytes) -> set[Name]:
    """Returns the names that `encode_names` encoded. Bytes at the end that make no complete name are ignored."""
    whole = range(0, len(raw) - NAME_BYTES + 1, NAME_BYTES)
    return {(int.from_bytes(raw[at : at + 8], "big"), raw[at + 8 : at + NAME_BYTES]) for at in whole}


class Sides:
    """When one node pings the absent nodes, and what it knows of their generations. now: seconds of any monotonic
    clock."""

    def __init__(self, patience_seconds: float) -> None:
        """patience_seconds: how long a node's report of its generation is valid."""
        self._patience = patience_seconds
        self._reports: dict[Name, tuple[frozenset[int], dict[int, float]]] = {}
        """Generation name -> (its members, uid -> when that member last reported to be steady in it)."""
        self._due, self._pause = math.inf, FIRST_SECONDS

    def begin(self, now: float) -> None:
        """Starts to ping the absent nodes of a generation that has just come into force."""
        self._reports.clear()
        self._due, self._pause = now + FIRST_SECONDS, FIRST_SECONDS

    def end(self) -> None:
        """Stops pinging, because the generation is over."""
        self._reports.clear()
        self._due = math.inf

    @property
    def due(self) -> float:
        """When the absent nodes are to be pinged next."""
        return self._due

    def ping_soon(self, now: float) -> None:
        """Makes the next ping due soon, because an absent node was heard. No effect between generations."""
        if self._due < math.inf:
            self._due = min(self._due, now + FIRST_SECONDS)

    def note_pinged(self, now: float) -> None:
        """Notes that the absent nodes are pinged now. The pause doubles, or is short again if one of them has answered
        lately."""
        for name, (members, reports) in list(self._reports.items()):
            kept = {uid: at for uid, at in reports.items() if now - at <= self._patience}
            self._reports[name] = members, kept
            if not kept:
                del self._reports[name]
        self._pause = FIRST_SECONDS if self._reports else min(2 * self._pause, LONGEST_SECONDS)
        self._due = now + self._pause

    def heard(self, name: Name, members: frozenset[int], source: int, now: float) -> None:
        """Records that `source` reports to be steady in the generation `name` with these members."""
        for other in [other for other, (_, reports) in self._reports.items() if other != name and source in reports]:
            if other > name:
                return  # an old report, sent before it entered that one
            del self._reports[other]
        if name not in self._reports and len(self._reports) >= MAX_SIDES - 1:
            return
        known, reports = self._reports.setdefault(name, (members, {}))
        if known == members:
            reports[source] = now
            self.ping_soon(now)

    def mergeable(self, own: Collection[int], present: Collection[int]) -> Iterator[tuple[Name, frozenset[int]]]:
        """Yields (name, members) of the generations that are smaller than this node's present members and all of
        whose members answered.

        Of two generations of the same size, the one with the lowest uid counts as larger. own: the members of this
        node's generation. present: those of them that are not absent.
        """
        for name, (members, reports) in sorted(self._reports.items()):
            smaller = (len(members), -min(members)) < (len(present), -min(own))
            if smaller and name != FIRST and reports.keys() == members and not members & set(own):
                yield name, members
