"""What a simulated node waits for: each wait is taken step by step, as no call of a simulated node blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from decentnode.communication.base import Arrival, Pending
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.run_state import RunFacts, Steps, Wait
from decentnode.wire.generation import Generation

STEPPED = "a simulated node's waits are steps"
"""Why a call that could only block is refused."""


class Until(Wait):
    """The wait for a moment."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def step(self, now: float) -> bool:
        return now >= self.deadline


class SteppedFacts(RunFacts):
    """Facts whose waits are stepped by the simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.notified: Callable[[], None] = lambda: None
        """A wait of this node may be over."""

    def notify(self) -> None:
        self.notified()


class SimulatedExchange(InboxExchange):
    """Tells the witness what is mixed."""

    witness: Callable[[Arrival], None]

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait]:
        for step in super().steps(timeout_seconds):
            if isinstance(step, Arrival):
                self.witness(step)
            yield step
            if isinstance(step, Arrival):
                self.witness(step)


class SteppedMean(Pending):
    """A mean on its way."""

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
    """The next generation of members, on its way."""

    def __init__(self, steps: Callable[[], Steps[Generation]]) -> None:
        self._steps = steps

    def wait(self) -> Generation:
        raise NotImplementedError(STEPPED)

    def steps(self) -> Steps[Generation]:
        return self._steps()
