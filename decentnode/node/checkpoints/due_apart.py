"""When a checkpoint is due where nodes are in different rounds: each makes it after a round of its own."""

from __future__ import annotations

from decentnode import clock
from decentnode.checkpoint import agreement
from decentnode.checkpoint.config import CheckpointConfig
from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.node.measuring.evaluation import mean_of
from decentnode.node.resumable import Resumable
from decentnode.node.schedules.asynchronous.cuts import MOST, Cuts

MOST_UNASKED = 8
"""Checkpoints begun by others that a node makes in a generation whatever its own rounds and clock say."""


class DueApart:
    """Numbers the checkpoints of one node (asynchronous/cuts.py).

    The lowest member begins a further one by its own rounds and clock, once all members have made the one before; the
    others make it when they hear of it. So all make the same ones, however much slower one is. A member that says
    nothing holds up the next one for a time-out; numbers that somebody makes up cost MOST_UNASKED checkpoints and twice
    those of the run, and then no more than the node would begin by itself.
    """

    def __init__(self, node: Resumable, config: CheckpointConfig) -> None:
        self._node, self._config = node, config
        self.cuts.holds, self.cuts.rounds = True, node.config.rounds
        self.begin_period(clock.now())
        self._forget()

    @property
    def cuts(self) -> Cuts:
        return self._node.schedule.cuts

    def begin_period(self, now: float) -> None:
        """A checkpoint is made now."""
        self._since, self._round = now, self._node.round

    def _forget(self) -> None:
        self._began, self._unasked, self.cuts.believes = clock.now(), 0, True

    def begin_generation(self) -> Steps[None]:
        """Let all members go on with the greatest number that one of them is at, as steps."""
        node = self._node
        self._forget()
        uids = 1 + max(node.generation.members)  # newcomers are beyond the nodes of the graph
        row = agreement.row([self.cuts.number], node.uid, uids, 1)
        pending = node.communication.mean("generation/checkpoints", row, closing=True)
        timeout_seconds = node.communication.config.timeout_seconds
        found = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
        numbers = [each for each, in agreement.gathered(*found)]
        self.cuts.meet(max(each for each in (0, *numbers) if self.cuts.is_possible(each)))

    def begin_if_due(self, told: Pending | None) -> bool:
        """Returns whether a checkpoint is to be made now; then its number counts from here on.

        told: to which all members contribute as they make the one before; None without one."""
        cuts, node, config, now = self.cuts, self._node, self._config, clock.now()
        by_rounds = config.every is not None and node.round // config.every > self._round // config.every
        by_clock = config.minutes is not None and now - self._since >= 60 * config.minutes
        due = by_rounds or by_clock
        if cuts.heard == cuts.number:
            if not due or not node.round or node.uid != node.generation.members[0] or cuts.number >= MOST:
                return False
            if told is not None and not told.arrived and now - self._since < node.communication.config.timeout_seconds:
                return False
            cuts.heard = max(node.round, cuts.number + 1)
        else:
            self._unasked += 1
            cuts.believes = cuts.believes and self._unasked <= self._most_unasked(now)
            if not (due or cuts.believes):
                return False
        cuts.number = cuts.heard
        return True

    def _most_unasked(self, now: float) -> float:
        """How many checkpoints of this generation others may have begun by now that keep to the rules: twice what the
        rounds and the clock allow, as clocks differ, and MOST_UNASKED."""
        config = self._config
        by_rounds = self._node.config.rounds // config.every if config.every is not None else 0
        by_clock = (now - self._began) / (60 * config.minutes) if config.minutes is not None else 0.0
        return MOST_UNASKED + 2 * (by_rounds + by_clock)
