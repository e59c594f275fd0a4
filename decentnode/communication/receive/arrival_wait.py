"""One wait for arrivals: who is still missing, until when, and when it is over. No I/O: whoever waits calls `step`."""

from __future__ import annotations

import math

from decentnode.communication.receive.inbox_state import SUM, ExchangeKey, InboxState
from decentnode.communication.receive.partial_payload import PartialPayload
from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS


class ArrivalWait:
    """Until every source that still will has delivered a chunk of an exchange, or everything.

    Call `step` until it returns True: at once, then whenever `InboxPort.ready` is called, and by `deadline` at the
    latest. Its result is in `arrived` then. One wait of an inbox at a time.
    """

    __slots__ = ("_before", "_began", "_chunk", "_inbox", "_key", "_last", "_sources", "_timeout_seconds", "arrived",
                 "deadline", "missing")  # fmt: skip

    def __init__(
        self, inbox: InboxState, key: ExchangeKey, chunk: int, sources: list[int], timeout_seconds: float
    ) -> None:
        """chunk: or WHOLE. timeout_seconds: without anything arriving; all waits of a round share it."""
        self._inbox, self._key, self._chunk, self._sources = inbox, key, chunk, sources
        self._timeout_seconds = timeout_seconds
        self._began, self._last, self._before = -1.0, 0.0, 0.0
        self.missing: list[int] = []
        """Sources that have not delivered, as of the last step."""
        self.arrived: dict[int, PartialPayload] = {}
        """Once it is over: the payloads of the sources that delivered."""
        self.deadline = -math.inf

    def step(self, now: float) -> bool:
        """Whether the wait is over: the others departed, or nothing came for the time-out, which all waits of a round
        share. Whoever was given up in a round is waited for again in it only once something came. Raises what every
        wait raises once the run has failed."""
        inbox = self._inbox
        if self._began < 0:
            missing = inbox.outstanding(self._key, self._chunk, self._sources)
            if missing:
                self._begin(missing, now)
        else:
            self._note_arrivals(now)
        if self._began >= 0:
            if self._goes_on(now):
                return False
            self._finish(now)
            missing = inbox.outstanding(self._key, self._chunk, self._sources)
        arrived = inbox.incoming.get(self._key, {})
        self.missing = missing
        self.arrived = {source: arrived[source] for source in self._sources if source not in missing}
        return True

    def _begin(self, missing: list[int], now: float) -> None:
        inbox, status = self._inbox, self._inbox.status
        self._began = self._last = now
        self.missing = [each for each in missing if each not in inbox.given_up or each not in status.silent]
        self._before = 0.0 if inbox.given_up else status.waited_seconds  # whoever used that up is not among these

    def _goes_on(self, now: float) -> bool:
        """Whether somebody is worth waiting for; sets `deadline` then."""
        inbox, status, key = self._inbox, self._inbox.status, self._key
        if not self.missing:
            return False
        status.raise_if_failed()
        if status.departed or inbox.skips:
            self.missing = [source for source in self.missing if not inbox.comes_no_more(source, key)]
        timeout_seconds = self._timeout_seconds
        limit = min(timeout_seconds, STOPPING_TIMEOUT_SECONDS) if status.stopping else timeout_seconds
        exposed = status.exposed_since
        self.deadline = max(self._last, exposed) + limit - self._before
        if self.deadline <= now:
            status.silent.update(self.missing)
            inbox.given_up.update(self.missing)
        if not self.missing or self.deadline <= now or status.regrouping:
            return False
        inbox.want(self.missing, key, self._chunk)
        status.waiting = None if exposed > now else (inbox.whom(key, self.missing), max(self._began, exposed))
        return True

    def _note_arrivals(self, now: float) -> None:
        inbox, status = self._inbox, self._inbox.status
        still = inbox.outstanding(self._key, self._chunk, self.missing)
        if len(still) < len(self.missing):
            # when it came, not when it was noticed: the waiting thread is woken once all that it waits for is there, or
            # after a second, which would be added to the wait for the others
            here = inbox.incoming.get(self._key, {})
            times = [here[s].arrived for s in self.missing if s not in still and s in here]
            self._last, self._before = max(times, default=now), 0.0
            status.waited_seconds = 0.0
        if not still and self.missing[-1] != SUM:
            waited = self._last - max(self._began, status.exposed_since)
            inbox.counters.edge(self.missing[-1]).wait_seconds += max(0.0, waited)
        self.missing = still

    def _finish(self, now: float) -> None:
        inbox, status = self._inbox, self._inbox.status
        inbox.want((), self._key, self._chunk)
        status.waiting = None
        status.waited_seconds += max(0.0, now - max(self._last, status.exposed_since))
        for source in self.missing:
            if source != SUM:
                waited = now - max(self._began, status.exposed_since)
                inbox.counters.edge(source).wait_seconds += max(0.0, waited)
