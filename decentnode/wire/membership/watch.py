"""A failure detector for the nodes that the training waits for: whether they answer pings, and how long they may take.

The time-out is a multiple of the answer times seen so far, within bounds. A fixed time-out would be too long for the
few nodes that are frozen, and too short for many nodes on a machine that is busy for a while. The I/O thread answers a
ping in the middle of a round, so that the answer time shows how busy machines and links are. So does the time that most
peers take to acknowledge models, which may fill the links.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable


class Watch:
    """The failure detector of one node. now: seconds of any monotonic clock."""

    AFTER_SECONDS, EVERY_SECONDS = 0.5, 0.25
    """How long the training waits for a node before the node is pinged, and the time between further pings."""
    MEASURE_EVERY_SECONDS = 5.0
    """Shortest time between two measurements: when the training begins to wait, the awaited nodes are pinged at once,
    to learn how long answers take."""
    MIN_TIMEOUT_SECONDS = 1.5
    """Shortest time-out, however fast answers are: a process may get no CPU core for a second now and then."""
    TIMEOUT_FACTOR = 8
    """The time-out as a multiple of the longest recent answer time."""
    ANSWERS, MIN_ANSWERS = 64, 8
    """How many answer times are kept, and how many are needed before they are used: the first answers may come before
    any models are in flight that fill the links."""

    def __init__(self, suspect_seconds: float) -> None:
        """suspect_seconds: the longest time-out, also used until there are enough answers."""
        self._longest = suspect_seconds
        self.load: Callable[[float], Collection[float]] = lambda _now: ()
        """load(now): the seconds that each peer takes to acknowledge models, or has taken so far; the owner sets it."""
        self._answer_seconds: deque[float] = deque(maxlen=self.ANSWERS)
        """The last answer times, and the delays by which this process was late itself, in seconds."""
        self._pinged_at: dict[int, float] = {}
        """uid -> when the oldest unanswered ping was sent."""
        self._last_asked = -math.inf
        """When `ask` last pinged nodes because the training had waited for them for AFTER_SECONDS."""
        self._measured_at: dict[int, float] = {}
        """uid -> when the last unanswered ping that only measures was sent."""
        self._last_measured = -math.inf

    @property
    def patience(self) -> float:
        """The time-out: the silence, in seconds, after which a node counts as absent."""
        if len(self._answer_seconds) < self.MIN_ANSWERS:
            return self._longest
        return min(self._longest, max(self.MIN_TIMEOUT_SECONDS, self.TIMEOUT_FACTOR * max(self._answer_seconds)))

    def next_ask(self, waiting_since: float) -> float:
        """Returns when `ask` is due next, if the training has been waiting since `waiting_since`."""
        return min(self._next_look(waiting_since), max(waiting_since, self._last_measured + self.MEASURE_EVERY_SECONDS))

    def repeats_at(self, waiting_since: float) -> float:
        """Returns when the nodes that were pinged in this wait are pinged again; infinite if none was."""
        return self._last_asked + self.EVERY_SECONDS if self._last_asked >= waiting_since else math.inf

    def _next_look(self, waiting_since: float) -> float:
        return max(waiting_since + self.AFTER_SECONDS, self._last_asked + self.EVERY_SECONDS)

    def ask(self, waiting_for: Iterable[int], waiting_since: float, now: float) -> tuple[list[int], list[int]]:
        """Returns (nodes to ping now, nodes that did not answer for too long); at most one of the lists is not
        empty."""
        if self._last_asked < waiting_since:  # pings of an earlier wait were not repeated since
            self._pinged_at.clear()
        due = now >= waiting_since + self.AFTER_SECONDS
        if due:
            self._note_load(now)
        if not due and now >= max(waiting_since, self._last_measured + self.MEASURE_EVERY_SECONDS):
            self._last_measured = now
            self._measured_at = dict.fromkeys(waiting_for, now)
            return sorted(self._measured_at), []
        watched = set(waiting_for) if due else set()
        if due:
            self._last_asked = self._last_measured = now
        self._pinged_at = {uid: since for uid, since in self._pinged_at.items() if uid in watched}
        silent = [uid for uid, since in self._pinged_at.items() if now - since > self.patience]
        if silent:
            return [], silent
        for uid in watched:
            self._pinged_at.setdefault(uid, now)
        return sorted(watched), []

    def _note_load(self, now: float) -> None:
        """Adds the median time that peers take to acknowledge models to the answer times.

        If most peers take long, the links are full, and answers are queued behind models too, however fast they were
        while the links were idle. A few slow peers say nothing about the others.
        """
        delays = sorted(self.load(now))
        if delays:
            self._answer_seconds.append(delays[(len(delays) - 1) // 2])

    def answered(self, uid: int, now: float) -> None:
        """Notes that a node answered a ping."""
        asked = min(self._pinged_at.pop(uid, math.inf), self._measured_at.pop(uid, math.inf))
        if asked <= now:
            self._answer_seconds.append(now - asked)

    def note_heard(self, uid: int) -> None:
        """Notes that some message of this generation arrived from a node, which is therefore alive, though its answer
        to a ping may be queued behind other messages."""
        if self._pinged_at:
            self._pinged_at.pop(uid, None)

    def note_delay(self, seconds: float) -> None:
        """Notes that this process was late for its own timer, because others on such a machine may be as late. A very
        long delay is ignored: this process was suspended, which says nothing about others."""
        if 0 < seconds <= self._longest / 2:
            self._answer_seconds.append(seconds)

    def clear(self) -> None:
        """Forgets all unanswered pings, because a generation ends or this process was not scheduled."""
        self._pinged_at.clear()
        self._measured_at.clear()
