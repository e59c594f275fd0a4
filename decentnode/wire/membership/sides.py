"""Sides of a broken network that all go on (`Limits.merges`): who hears whom again, and who proposes one generation.

The node that leads a generation pings those of the run that are not in it, less and less often. Who is in another
generation answers with its name and members (`Current`). Once all members of another generation have answered, the
larger of the two takes the smaller in: its leader prepares a generation of both. Nobody has to be excluded for that,
and no model is lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from decentnode.wire.generation import FIRST, Name
from decentnode.wire.messages import MAX_SIDES, NAME_BYTES

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 4.0
"""The time between two pings of nodes that are in no generation known here: it doubles, up to the longest."""


def packed(names: Collection[Name]) -> bytes:
    """The names of generations as `Prepare` and `Promise` carry them."""
    return b"".join(number.to_bytes(8, "big") + origin for number, origin in sorted(names))


def unpacked(raw: bytes) -> set[Name]:
    """What `packed` returned; what is left of a malformed one is ignored."""
    whole = range(0, len(raw) - NAME_BYTES + 1, NAME_BYTES)
    return {(int.from_bytes(raw[at : at + 8], "big"), raw[at + 8 : at + NAME_BYTES]) for at in whole}


class Sides:
    """Of one node: when it pings the absent ones, and what it knows of their generations. now: seconds of any monotonic
    clock."""

    def __init__(self, patience_seconds: float) -> None:
        """patience_seconds: how long what a node said of its generation counts."""
        self._patience = patience_seconds
        self._said: dict[Name, tuple[frozenset[int], dict[int, float]]] = {}
        """Name -> its members, and when each of them last said to be steady in it."""
        self._due, self._pause = math.inf, FIRST_SECONDS

    def begin(self, now: float) -> None:
        """Another generation is in force here."""
        self._said.clear()
        self._due, self._pause = now + FIRST_SECONDS, FIRST_SECONDS

    def end(self) -> None:
        """The generation is over: nobody is pinged until the next one."""
        self._said.clear()
        self._due = math.inf

    @property
    def due(self) -> float:
        """When the absent nodes are pinged next."""
        return self._due

    def look(self, now: float) -> None:
        """One of the absent nodes is heard: ping them soon, while the generation lasts."""
        if self._due < math.inf:
            self._due = min(self._due, now + FIRST_SECONDS)

    def pinged(self, now: float) -> None:
        """They are pinged: next time after twice as long, or soon where one of them answers."""
        for name, (members, said) in list(self._said.items()):
            kept = {uid: at for uid, at in said.items() if now - at <= self._patience}
            self._said[name] = members, kept
            if not kept:
                del self._said[name]
        self._pause = FIRST_SECONDS if self._said else min(2 * self._pause, LONGEST_SECONDS)
        self._due = now + self._pause

    def heard(self, name: Name, members: frozenset[int], source: int, now: float) -> None:
        """`source` says to be steady in the generation `name` of these members."""
        for other in [other for other, (_, said) in self._said.items() if other != name and source in said]:
            if other > name:
                return  # it said so before it entered that one
            del self._said[other]
        if name not in self._said and len(self._said) >= MAX_SIDES - 1:
            return
        known, said = self._said.setdefault(name, (members, {}))
        if known == members:
            said[source] = now
            self.look(now)

    def to_take_in(self, own: Collection[int], present: Collection[int]) -> Iterator[tuple[Name, frozenset[int]]]:
        """Yields (name, members) of the generations all of whose members answered and that are smaller than this node's
        own; of two of one size the one with the lowest uid counts as larger. own: members of this node's generation.
        present: those of them that are not absent."""
        for name, (members, said) in sorted(self._said.items()):
            smaller = (len(members), -min(members)) < (len(present), -min(own))
            if smaller and name != FIRST and said.keys() == members and not members & set(own):
                yield name, members
