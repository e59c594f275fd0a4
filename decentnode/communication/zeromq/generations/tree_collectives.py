"""Thread-safe access to `CollectiveState` (means, barriers, closing reports), and the training thread's waits for
it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Pending
from decentnode.communication.run_state import RunState, Steps, blocking
from decentnode.communication.zeromq.protocol.collective_state import CollectiveState, MeanWait, ReportsWait
from decentnode.communication.zeromq.protocol.tree_mean import own_share
from decentnode.communication.zeromq.sockets.link_driver import LinkDriver


class PendingMean(Pending):
    def __init__(self, owner: TreeCollectives, key: str, closing: bool, like: Tensor) -> None:
        self._owner, self._key, self._closing = owner, key, closing
        self._shape, self._device = like.shape, like.device

    @property
    def arrived(self) -> bool:
        with self._owner.state.lock:
            return self._key in self._owner.collective_state.means.done

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        wait = self._owner.mean_wait(self._key, self._closing, timeout_seconds)
        self._owner.state.block(wait)
        return self._result(wait)

    def steps(self, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
        wait = self._owner.mean_wait(self._key, self._closing, timeout_seconds)
        yield from self._owner.state.wait_steps(wait)
        return self._result(wait)

    def _result(self, wait: MeanWait) -> tuple[Tensor, int]:
        assert wait.result is not None
        mean, contributors = wait.result
        return mean.view(self._shape).to(self._device), contributors


class TreeCollectives:
    """The training thread's access to the collectives of one generation.

    Calls that change the `CollectiveState` or send take the driver's lock and then the lock of the `RunState`; the I/O
    thread takes them in the same order. A wait takes only the second.
    """

    def __init__(self, collective_state: CollectiveState, driver: LinkDriver, state: RunState) -> None:
        self.collective_state, self._driver, self.state = collective_state, driver, state

    def mean(self, key: str, tensor: Tensor, closing: bool) -> Pending:
        """Implements `Communication.mean`."""
        self.state.raise_if_over()
        share = own_share(tensor)
        with self._driver.sending(), self.state.lock:
            self.collective_state.begin_mean(key, share, clock.now())
        return PendingMean(self, key, closing, tensor)

    def mean_wait(self, key: str, closing: bool, timeout_seconds: float) -> MeanWait:
        """Returns the wait for a mean; its time-out begins now."""
        return MeanWait(self.collective_state, key, closing, timeout_seconds, clock.now())

    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Implements `Communication.barrier`."""
        self.state.raise_if_over()
        with self._driver.sending(), self.state.lock:
            wait = self.collective_state.enter_barrier(name, timeout_seconds, clock.now())
        self.state.block(wait)

    def report(self, figures: Mapping[str, float | int | str]) -> None:
        """Implements `Communication.report`."""
        with self._driver.sending(), self.state.lock:
            self.collective_state.report(dict(figures), clock.now())

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        """Implements `Communication.reports`. On nodes other than the lowest uid it waits for the reports of the
        subtree, which are forwarded through this node."""
        return blocking(self.reports_steps(timeout_seconds), self.state.block)

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:
        """The same as `reports`, as steps."""
        yield from self.state.wait_steps(ReportsWait(self.collective_state, timeout_seconds, clock.now()))
        with self.state.lock:
            return self.collective_state.reports()
