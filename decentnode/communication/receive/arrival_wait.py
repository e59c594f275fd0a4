"""The wait for arrivals: tracks which sources are missing, until when to wait for them, and when the wait is over.
Performs no I/O; the waiting thread calls `step`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.receive.partial_payload import PartialPayload
from decentnode.communication.run_state import BROKEN_SECONDS, STOPPING_TIMEOUT_SECONDS, RunFacts

ASKS = 4
"""How often per time-out a source is asked whether it is itself waiting for others. If a source begins to wait later
than three quarters of a time-out after this node did, the node does not learn of it."""


_NOTHING: dict[int, PartialPayload] = {}
STANDSTILL = 0.5
"""Fraction of the time-out. If a step is called later than its deadline by more than this, the process itself was not
running in between."""


class Patience:
    """Decides until when one wait lasts, and when to ask overdue sources whether they are alive.

    Nodes that wait for one that is gone all give up on it after the same time-out, but do not all begin to wait in the
    same round. The payloads of the last of them would then reach the first ones just as these give up in turn.
    Therefore a source that reports that it is itself waiting (`InboxState.lives`) has up to one more time-out.
    """

    def __init__(
        self, status: RunFacts, lives: Mapping[int, float], timeout_seconds: float, used: float, now: float
    ) -> None:
        """used: seconds of the time-out that earlier waits of the round have used."""
        self.began = self.last = now
        self._status, self._lives, self._timeout_seconds, self._used = status, lives, timeout_seconds, used
        self._asks = 0
        self._end = self._limit = self._ask_at = 0.0

    def came(self, when: float) -> None:
        """Restarts the time-out at the time of an arrival, for all sources that are still missing."""
        self.last, self._used, self._asks = when, 0.0, 0

    def postpone(self, seconds: float) -> None:
        """Excludes `seconds` of the elapsed time from the wait."""
        self.began += seconds
        self.last += seconds

    def forgive(self, now: float) -> None:
        """Restarts the wait at `now`: this process was not running before, so that the silence was its own."""
        self.began = now
        self.came(now)

    @property
    def since(self) -> float:
        """When the part of the wait began that is not hidden behind local steps."""
        return max(self.began, self._status.exposed_since)

    def look(self, now: float) -> bool:
        """Updates the deadlines to `now`. Returns whether the missing sources should be asked now."""
        status, limit, start = self._status, self._timeout_seconds, self.last
        if status.stopping:
            limit = min(limit, STOPPING_TIMEOUT_SECONDS)
        if status.exposed_since > start:
            start = status.exposed_since
        start -= self._used
        interval, before = limit / ASKS, self._asks
        self._limit, self._end = limit, start + limit
        while interval > 0 and now >= start + (self._asks + 1) * interval:
            self._asks += 1
        self._ask_at = start + (self._asks + 1) * interval if interval > 0 else math.inf
        return self._asks > before

    def late(self, waiting: list[int], now: float) -> list[int]:
        """Returns the sources of `waiting` that have exceeded their time. Call after `look`."""
        early = now < self._end and not self._status.broken
        return [] if early else [source for source in waiting if now >= self._until(source)]

    def next(self, waiting: list[int]) -> float:
        """Returns the latest time of the next step. Call after `look`."""
        # usually no source was asked, and no connection broke
        until = min(map(self._until, waiting)) if self._lives or self._status.broken else self._end
        return self._ask_at if self._ask_at < until else until

    def _until(self, source: int) -> float:
        broke = self._status.broken.get(source)
        if broke is not None:
            return min(self._end, broke.since + BROKEN_SECONDS)
        said = self._lives.get(source)
        return self._end if said is None else min(max(self._end, said + self._limit), self._end + self._limit)


class ArrivalWait:
    """The wait until every source that can still deliver has delivered one chunk of an exchange, or everything.

    Call `step` until it returns True: immediately, then whenever `InboxPort.ready` is called, and by `deadline` at the
    latest. `arrived` then has the result. An inbox has only one such wait at a time.
    """

    __slots__ = (
        "_began", "_chunk", "_inbox", "_key", "_left_out", "_patience", "_sources", "_timeout_seconds", "_tolerated",
        "arrived", "deadline", "missing",
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
        self._patience: Patience | None = None
        self._left_out = False
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
        if self._patience is not None:
            self._patience.postpone(seconds)

    def step(self, now: float) -> bool:
        """Returns whether the wait is over: the sources have delivered or departed, or nothing arrived for the
        time-out, which all waits of a round share.

        A source that was given up on in a round is waited for again in that round only after it has sent something. A
        source that reports that it is itself waiting has up to twice the time-out, so that nodes that wait for one that
        is gone do not give up on each other. Raises the run's failure if the run has failed.
        """
        inbox, patience = self._inbox, self._patience
        if self._began == -math.inf:
            missing = inbox.outstanding(self._key, self._chunk, self._sources)
            if not missing:
                arrived = inbox.incoming.get(self._key, _NOTHING)
                self.arrived = {source: arrived[source] for source in self._sources}
                return True
            if self._begins_simply(missing, now):
                return False
            patience = self._begin(missing, now)
        else:
            if patience is None:
                if self._is_simply_over(now):
                    return True
                patience = self._patience = Patience(inbox.status, inbox.lives, self._timeout_seconds, 0.0, self._began)
            if now - self.deadline > STANDSTILL * self._timeout_seconds:
                patience.forgive(now)
            self._note_arrivals(patience)
        if self.missing and self._goes_on(patience, now):
            return False
        self._finish(patience, now)
        missing = inbox.outstanding(self._key, self._chunk, self._sources) if self._left_out else []
        arrived = inbox.incoming.get(self._key, _NOTHING)
        self.missing = missing
        self.arrived = {source: arrived[source] for source in self._sources if source not in missing}
        return True

    def _begins_simply(self, missing: list[int], now: float) -> bool:
        """Begins the wait without a `Patience` if only the time-out matters. Returns whether it could. Most waits are
        like this, and are over at the next step."""
        inbox, status = self._inbox, self._inbox.status
        if (self._tolerated or status.waited_seconds or status.given_up or status.departed or status.broken
                or inbox.absences.skips or status.regrouping or status.stopping
                or status.failure is not None):  # fmt: skip
            return False
        self.missing, self._began, self.deadline = missing, now, now + self._timeout_seconds / ASKS
        inbox.want(missing, self._key, self._chunk)
        if status.exposed_since <= now:
            status.wait_for(inbox.absences.whom(self._key, missing), now)
        else:
            status.waiting = None
        return True

    def _is_simply_over(self, now: float) -> bool:
        """Returns whether all sources have delivered, after `_begins_simply`. Counts what `_note_arrivals` and
        `_finish` count, without a `Patience`."""
        inbox, status = self._inbox, self._inbox.status
        if inbox.outstanding(self._key, self._chunk, self.missing):
            return False
        here, last, exposed = inbox.incoming[self._key], 0.0, status.exposed_since
        for source in self.missing:
            if here[source].arrived > last:
                last = here[source].arrived
        since = now if now - self.deadline > STANDSTILL * self._timeout_seconds else self._began
        inbox.count_wait(self.missing[-1:], max(0.0, last - max(since, exposed)))
        status.waiting = None
        status.waited_seconds = max(0.0, now - max(last, exposed))
        self.missing = []
        self.arrived = {source: here[source] for source in self._sources}
        return True

    def _begin(self, missing: list[int], now: float) -> Patience:
        inbox, status = self._inbox, self._inbox.status
        self.missing = missing
        if status.given_up:
            self.missing = [each for each in missing if each not in status.given_up or each not in status.silent]
            self._left_out = len(self.missing) < len(missing)
        used = 0.0 if status.given_up else status.waited_seconds  # the sources that used it up are left out
        self._began = now
        self._patience = patience = Patience(status, inbox.lives, self._timeout_seconds, used, now)
        return patience

    def _goes_on(self, patience: Patience, now: float) -> bool:
        """Returns whether any missing source is still worth waiting for; then sets `deadline`."""
        inbox, status, key = self._inbox, self._inbox.status, self._key
        status.raise_if_failed()
        before = self.missing
        if status.departed or inbox.absences.skips:
            self.missing = [source for source in self.missing if not inbox.absences.comes_no_more(source, key)]
        if patience.look(now):
            inbox.ask(key, self.missing)
        late = patience.late(self.missing, now)
        if late:
            status.silent.update(late)
            status.given_up.update(late)
            inbox.count_wait(late, now - patience.since)
            self.missing = [source for source in self.missing if source not in late]
        if len(self.missing) < len(before) or status.regrouping:
            self._left_out = True
            if not self.missing or status.regrouping:
                return False
        self.deadline = patience.next(self.missing)
        spare = 0
        if self._tolerated:
            spare = self._tolerated - len(inbox.outstanding(key, self._chunk, self._sources)) + len(self.missing)
            if len(self.missing) <= spare:
                over = self._grace_ends(patience)
                if now >= over:
                    self._left_out = True
                    return False
                self.deadline = min(self.deadline, over)
        inbox.want(self.missing, key, self._chunk, spare)
        if status.exposed_since <= now:
            status.wait_for(inbox.absences.whom(key, self.missing), patience.since)
        else:
            status.waiting = None
        return True

    def _grace_ends(self, patience: Patience) -> float:
        """Returns until when to wait for the sources that the quorum tolerates: the grace period begins once the quorum
        has arrived and this node waits."""
        quorum, here = self._inbox.status.quorum, self._inbox.incoming.get(self._key, _NOTHING)
        assert quorum is not None
        outstanding = self._inbox.outstanding(self._key, self._chunk, self._sources)
        came = sorted(here[source].arrived for source in self._sources if source not in outstanding)
        needed = len(self._sources) - self._tolerated
        return max(came[needed - 1] if needed else patience.since, patience.since) + quorum.grace_seconds

    def _note_arrivals(self, patience: Patience) -> None:
        inbox, status = self._inbox, self._inbox.status
        still = inbox.outstanding(self._key, self._chunk, self.missing)
        if len(still) < len(self.missing):
            # the time of arrival, not of this step: the waiting thread is woken only when everything has arrived, or
            # after a second, which would otherwise be added to the wait for the other sources
            here, last = inbox.incoming.get(self._key, _NOTHING), 0.0
            for source in self.missing:
                if source not in still and here[source].arrived > last:
                    last = here[source].arrived
            patience.came(last)
            status.waited_seconds = 0.0
        if not still:
            inbox.count_wait(self.missing[-1:], max(0.0, patience.last - patience.since))
        self.missing = still

    def _finish(self, patience: Patience, now: float) -> None:
        inbox, status = self._inbox, self._inbox.status
        status.waiting = None
        status.waited_seconds += max(0.0, now - max(patience.last, status.exposed_since))
        if self.missing:
            inbox.want((), self._key, self._chunk)
            inbox.count_wait(self.missing, now - patience.since)
