"""When a checkpoint is due where nodes are in different rounds: each makes it after a round of its own."""

from __future__ import annotations

from decentnode import clock
from decentnode.checkpoint import agreement
from decentnode.checkpoint.config import CheckpointConfig
from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.node.asynchronous.cuts import MOST, Cuts
from decentnode.node.evaluation import mean_of
from decentnode.node.resumable import Resumable


class DueApart:
    """Numbers the checkpoints of one node (asynchronous/cuts.py).

    The lowest member begins a further one by its own rounds and clock, once all members have made the one before; the
    others make it when they hear of it. So all make the same ones, however much slower one is.
    """

    def __init__(self, node: Resumable, config: CheckpointConfig) -> None:
        self._node, self._config = node, config
        self.cuts.holds = True
        self.begin_period(clock.now())

    @property
    def cuts(self) -> Cuts:
        return self._node.schedule.cuts

    def begin_period(self, now: float) -> None:
        """A checkpoint is made now."""
        self._since, self._round = now, self._node.round

    def begin_generation(self) -> Steps[None]:
        """Let all members go on with the greatest number that one of them is at, as steps."""
        node = self._node
        uids = 1 + max(node.generation.members)  # newcomers are beyond the nodes of the graph
        row = agreement.row([self.cuts.number], node.uid, uids, 1)
        pending = node.communication.mean("generation/checkpoints", row, closing=True)
        timeout_seconds = node.communication.config.timeout_seconds
        found = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
        self.cuts.meet(max(each for each, in agreement.gathered(*found)))

    def begin_if_due(self, told: Pending | None) -> bool:
        """Returns whether a checkpoint is to be made now; then its number counts from here on.

        told: to which all members contribute as they make the one before; None without one."""
        cuts, node, config = self.cuts, self._node, self._config
        if cuts.heard == cuts.number:
            if not node.round or node.uid != node.generation.members[0] or (told is not None and not told.arrived):
                return False
            by_rounds = config.every is not None and node.round // config.every > self._round // config.every
            by_clock = config.minutes is not None and clock.now() - self._since >= 60 * config.minutes
            if not (by_rounds or by_clock) or cuts.number >= MOST:
                return False
            cuts.heard = max(node.round, cuts.number + 1)
        cuts.number = cuts.heard
        return True
