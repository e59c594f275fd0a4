"""Who of those that the training waits for answers, and how long an answer may take: many times as long as answers have
been seen to take, within bounds.

A fixed time is too long for the few that are frozen, and too short for the many on a machine that is busy for once. An
answer needs no round to end: the thread at the sockets gives it. What it takes tells how busy machines and links are;
so does what most peers take to acknowledge models, which may fill the links.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable


class Watch:
    """Of one node. now: seconds of any monotonic clock."""

    AFTER_SECONDS, EVERY_SECONDS = 0.5, 0.25
    """A node that the training has waited for this long is pinged, and then so often."""
    BEAT_SECONDS = 5.0
    """So often, as the training begins to wait for others, these are pinged at once, to learn how long answers take."""
    FLOOR_SECONDS = 1.5
    """Shortest silence that counts, however fast answers were: a process gets no core for a second now and then."""
    TIMES = 8
    """How many times as long as the longest of the last answers a silence has to last."""
    ANSWERS, ENOUGH = 64, 8
    """How many answers are remembered, and how many it takes to know anything: the first may come before models are on
    their way, which fill the link."""

    def __init__(self, suspect_seconds: float) -> None:
        """suspect_seconds: the longest silence that is borne, also while there were not enough answers."""
        self._longest = suspect_seconds
        self.load: Callable[[float], Collection[float]] = lambda _now: ()
        """load(now): how many seconds each peer takes to acknowledge models, or has taken so far; the owner sets it."""
        self._took: deque[float] = deque(maxlen=self.ANSWERS)
        """Seconds until an answer came, and by which this process was late itself: the last ones."""
        self._asked: dict[int, float] = {}
        """uid -> when the oldest ping without an answer left."""
        self._asked_at = -math.inf
        """When `ask` was last due for those that are waited for too long."""
        self._beats: dict[int, float] = {}
        """The same of pings that only measure."""
        self._beat_at = -math.inf

    @property
    def patience(self) -> float:
        """The silence, in seconds, after which a node counts as gone."""
        if len(self._took) < self.ENOUGH:
            return self._longest
        return min(self._longest, max(self.FLOOR_SECONDS, self.TIMES * max(self._took)))

    def next_ask(self, waiting_since: float) -> float:
        """When `ask` is due, as the training waits since then."""
        return min(self._next_look(waiting_since), max(waiting_since, self._beat_at + self.BEAT_SECONDS))

    def repeats_at(self, waiting_since: float) -> float:
        """When those that were asked in this wait are asked again; infinite where nobody was."""
        return self._asked_at + self.EVERY_SECONDS if self._asked_at >= waiting_since else math.inf

    def _next_look(self, waiting_since: float) -> float:
        return max(waiting_since + self.AFTER_SECONDS, self._asked_at + self.EVERY_SECONDS)

    def ask(self, waiting_for: Iterable[int], waiting_since: float, now: float) -> tuple[list[int], list[int]]:
        """Returns (nodes to ping now, nodes that did not answer for too long); at most one of them is not empty."""
        if self._asked_at < waiting_since:  # what was asked in an earlier wait was not repeated since
            self._asked.clear()
        due = now >= waiting_since + self.AFTER_SECONDS
        if due:
            self._note_load(now)
        if not due and now >= max(waiting_since, self._beat_at + self.BEAT_SECONDS):
            self._beat_at = now
            self._beats = dict.fromkeys(waiting_for, now)
            return sorted(self._beats), []
        watched = set(waiting_for) if due else set()
        if due:
            self._asked_at = self._beat_at = now
        self._asked = {uid: since for uid, since in self._asked.items() if uid in watched}
        silent = [uid for uid, since in self._asked.items() if now - since > self.patience]
        if silent:
            return [], silent
        for uid in watched:
            self._asked.setdefault(uid, now)
        return sorted(watched), []

    def _note_load(self, now: float) -> None:
        """Where most peers take long to acknowledge models, links are full, and answers wait behind models, too,
        however fast they were while links were idle. What few peers do not acknowledge says nothing of the others."""
        delays = sorted(self.load(now))
        if delays:
            self._took.append(delays[(len(delays) - 1) // 2])

    def answered(self, uid: int, now: float) -> None:
        """A node answered a ping."""
        asked = min(self._asked.pop(uid, math.inf), self._beats.pop(uid, math.inf))
        if asked <= now:
            self._took.append(now - asked)

    def is_heard(self, uid: int) -> None:
        """Something of this generation came of a node: it lives, though its answer may wait behind what it sends."""
        if self._asked:
            self._asked.pop(uid, None)

    def was_late(self, seconds: float) -> None:
        """This process comes so much later than it was to: others on such a machine may be as late. One that was
        suspended knows nothing of others."""
        if 0 < seconds <= self._longest / 2:
            self._took.append(seconds)

    def clear(self) -> None:
        """A generation ends, or this process did not run: nobody is asked for an answer any more."""
        self._asked.clear()
        self._beats.clear()
