"""The wait for arrivals: tracks which sources are missing, until when to wait for them, and when the wait is over.
Performs no I/O; the waiting thread calls `step`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.receive.partial_payload import PartialPayload
from decentnode.communication.run_state import BROKEN_SECONDS, STOPPING_TIMEOUT_SECONDS, RunFacts

ASKS_PER_TIMEOUT = 4
"""How often per time-out a source is asked whether it is itself waiting for others. If a source begins to wait later
than three quarters of a time-out after this node did, the node does not learn of it."""


_NOTHING: dict[int, PartialPayload] = {}
STALL_FRACTION = 0.5
"""Fraction of the time-out. If a step is called later than its deadline by more than this, the process itself was not
running in between."""


class WaitDeadlines:
    """Decides until when one wait lasts, and when to ask overdue sources whether they are waiting themselves.

    Nodes that wait for one that is gone all give up on it after the same time-out, but do not all begin to wait in the
    same round. The payloads of the last of them would then reach the first ones just as these give up in turn.
    Therefore a source that reports that it is itself waiting (`InboxState.reported_waiting`) has up to one more
    time-out.
    """

    def __init__(
        self, facts: RunFacts, reported_waiting: Mapping[int, float], timeout_seconds: float, used: float, now: float
    ) -> None:
        """used: seconds of the time-out that earlier waits of the round have used."""
        self.began = self.last = now
        self._facts, self._reported_waiting = facts, reported_waiting
        self._timeout_seconds, self._used = timeout_seconds, used
        self._asks = 0
        self._end = self._limit = self._ask_at = 0.0

    def note_arrival(self, when: float) -> None:
        """Restarts the time-out at the time of an arrival, for all sources that are still missing."""
        self.last, self._used, self._asks = when, 0.0, 0

    def postpone(self, seconds: float) -> None:
        """Excludes `seconds` of the elapsed time from the wait."""
        self.began += seconds
        self.last += seconds

    def restart(self, now: float) -> None:
        """Restarts the wait at `now`: this process was not running before, so that the silence was its own."""
        self.began = now
        self.note_arrival(now)

    @property
    def since(self) -> float:
        """When the part of the wait began that is not hidden behind local steps."""
        return max(self.began, self._facts.blocked_since)

    def update(self, now: float) -> bool:
        """Updates the deadlines to `now`. Returns whether the missing sources should be asked now."""
        facts, limit, start = self._facts, self._timeout_seconds, self.last
        if facts.stopping:
            limit = min(limit, STOPPING_TIMEOUT_SECONDS)
        if facts.blocked_since > start:
            start = facts.blocked_since
        start -= self._used
        interval, before = limit / ASKS_PER_TIMEOUT, self._asks
        self._limit, self._end = limit, start + limit
        while interval > 0 and now >= start + (self._asks + 1) * interval:
            self._asks += 1
        self._ask_at = start + (self._asks + 1) * interval if interval > 0 else math.inf
        return self._asks > before

    def timed_out(self, waiting: list[int], now: float) -> list[int]:
        """Returns the sources of `waiting` that have exceeded their time. Call after `update`."""
        is_early = now < self._end and not self._facts.broken
        return [] if is_early else [source for source in waiting if now >= self._give_up_at(source)]

    def next_step_at(self, waiting: list[int]) -> float:
        """Returns the latest time of the next step. Call after `update`."""
        # usually no source was asked, and no connection broke
        until = min(map(self._give_up_at, waiting)) if self._reported_waiting or self._facts.broken else self._end
        return self._ask_at if self._ask_at < until else until

    def _give_up_at(self, source: int) -> float:
        breakage = self._facts.broken.get(source)
        if breakage is not None:
            return min(self._end, breakage.since + BROKEN_SECONDS)
        reported = self._reported_waiting.get(source)
        return self._end if reported is None else min(max(self._end, reported + self._limit), self._end + self._limit)


class ArrivalWait:
    """The wait until every source that can still deliver has delivered one chunk of an exchange, or everything.

    Call `step` until it returns True: immediately, then whenever `InboxPort.ready` is called, and by `deadline` at the
    latest. `arrived` then has the result. An inbox has only one such wait at a time.
    """

    __slots__ = (
        "_began", "_chunk", "_deadlines", "_has_left_out_sources", "_inbox", "_key", "_sources", "_timeout_seconds",
        "_tolerated", "_used_seconds", "arrived", "deadline", "missing",
    )  # fmt: skip

    def __init__(
        self, inbox: InboxState, key: ExchangeKey, chunk: int, sources: list[int], timeout_seconds: float,
        tolerated: int = 0,
    ) -> None:
        """chunk: the number of the chunk, or WHOLE. timeout_seconds: longest time without an arrival; shared by all
        waits of a round. tolerated: once no more than this many sources are missing, they are waited for only as long
        as `RunFacts.quorum` says."""
        self._inbox, self._key, self._chunk, self._sources = inbox, key, chunk, sources
        self._timeout_seconds, self._tolerated = timeout_seconds, tolerated
        self._began = -math.inf
        self._used_seconds = 0.0
        """Seconds of the time-out that earlier waits of the round have used."""
        self._deadlines: WaitDeadlines | None = None
        self._has_left_out_sources = False
        """Whether the wait ends without sources that have not delivered."""
        self.missing: list[int] = []
        """Sources that had not delivered at the last step."""
        self.arrived: dict[int, PartialPayload] = {}
        """After the wait: the payloads of the sources that delivered."""
        self.deadline = -math.inf

    def postpone(self, seconds: float) -> None:
        """See `run_state.PostponableWait.postpone`."""
        if self._began == -math.inf:
            return
        self._began += seconds
        self.deadline += seconds
        if self._deadlines is not None:
            self._deadlines.postpone(seconds)

    def step(self, now: float) -> bool:
        """Returns whether the wait is over: the sources have delivered or departed, or nothing arrived for the
        time-out, which all waits of a round share.

        A source that was given up on in a round is waited for again in that round only after it has sent something. A
        source that reports that it is itself waiting has up to twice the time-out, so that nodes that wait for one that
        is gone do not give up on each other. Raises the run's failure if the run has failed.
        """
        inbox, deadlines = self._inbox, self._deadlines
        if self._began == -math.inf:
            missing = inbox.outstanding(self._key, self._chunk, self._sources)
            if not missing:
                arrived = inbox.incoming.get(self._key, _NOTHING)
                self.arrived = {source: arrived[source] for source in self._sources}
                return True
            if self._begin_without_deadlines(missing, now):
                return False
            deadlines = self._begin(missing, now)
        else:
            if deadlines is None:
                if self._is_over_without_deadlines(now):
                    return True
                deadlines = self._new_deadlines(self._used_seconds, self._began)
            if now - self.deadline > STALL_FRACTION * self._timeout_seconds:
                deadlines.restart(now)
            self._note_arrivals(deadlines)
        if self.missing and self._keep_waiting(deadlines, now):
            return False
        self._finish(deadlines, now)
        missing = inbox.outstanding(self._key, self._chunk, self._sources) if self._has_left_out_sources else []
        arrived = inbox.incoming.get(self._key, _NOTHING)
        self.missing = missing
        self.arrived = {source: arrived[source] for source in self._sources if source not in missing}
        return True

    def _begin_without_deadlines(self, missing: list[int], now: float) -> bool:
        """Begins the wait without a `WaitDeadlines` if only the time-out matters. Returns whether it could. Most waits
        are like this, and are over at the next step."""
        inbox, facts = self._inbox, self._inbox.facts
        used_seconds, interval = facts.waited_seconds, self._timeout_seconds / ASKS_PER_TIMEOUT
        if (self._tolerated or (used_seconds and used_seconds >= interval) or facts.timed_out or facts.departed
                or facts.broken or inbox.absences.skips or facts.regrouping or facts.stopping
                or facts.failure is not None):  # fmt: skip
            return False
        self.missing, self._began, self._used_seconds = missing, now, used_seconds
        self.deadline = now - used_seconds + interval
        inbox.set_wanted(missing, self._key, self._chunk)
        if facts.blocked_since <= now:
            facts.wait_for(inbox.absences.nodes_of(self._key, missing), now)
        else:
            facts.waiting = None
        return True

    def _is_over_without_deadlines(self, now: float) -> bool:
        """Returns whether all sources have delivered, after `_begin_without_deadlines`. Counts what `_note_arrivals`
        and `_finish` count, without a `WaitDeadlines`."""
        inbox, facts = self._inbox, self._inbox.facts
        if inbox.outstanding(self._key, self._chunk, self.missing):
            return False
        payloads, last, exposed = inbox.incoming[self._key], 0.0, facts.blocked_since
        for source in self.missing:
            if payloads[source].arrived_at > last:
                last = payloads[source].arrived_at
        since = now if now - self.deadline > STALL_FRACTION * self._timeout_seconds else self._began
        inbox.count_wait(self.missing[-1:], max(0.0, last - max(since, exposed)))
        facts.waiting = None
        facts.waited_seconds = max(0.0, now - max(last, exposed))
        self.missing = []
        self.arrived = {source: payloads[source] for source in self._sources}
        return True

    def _begin(self, missing: list[int], now: float) -> WaitDeadlines:
        facts = self._inbox.facts
        self.missing = missing
        if facts.timed_out:
            self.missing = [each for each in missing if each not in facts.timed_out or each not in facts.silent]
            self._has_left_out_sources = len(self.missing) < len(missing)
        used_seconds = 0.0 if facts.timed_out else facts.waited_seconds  # the sources that used it up are left out
        self._began = now
        return self._new_deadlines(used_seconds, now)

    def _new_deadlines(self, used_seconds: float, now: float) -> WaitDeadlines:
        inbox = self._inbox
        self._deadlines = WaitDeadlines(inbox.facts, inbox.reported_waiting, self._timeout_seconds, used_seconds, now)
        return self._deadlines

    def _keep_waiting(self, deadlines: WaitDeadlines, now: float) -> bool:
        """Returns whether any missing source is still worth waiting for; then sets `deadline`."""
        inbox, facts, key = self._inbox, self._inbox.facts, self._key
        facts.raise_if_failed()
        before = self.missing
        if facts.departed or inbox.absences.skips:
            self.missing = [source for source in self.missing if not inbox.absences.will_not_arrive(source, key)]
        if deadlines.update(now):
            inbox.ask(key, self.missing)
        timed_out = deadlines.timed_out(self.missing, now)
        if timed_out:
            facts.silent.update(timed_out)
            facts.timed_out.update(timed_out)
            inbox.count_wait(timed_out, now - deadlines.since)
            self.missing = [source for source in self.missing if source not in timed_out]
        if len(self.missing) < len(before) or facts.regrouping:
            self._has_left_out_sources = True
            if not self.missing or facts.regrouping:
                return False
        self.deadline = deadlines.next_step_at(self.missing)
        spare = 0
        if self._tolerated:
            spare = self._tolerated - len(inbox.outstanding(key, self._chunk, self._sources)) + len(self.missing)
            if len(self.missing) <= spare:
                grace_deadline = self._grace_deadline(deadlines)
                if now >= grace_deadline:
                    self._has_left_out_sources = True
                    return False
                self.deadline = min(self.deadline, grace_deadline)
        inbox.set_wanted(self.missing, key, self._chunk, spare)
        if facts.blocked_since <= now:
            facts.wait_for(inbox.absences.nodes_of(key, self.missing), deadlines.since)
        else:
            facts.waiting = None
        return True

    def _grace_deadline(self, deadlines: WaitDeadlines) -> float:
        """Returns until when to wait for the sources that the quorum tolerates: the grace period begins once the quorum
        has arrived and this node waits."""
        quorum, payloads = self._inbox.facts.quorum, self._inbox.incoming.get(self._key, _NOTHING)
        assert quorum is not None
        outstanding = self._inbox.outstanding(self._key, self._chunk, self._sources)
        arrival_times = sorted(payloads[source].arrived_at for source in self._sources if source not in outstanding)
        needed = len(self._sources) - self._tolerated
        return max(arrival_times[needed - 1] if needed else deadlines.since, deadlines.since) + quorum.grace_seconds

    def _note_arrivals(self, deadlines: WaitDeadlines) -> None:
        inbox, facts = self._inbox, self._inbox.facts
        outstanding = inbox.outstanding(self._key, self._chunk, self.missing)
        if len(outstanding) < len(self.missing):
            # the time of arrival, not of this step: the waiting thread is woken only when everything has arrived, or
            # after a second, which would otherwise be added to the wait for the other sources
            payloads, last = inbox.incoming.get(self._key, _NOTHING), 0.0
            for source in self.missing:
                if source not in outstanding and payloads[source].arrived_at > last:
                    last = payloads[source].arrived_at
            deadlines.note_arrival(last)
            facts.waited_seconds = 0.0
        if not outstanding:
            inbox.count_wait(self.missing[-1:], max(0.0, deadlines.last - deadlines.since))
        self.missing = outstanding

    def _finish(self, deadlines: WaitDeadlines, now: float) -> None:
        inbox, facts = self._inbox, self._inbox.facts
        facts.waiting = None
        facts.waited_seconds += max(0.0, now - max(deadlines.last, facts.blocked_since))
        if self.missing:
            inbox.set_wanted((), self._key, self._chunk)
            inbox.count_wait(self.missing, now - deadlines.since)
