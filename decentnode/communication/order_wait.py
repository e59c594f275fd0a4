"""The wait of a paused node, or of one that waits to learn before which round all nodes pause."""

from __future__ import annotations

import logging

from decentnode.communication.run_state import RunFacts
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS

logger = logging.getLogger(__name__)


class OrderWait:
    """A `run_state.Wait` that ends once there is something else to do, and after LONGEST_SLEEP_SECONDS so that the node
    can check whether it is to leave. The node waits for no peer while the run is paused, so the pause counts as
    nobody's silence."""

    def __init__(self, facts: RunFacts, round: int, until: float) -> None:
        """until: when the node continues if no node has said before which round the order is due."""
        self._facts, self._round, self._until = facts, round, until
        self._check_at = 0.0
        self.deadline = 0.0

    def postpone(self, seconds: float) -> None:
        """See `run_state.PostponableWait.postpone`."""
        self._until += seconds

    def step(self, now: float) -> bool:
        """See `run_state.Wait.step`. Raises Regrouping once the generation has ended, and the run's failure."""
        facts = self._facts
        facts.raise_if_over()
        self._check_at = self._check_at or now + LONGEST_SLEEP_SECONDS
        what = facts.orders.next(self._round)
        if facts.stopping or what in ("begin", "evaluate") or now >= self._check_at:
            return True
        if what == "agree" and now >= self._until:
            logger.warning("no node said before which round an order is due: this node continues")
            facts.orders.give_up()
            return True
        self.deadline = min(self._check_at, self._until) if what == "agree" else self._check_at
        return False
