"""Requests to join, of a node that belongs to no generation: when to send them, and what they name."""

from __future__ import annotations

from decentnode.wire.generation import FIRST, Name

JOIN_EVERY_SECONDS = 0.5
MAX_DOUBLINGS = 6


class JoinRequests:
    """When a node outside asks the others to let it in. A request names the generation that its receiver is in, so that
    a late copy of it is recognized."""

    def __init__(self, suspect_seconds: float) -> None:
        self._suspect_seconds = suspect_seconds
        self._next = 0.0
        self._times_outside = 0
        self._generation_of: dict[int, Name] = {}
        """uid -> the generation that it last said to be in (`Current`)."""

    def begin(self, now: float) -> None:
        """The node is outside from now on. It asks at once the first time, and waits twice as long each further time:
        a node with a bad link would end every generation otherwise."""
        self._next = now + self._suspect_seconds * ((1 << min(self._times_outside, MAX_DOUBLINGS)) - 1)
        self._times_outside += 1
        self._generation_of.clear()

    @property
    def answered(self) -> set[int]:
        """The nodes that said since `begin` which generation they are in."""
        return {*self._generation_of}

    def due(self, now: float) -> bool:
        """Whether to ask everybody now; the next time is JOIN_EVERY_SECONDS later."""
        if now < self._next:
            return False
        self._next = now + JOIN_EVERY_SECONDS
        return True

    def note(self, uid: int, name: Name, now: float) -> bool:
        """Keep that `uid` is in generation `name`; whether to ask it again at once, with that name."""
        known = self._generation_of.get(uid, FIRST)
        self._generation_of[uid] = name
        return known != name and now + JOIN_EVERY_SECONDS >= self._next

    def name_for(self, uid: int) -> Name:
        """The generation that a request to `uid` names."""
        return self._generation_of.get(uid, FIRST)
