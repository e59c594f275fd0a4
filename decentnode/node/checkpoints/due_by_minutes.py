"""When a checkpoint is due by the clock of one node, said to all others in time for all to make it after one round."""

from __future__ import annotations

import torch

from decentnode import clock
from decentnode.checkpoint import agreement
from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending
from decentnode.node.resumable import Resumable

POLLS_PER_PERIOD = 32
"""The lowest node looks at its clock at least so many times between two checkpoints, where rounds allow."""
MOST_ROUNDS_BETWEEN_POLLS = 1024
"""To ask costs a mean of two numbers; of rounds that are so fast that this is often, it is little."""


class DueByMinutes:
    """Says after which rounds a checkpoint is due by the lowest member's clock, the same on all members.

    After a round that all know, everybody contributes to a mean that carries the lowest member's word, and takes it in
    one round later. Nobody waits for a message that may come too late, and nobody waits at all unless it is a whole
    round ahead of somebody.
    """

    def __init__(self, node: Resumable, minutes: float) -> None:
        """minutes: between two checkpoints. `begin_generation` is to be called first."""
        self._node = node
        self._period_seconds = 60.0 * minutes

    def begin_generation(self) -> None:
        """Forget what was under way with the members of another generation."""
        self._poll: Pending | None = None
        self._ask_at: int | None = -1
        """The round after which the lowest member says whether a checkpoint is due; -1: the next one; None: nobody asks
        any more."""
        self._polled: tuple[float, int] | None = None
        self.begin_period(clock.now())

    def begin_period(self, now: float) -> None:
        """A checkpoint is made now: the next one is due `minutes` later."""
        self._since = now

    def is_due(self) -> Steps[bool]:
        """Returns what the lowest member said one round ago, as steps. Blocking until all members took part in it."""
        poll, self._poll = self._poll, None
        if poll is None:
            return False
        found = yield from mean_unless_ending(self._node, poll, "when a checkpoint is due by minutes any more")
        if found is None:
            self._ask_at = None
            return False
        mean, contributors = found
        due, rounds = agreement.gathered(mean.view(1, -1), contributors)[0]
        self._ask_at = self._node.round + min(max(1, rounds), MOST_ROUNDS_BETWEEN_POLLS)
        return due > 0

    def ask(self) -> None:
        """Before a round: where it is time for it, the lowest member says whether a checkpoint is due after the coming
        round, and after how many further rounds it is to be asked again. Not blocking."""
        node = self._node
        if self._ask_at not in (-1, node.round):
            return
        now, word = clock.now(), torch.zeros(2, dtype=torch.float64)
        if node.uid == node.generation.members[0]:
            period = self._period_seconds
            left = period - (now - self._since)
            due = left <= 0
            if self._polled is None or node.round <= self._polled[1]:
                rounds = 1
            else:
                per_round = max(1e-9, (now - self._polled[0]) / (node.round - self._polled[1]))
                rounds = int(max(period / POLLS_PER_PERIOD, (period if due else left) / 2) / per_round)
            self._polled = now, node.round
            word[0], word[1] = float(due), min(max(1, rounds), MOST_ROUNDS_BETWEEN_POLLS)
        self._poll = node.communication.mean(f"checkpoint/due-{node.round}", word)
