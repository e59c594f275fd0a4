"""Handles what users request of a running node: stop the run, leave it, pause, resume or evaluate."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any, Protocol

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.run_state import Steps
from decentnode.wire.orders import MEET_ROUNDS, MEET_SECONDS, Action

logger = logging.getLogger(__name__)


class OrderableNode(Protocol):
    """The part of `Node` that `OrderHandler` uses; see `Node` for the docstrings."""

    round: int
    evaluated: int
    doing: str

    @property
    def over(self) -> bool: ...

    def record(self, record: dict[str, Any], /) -> None: ...

    def evaluate_between(self, ordered: bool = False) -> Steps[None]: ...


class OrderHandler:
    """Accepts requests from any thread or signal handler, and carries them out between rounds on the training
    thread."""

    def __init__(self, node: OrderableNode, communication: Communication) -> None:
        self._node, self._communication = node, communication
        self._stop_asked = self._leave_asked = False
        self._last_round_began: float | None = None
        """`clock.now()` when the last round began."""

    # -- any thread -------------------------------------------------------------------------------------------

    def ask_stop(self) -> None:
        """As `Node.ask_stop`."""
        self._stop_asked = True
        self._communication.stop_asked()

    def order(self, action: Action) -> None:
        """As `Node.order`."""
        self._communication.order(action)

    def ask_leave(self) -> None:
        """As `Node.ask_leave`."""
        self._leave_asked = True

    def refusal_to_leave(self, others: Collection[int]) -> str:
        """As `Node.refusal_to_leave`."""
        if self._node.over or self._communication.stopping:
            return "the run is ending"
        return self._communication.refusal_to_leave(others)

    @property
    def left(self) -> bool:
        """As `Node.left`."""
        return self._leave_asked and not self._node.over and not self._communication.stopping

    # -- the training thread ----------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Whether this node has to end before its next round."""
        return self._leave_asked or self._communication.leaving

    def stopping(self) -> bool:
        """Returns whether the run is stopping; announces the stop to the other nodes if it was requested from this
        one."""
        if self._stop_asked and not self._communication.stopping:
            self._communication.announce_stop()
        return self._communication.stopping

    def obey(self) -> Steps[None]:
        """Evaluate or pause before a round if that was ordered (wire/orders.py), as steps. A pause also ends if the run
        stops or this node is to leave. If the node that ordered a stop died before it announced the stop, a node that
        waits for it announces the stop itself, MEET_SECONDS plus MEET_ROUNDS times the longer one of the time-out and
        its last round after it began to wait."""
        node, communication, since = self._node, self._communication, clock.now()
        timeout_seconds = communication.config.timeout_seconds
        deadline, was_paused, stops_at = since + timeout_seconds, False, math.inf
        last_round_began = since if self._last_round_began is None else self._last_round_began
        longest_round = max(timeout_seconds, since - last_round_began)
        while (next_step := communication.next_step(node.round)) != "begin":
            if self.stopping() or self.leaving:
                break
            if next_step == "evaluate":
                if node.evaluated != node.round:
                    if communication.history is not None:
                        communication.history.ordered(node.round)
                    yield from node.evaluate_between(ordered=True)
                self._record_action("evaluated")
                communication.order_done(node.round)
                continue
            is_paused = next_step in ("hold", "meet")
            if is_paused and not was_paused:
                was_paused = True
                self._record_action("paused")
            if next_step == "meet":
                stops_at = min(stops_at, clock.now() + MEET_SECONDS + MEET_ROUNDS * longest_round)
                if clock.now() >= stops_at and not self._stop_asked:
                    logger.warning("the node that ordered the run to stop is silent: this node stops the run")
                    self.ask_stop()
            node.doing = "paused" if is_paused else "agreeing on an order"
            yield from communication.wait_for_order(node.round, deadline)
        self._last_round_began = clock.now()
        if was_paused and not self.stopping():
            self._record_action("resumed")

    def _record_action(self, action: str) -> None:
        self._node.record({"kind": "control", "what": action, "round": self._node.round, "time": clock.recorded()})
