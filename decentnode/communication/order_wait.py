"""The wait of a node that stands still, or that waits for the round before which all do."""

from __future__ import annotations

import logging

from decentnode.communication.run_state import RunFacts
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS

logger = logging.getLogger(__name__)


class OrderWait:
    """As `run_state.Wait`: over once there is something else to do, and after LONGEST_SLEEP_SECONDS, so that the node
    looks whether it is to leave. Nobody is waited for while the run stands still: that is no silence of anybody's."""

    def __init__(self, facts: RunFacts, round: int, until: float) -> None:
        """until: when the node goes on where nobody says when an order is due."""
        self._facts, self._round, self._until = facts, round, until
        self._looks_at = 0.0
        self.deadline = 0.0

    def postpone(self, seconds: float) -> None:
        """As `run_state.PostponableWait.postpone`."""
        self._until += seconds

    def step(self, now: float) -> bool:
        """Raises what every wait raises, and Regrouping."""
        facts = self._facts
        facts.raise_if_over()
        self._looks_at = self._looks_at or now + LONGEST_SLEEP_SECONDS
        what = facts.orders.next(self._round)
        if facts.stopping or what in ("begin", "evaluate") or now >= self._looks_at:
            return True
        if what == "agree" and now >= self._until:
            logger.warning("no node said before which round an order is due: this node continues")
            facts.orders.give_up()
            return True
        self.deadline = min(self._looks_at, self._until) if what == "agree" else self._looks_at
        return False
