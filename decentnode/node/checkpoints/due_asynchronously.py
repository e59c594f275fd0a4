"""Decides when a checkpoint is due under an asynchronous schedule, where each node makes it after its own round."""

from __future__ import annotations

from decentnode import clock
from decentnode.checkpoint import agreement
from decentnode.checkpoint.config import CheckpointConfig
from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.node.measuring.evaluation import mean_of
from decentnode.node.resumable import Resumable
from decentnode.node.schedules.asynchronous.cuts import MAX_NUMBER, Cuts

MAX_UNASKED = 8
"""The number of checkpoints per generation, initiated by other nodes, that a node makes even if neither its own round
count nor its clock allows for them."""


class DueAsynchronously:
    """Numbers the checkpoints of one node (asynchronous/cuts.py).

    The lowest member initiates a checkpoint when it is due by its own round count or clock, once all members have made
    the previous one; the other members make it when they learn its number from a payload. So all members make the same
    checkpoints, however slow one of them is. A member that does not report its last checkpoint delays the next one by
    the time-out. A member that invents numbers can cause at most MAX_UNASKED checkpoints plus twice as many as the run
    is configured to make; after that, a node only makes those that are due by its own round count or clock.
    """

    def __init__(self, node: Resumable, config: CheckpointConfig) -> None:
        self._node, self._config = node, config
        self.cuts.holds_back, self.cuts.rounds = True, node.config.rounds
        self.begin_period(clock.now())
        self._reset()

    @property
    def cuts(self) -> Cuts:
        return self._node.schedule.cuts

    def begin_period(self, now: float) -> None:
        """Begin a new interval: a checkpoint is made at time `now`."""
        self._interval_began, self._round_at_last = now, self._node.round

    def _reset(self) -> None:
        self._generation_began, self._unasked, self.cuts.trusts_numbers = clock.now(), 0, True

    def begin_generation(self) -> Steps[None]:
        """Let all members continue with the greatest checkpoint number that any of them has reached, as steps."""
        node = self._node
        self._reset()
        uids = 1 + max(node.generation.members)  # newcomers are beyond the nodes of the graph
        row = agreement.row([self.cuts.number], node.uid, uids, 1)
        pending = node.communication.mean("generation/checkpoints", row, closing=True)
        timeout_seconds = node.communication.config.timeout_seconds
        found = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
        numbers = [each for each, in agreement.gathered(*found)]
        self.cuts.adopt(max(each for each in (0, *numbers) if self.cuts.is_possible(each)))

    def begin_if_due(self, previous_report: Pending | None) -> bool:
        """Returns whether a checkpoint is to be made now; if so, its number is in force from then on.

        previous_report: the mean to which all members contribute when they make the previous checkpoint; None if there
        is none."""
        cuts, node, config, now = self.cuts, self._node, self._config, clock.now()
        by_rounds = config.every is not None and node.round // config.every > self._round_at_last // config.every
        by_clock = config.minutes is not None and now - self._interval_began >= 60 * config.minutes
        due = by_rounds or by_clock
        if cuts.highest_known == cuts.number:
            if not due or not node.round or node.uid != node.generation.members[0] or cuts.number >= MAX_NUMBER:
                return False
            waited_seconds, timeout_seconds = now - self._interval_began, node.communication.config.timeout_seconds
            if previous_report is not None and not previous_report.arrived and waited_seconds < timeout_seconds:
                return False
            cuts.highest_known = max(node.round, cuts.number + 1)
        else:
            self._unasked += 1
            cuts.trusts_numbers = cuts.trusts_numbers and self._unasked <= self._most_unasked(now)
            if not (due or cuts.trusts_numbers):
                return False
        cuts.number = cuts.highest_known
        return True

    def _most_unasked(self, now: float) -> float:
        """Returns how many checkpoints honest members can have initiated in this generation by now: twice what the
        round count and the clock allow, as clocks differ, plus MAX_UNASKED."""
        config = self._config
        by_rounds = self._node.config.rounds // config.every if config.every is not None else 0
        by_clock = (now - self._generation_began) / (60 * config.minutes) if config.minutes is not None else 0.0
        return MAX_UNASKED + 2 * (by_rounds + by_clock)
