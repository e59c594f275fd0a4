"""Means, barriers and closing reports where threads meet: the locks around `CollectiveState`, and the waits of the
training thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Pending
from decentnode.communication.run_state import RunState
from decentnode.communication.zeromq.collective_state import CollectiveState, MeanWait, ReportsWait
from decentnode.communication.zeromq.link_driver import LinkDriver
from decentnode.communication.zeromq.tree_mean import own_share


class PendingMean(Pending):
    def __init__(self, owner: TreeCollectives, key: str, closing: bool, shape: torch.Size) -> None:
        self._owner, self._key, self._closing, self._shape = owner, key, closing, shape

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        mean, contributors = self._owner.wait_mean(self._key, self._closing, timeout_seconds)
        return mean.view(self._shape), contributors


class TreeCollectives:
    """The training thread's end. What changes `of`, or sends, needs the driver's lock and then that of the run's state,
    which the I/O thread takes in the same order; a wait needs the second alone."""

    def __init__(self, of: CollectiveState, driver: LinkDriver, state: RunState) -> None:
        self.of, self._driver, self._state = of, driver, state

    def mean(self, key: str, tensor: Tensor, closing: bool) -> Pending:
        """What `Communication.mean` does."""
        self._state.raise_if_over()
        share = own_share(tensor)
        with self._driver.sending(), self._state.lock:
            self.of.begin_mean(key, share, clock.now())
        return PendingMean(self, key, closing, tensor.shape)

    def wait_mean(self, key: str, closing: bool, timeout_seconds: float) -> tuple[Tensor, int]:
        """What `Pending.wait` does."""
        wait = MeanWait(self.of, key, closing, timeout_seconds, clock.now())
        self._state.block(wait)
        assert wait.result is not None
        return wait.result

    def barrier(self, name: str, timeout_seconds: float) -> None:
        """What `Communication.barrier` does."""
        self._state.raise_if_over()
        with self._driver.sending(), self._state.lock:
            wait = self.of.enter_barrier(name, timeout_seconds, clock.now())
        self._state.block(wait)

    def report(self, figures: Mapping[str, float | int | str]) -> None:
        """What `Communication.report` does."""
        with self._driver.sending(), self._state.lock:
            self.of.report(dict(figures), clock.now())

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        """Elsewhere than on the lowest uid this waits for the subtree, whose reports pass through here."""
        self._state.block(ReportsWait(self.of, timeout_seconds, clock.now()))
        with self._state.lock:
            return self.of.reports()
