"""Decides by the clock of one node when a checkpoint is due, early enough that all nodes make it after the same
round."""

from __future__ import annotations

import torch

from decentnode import clock
from decentnode.checkpoint import agreement
from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending
from decentnode.node.resumable import Resumable

POLLS_PER_PERIOD = 32
"""The least number of times that the lowest member checks its clock between two checkpoints, if rounds are short enough
for it."""
MAX_ROUNDS_BETWEEN_POLLS = 1024
"""A poll costs a mean of two numbers over all nodes, which is negligible over this many rounds even if rounds are so
short that this bound applies."""


class DueByMinutes:
    """Decides after which rounds a checkpoint is due by the lowest member's clock, with the same result on all members.

    In a poll, all members contribute to a mean that carries the lowest member's answer, after a round on which all
    agree, and read the result one round later. So no node waits for a message that may come too late, and a node only
    waits at all if it is a whole round ahead of another one.
    """

    def __init__(self, node: Resumable, minutes: float) -> None:
        """minutes: the interval between two checkpoints. `begin_generation` must be called before any other method."""
        self._node = node
        self._period_seconds = 60.0 * minutes

    def begin_generation(self) -> None:
        """Discard a poll of the previous generation's members, and begin a new interval."""
        self._pending_poll: Pending | None = None
        self._next_poll_round: int | None = -1
        """The round after which the next poll takes place; -1: after the next round; None: there are no further
        polls."""
        self._last_poll: tuple[float, int] | None = None
        self.begin_period(clock.now())

    def begin_period(self, now: float) -> None:
        """Begin a new interval: a checkpoint is made at time `now`, and the next one is due `minutes` later."""
        self._interval_began = now

    def is_due(self) -> Steps[bool]:
        """Returns the lowest member's answer of one round ago, as steps. Blocks until all members have contributed to
        it."""
        pending_poll, self._pending_poll = self._pending_poll, None
        if pending_poll is None:
            return False
        found = yield from mean_unless_ending(self._node, pending_poll, "when a checkpoint is due by minutes any more")
        if found is None:
            self._next_poll_round = None
            return False
        mean, contributors = found
        due, rounds = agreement.gathered(mean.view(1, -1), contributors)[0]
        self._next_poll_round = self._node.round + min(max(1, rounds), MAX_ROUNDS_BETWEEN_POLLS)
        return due > 0

    def begin_poll_if_due(self) -> None:
        """Begin a poll if one is scheduled before this round: the lowest member tells whether a checkpoint is due after
        the coming round, and in how many rounds the next poll is to take place. Not blocking."""
        node = self._node
        if self._next_poll_round not in (-1, node.round):
            return
        now, answer = clock.now(), torch.zeros(2, dtype=torch.float64)
        if node.uid == node.generation.members[0]:
            period = self._period_seconds
            seconds_left = period - (now - self._interval_began)
            due = seconds_left <= 0
            if self._last_poll is None or node.round <= self._last_poll[1]:
                rounds = 1
            else:
                per_round = max(1e-9, (now - self._last_poll[0]) / (node.round - self._last_poll[1]))
                rounds = int(max(period / POLLS_PER_PERIOD, (period if due else seconds_left) / 2) / per_round)
            self._last_poll = now, node.round
            answer[0], answer[1] = float(due), min(max(1, rounds), MAX_ROUNDS_BETWEEN_POLLS)
        self._pending_poll = node.communication.mean(f"checkpoint/due-{node.round}", answer)
