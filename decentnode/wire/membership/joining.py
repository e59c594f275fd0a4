"""The requests to join of a node that belongs to no generation: when to send them, and which generation they name."""

from __future__ import annotations

from decentnode.wire.generation import FIRST, Name

JOIN_EVERY_SECONDS = 0.5
MAX_DOUBLINGS = 6


class JoinRequests:
    """Decides when a node outside asks the others to admit it. A request names the generation that its receiver is in,
    so that a delayed copy is recognized."""

    def __init__(self, suspect_seconds: float) -> None:
        self._suspect_seconds = suspect_seconds
        self.begins_at = 0.0
        """When the node asks for the first time since `begin`."""
        self._next = 0.0
        self._times_outside = 0
        self._generation_of: dict[int, Name] = {}
        """uid -> the generation that it last reported in `Current`."""

    def begin(self, now: float) -> None:
        """Notes that the node is outside from now on. The first time it asks at once. Each further time it first waits
        longer (exponential backoff), because a node with a bad link would otherwise end every generation."""
        self.begins_at = now + self._suspect_seconds * ((1 << min(self._times_outside, MAX_DOUBLINGS)) - 1)
        self._next = self.begins_at
        self._times_outside += 1
        self._generation_of.clear()

    @property
    def answered(self) -> set[int]:
        """The nodes that have reported since `begin` which generation they are in."""
        return {*self._generation_of}

    def due(self, now: float) -> bool:
        """Returns whether to ask all nodes now; if so, the next time is JOIN_EVERY_SECONDS later."""
        if now < self._next:
            return False
        self._next = now + JOIN_EVERY_SECONDS
        return True

    def note(self, uid: int, name: Name, now: float) -> bool:
        """Records that `uid` is in generation `name`. Returns whether to ask it again at once, with that name."""
        known = self._generation_of.get(uid, FIRST)
        self._generation_of[uid] = name
        return known != name and now + JOIN_EVERY_SECONDS >= self._next

    def name_for(self, uid: int) -> Name:
        """Returns the generation that a request to `uid` names."""
        return self._generation_of.get(uid, FIRST)
