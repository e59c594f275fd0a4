"""Waits of a simulated node: each is taken step by step, because no call of a simulated node may block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from decentnode.communication.base import Arrival, Pending
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.run_state import RunFacts, Steps, Wait
from decentnode.wire.generation import Generation

STEPPED = "a simulated node's waits are steps"
"""The error of calls that can only block."""


class WaitUntil(Wait):
    """Waits for a point in time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def step(self, now: float) -> bool:
        return now >= self.deadline


class SteppedFacts(RunFacts):
    """Facts of a run whose waits are stepped by the simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.notified: Callable[[], None] = lambda: None
        """Called when a wait of this node may be over."""

    def notify(self) -> None:
        self.notified()


class SimulatedExchange(InboxExchange):
    """An exchange that reports what is mixed to the observer."""

    observer: Callable[[Arrival], None]

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait]:
        for step in super().steps(timeout_seconds):
            if isinstance(step, Arrival):
                self.observer(step)
            yield step
            if isinstance(step, Arrival):
                self.observer(step)


class SteppedMean(Pending):
    """A pending mean over the members, taken by steps."""

    def __init__(self, steps: Callable[[float], Steps[tuple[Tensor, int]]], arrived: Callable[[], bool]) -> None:
        """steps(timeout_seconds): as `Pending.steps`. arrived(): as `Pending.arrived`."""
        self._steps, self._arrived = steps, arrived

    @property
    def arrived(self) -> bool:
        return self._arrived()

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        raise NotImplementedError(STEPPED)

    def steps(self, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
        return self._steps(timeout_seconds)


class SteppedGeneration(PendingGeneration):
    """A pending next generation, taken by steps."""

    def __init__(self, steps: Callable[[], Steps[Generation]]) -> None:
        self._steps = steps

    def wait(self) -> Generation:
        raise NotImplementedError(STEPPED)

    def steps(self) -> Steps[Generation]:
        return self._steps()
