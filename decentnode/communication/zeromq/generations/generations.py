"""Thread-safe access to `Reconfiguration`, and the training thread's waits for generations of members."""

from __future__ import annotations

from collections.abc import Callable, Collection

from decentnode import clock, entropy
from decentnode.communication.parts import TransportParts
from decentnode.communication.run_state import RunState
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS
from decentnode.communication.zeromq.protocol.reconfiguration import EndWait, GenerationWait, Reconfiguration
from decentnode.communication.zeromq.run_parts import RunParts
from decentnode.communication.zeromq.sockets.link_driver import LinkDriver
from decentnode.errors import Regrouping
from decentnode.wire.generation import Generation
from decentnode.wire.membership import Membership


def generations_of(run: RunParts, parts: TransportParts) -> Generations | None:
    """Returns the object with which this node agrees with others on members; None if the run has only one
    generation."""
    if parts.limits is None:
        return None
    membership = Membership(run.uid, len(run.machine_of), parts.limits, draw=entropy.draw, digest=parts.digest,
                            describe=run.addresses.describe, founders=parts.founders,
                            seat=b"" if parts.growth is None else parts.growth.token)  # fmt: skip
    run.state.on_wait_began = lambda since: run.driver.io.due_by(membership.watch.next_ask(since))
    made = Reconfiguration(membership, run.driver.links.sender, run.state, run.counters, run.state.wake)
    return Generations(made, run.driver, run.state)


class Generations:
    """One node's access to its `Reconfiguration`, all of whose state is guarded by the driver's lock."""

    def __init__(self, reconfiguration: Reconfiguration, driver: LinkDriver, state: RunState) -> None:
        self.reconfiguration = reconfiguration
        self._driver, self._state = driver, state

    # -- any thread -------------------------------------------------------------------------------------------

    def suspect(self, uids: Collection[int], reason: str, *, dead: bool = False) -> None:
        """Calls `Reconfiguration.suspect`."""
        with self._driver.sending():
            self.reconfiguration.suspect(uids, reason, clock.now(), dead=dead)

    def renew(self, reason: str) -> None:
        """Calls `Reconfiguration.renew`."""
        with self._driver.sending():
            self.reconfiguration.renew(reason, clock.now())

    def fail(self) -> None:
        """Calls `Reconfiguration.fail`."""
        with self._driver.sending():
            self.reconfiguration.fail(clock.now())

    # -- training thread --------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """Calls `Reconfiguration.leave`."""
        with self._driver.sending():
            self.reconfiguration.leave(reason, clock.now())

    def enter(self, round: int) -> None:
        """Calls `Reconfiguration.enter`."""
        with self._driver.lock:
            self.reconfiguration.enter(round)

    def end_after(self, rounds: int) -> None:
        """Calls `Reconfiguration.end_after`."""
        with self._driver.lock:
            self.reconfiguration.end_after(rounds)

    def begin_at(self, round: int) -> None:
        """Calls `Reconfiguration.begin_at`."""
        with self._driver.lock:
            self.reconfiguration.begin_at(round)

    def mark_caught_up(self) -> None:
        """Calls `Reconfiguration.mark_caught_up`."""
        with self._driver.lock:
            self.reconfiguration.mark_caught_up()

    def mark_in_sync(self, generation: Generation) -> None:
        """Calls `Reconfiguration.mark_in_sync`."""
        with self._driver.lock:
            self.reconfiguration.mark_in_sync(generation)

    def stop(self) -> None:
        """Schedules `Reconfiguration.stop` on the I/O thread. May be called from any thread or signal handler."""
        self._driver.call(lambda: self.reconfiguration.stop(clock.now()))

    def wait(self, alone_seconds: float, together_seconds: float, install: Callable[[Generation], None]) -> Generation:
        """Blocks until the next generation is in force, and returns it. Raises what `GenerationWait.step` raises.

        install(generation): called with the driver's lock held; replaces the parts of the old generation.
        """
        reconfiguration, state = self.reconfiguration, self._state
        with self._driver.lock:
            wait = GenerationWait(reconfiguration, alone_seconds, together_seconds, install, clock.now())
        while True:
            with self._driver.sending():
                over = wait.step(now := clock.now())
            if over:
                assert wait.generation is not None
                return wait.generation
            with state.changed:
                if not wait.has_news:
                    state.changed.wait(max(0.0, min(wait.deadline - now, LONGEST_SLEEP_SECONDS)))

    def over(self, error: Exception, seconds: float) -> bool:
        """Returns whether an error of the training thread only means that the generation has ended. Blocks for up to
        `seconds`."""
        self._state.block(EndWait(self._state, seconds, clock.now()))
        return isinstance(error, Regrouping) or bool(self._state.regrouping)
