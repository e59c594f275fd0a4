"""Orders from the operator to all nodes of a run: pause, resume, evaluate. All nodes obey before the same round.

An order goes up the control tree to the root and from there to every node (`Order`). Each node answers with the round
that it begins next and does not begin it; on the way up each node forwards only the latest round of its subtree
(`Position`). The root announces the latest of all (`Due`), and all nodes obey before that round, so that no payload is
in flight on any transport while they are paused. `NodeOrders` decides what a node does until then. Resuming needs no
agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from decentnode.wire.control_tree import ControlTree
from decentnode.wire.messages import Due, Message, Order, Position

Action = Literal["pause", "resume", "evaluate", "meet"]
"""meet: pause before a stop, which the node that ordered it sends soon after. If the stop does not arrive, nodes stop
by themselves: a pause may last forever, but the node that ordered the stop may be dead."""
ACTIONS: tuple[Action, ...] = ("pause", "resume", "evaluate", "meet")
"""Messages carry the index of an action in this tuple."""
MEET_SECONDS, MEET_ROUNDS = 5.0, 3.0
"""How long nodes may take to meet: so many seconds, plus so many times the longest of the last rounds, for the current
round and one that others have begun."""
MAX_QUEUED_ORDERS = len(ACTIONS)
"""Most orders that wait at the root until the previous one is agreed on: each action once."""

Next = Literal["begin", "agree", "hold", "meet", "evaluate"]
"""What a node does next, before a round. begin: it begins the round. agree: it waits for the round of an order. hold:
it is paused. meet: it is paused until the run stops. evaluate: it evaluates."""


@dataclass(frozen=True)
class Ordered:
    """The run is ordered to do `action`. The owner answers with the round that this node begins next
    (`OrderTree.answer`)."""

    serial: int
    action: Action


@dataclass(frozen=True)
class OrderDue:
    """This node carries out `action` before `round`."""

    action: Action
    round: int


OrderEvent = Ordered | OrderDue
Send = Callable[..., None]
"""send(receiver, message class, *fields) sends a message."""


class OrderTree:
    """One node's part in agreeing on orders, within one generation of members. Not thread-safe; never blocks."""

    def __init__(self, send: Send, tree: Callable[[], ControlTree]) -> None:
        self._send, self._tree = send, tree
        self.begin_generation()

    def begin_generation(self) -> None:
        """Discards the orders that the members of the previous generation have not agreed on yet."""
        self._serial = 0
        self._action: Action = "resume"
        self._undecided = self._answered = False
        """Whether the last order is not agreed on yet, and whether this node has answered with its round."""
        self._unanswered: set[int] = set()
        self._highest = 0
        self._queued: list[Action] = []

    def ask(self, action: Action) -> list[OrderEvent]:
        """Gives an order at this node, and returns the events. If the same order is given again before it is agreed on,
        the agreement starts again."""
        parent = self._tree().parent
        if parent is not None:
            self._send(parent, Order, ACTIONS.index(action), 0, 0)
            return []
        return self._accept(action)

    def receive(self, message: Message) -> list[OrderEvent]:
        """Handles an Order, Position or Due from a neighbor in the tree, and returns the events."""
        if isinstance(message, Order):
            action = ACTIONS[message.action]
            if not message.down:
                return self.ask(action)
            return self._start(message.serial, action) if message.serial > self._serial else []
        if isinstance(message, Position):
            if message.serial != self._serial or message.source not in self._unanswered:
                return []
            self._unanswered.discard(message.source)
            self._highest = max(self._highest, message.round)
            return self._collect()
        assert isinstance(message, Due), "an order, or part of one"
        return self._decide(message.round) if message.serial == self._serial and self._undecided else []

    def answer(self, serial: int, round: int) -> list[OrderEvent]:
        """Answers the order `serial`: this node begins `round` next, and waits with it for `OrderDue`."""
        if serial != self._serial or not self._undecided:
            return []
        self._answered, self._highest = True, max(self._highest, round)
        return self._collect()

    def _accept(self, action: Action) -> list[OrderEvent]:
        """Takes an order at the root, or queues it until the current one is agreed on."""
        if action == "resume":  # it cancels the orders to pause that are still queued
            self._queued = [each for each in self._queued if each == "evaluate"]
        elif self._undecided and action != self._action:
            if action not in self._queued:
                self._queued.append(action)
            return []
        return self._start(self._serial + 1, action)

    def _start(self, serial: int, action: Action) -> list[OrderEvent]:
        children = self._tree().children
        self._serial, self._action, self._undecided, self._answered = serial, action, action != "resume", False
        self._unanswered, self._highest = set(children), 0
        for child in children:
            self._send(child, Order, ACTIONS.index(action), serial, 1)
        return [Ordered(serial, action), *self._start_next()]

    def _collect(self) -> list[OrderEvent]:
        if not self._answered or self._unanswered:
            return []
        parent = self._tree().parent
        if parent is None:
            return self._decide(self._highest)
        self._send(parent, Position, self._serial, self._highest)
        return []

    def _decide(self, round: int) -> list[OrderEvent]:
        self._undecided = False
        for child in self._tree().children:
            self._send(child, Due, self._serial, round)
        return [OrderDue(self._action, round), *self._start_next()]

    def _start_next(self) -> list[OrderEvent]:
        return self._accept(self._queued.pop(0)) if self._queued and not self._undecided else []


class NodeOrders:
    """Decides what a node does about orders before each round.

    The I/O thread and the training thread use it under one lock.
    """

    def __init__(self) -> None:
        self.round = -1
        """The round that was begun last."""
        self.apart = False
        """Whether nodes are in different rounds, as with asynchronous schedules; each then obeys before its own next
        round."""
        self._promised = False
        self._hold: int | None = None
        self._meets = False
        """Whether this node is paused because the run is about to stop."""
        self._evaluate: set[int] = set()
        """Rounds before which this node evaluates. A node that is behind may have several ahead of it, at most one for
        each round."""

    @property
    def paused(self) -> bool:
        """Whether the run is ordered to pause."""
        return self._hold is not None

    def hear(self, action: Action) -> int:
        """Notes an order that is being agreed on. Returns the round that this node begins next; it does not begin it
        until `due`."""
        if action == "resume":
            self._promised, self._hold, self._meets = False, None, False
        else:
            self._promised = not self.apart
        return self.round + 1

    def due(self, action: Action, round: int) -> None:
        """Notes that the order is to be carried out before `round`."""
        self._promised = False
        if action in ("pause", "meet"):
            self._hold = -1 if self.apart else round
            self._meets = self._meets or action == "meet"
        else:
            self._evaluate.add(-1 if self.apart else round)

    def give_up(self) -> None:
        """Stops waiting for the round of an order, which did not arrive: the node continues."""
        self._promised = False

    def next(self, round: int) -> Next:
        """Returns what the node does next before `round`. "begin" also records the round as begun."""
        if self._evaluate and round >= min(self._evaluate):
            return "evaluate"
        if self._promised and round > self.round:
            return "agree"
        if self._hold is not None and round >= self._hold:
            return "meet" if self._meets else "hold"
        self.round = round
        return "begin"

    def evaluated(self, round: int) -> None:
        """Notes that the evaluation ordered before `round` is done."""
        self._evaluate = {each for each in self._evaluate if each > round}

    def begin_generation(self, first_round: int) -> Action | None:
        """Resets the orders for a new generation, which begins with `first_round`.

        If the run was paused, returns the order that has to be given again to the new members; until it is agreed on,
        this node continues with them. Returns None if it was not paused.
        """
        again: Action | None = None if not self.paused else "meet" if self._meets else "pause"
        self._hold, self._meets, self._evaluate, self._promised = None, False, set(), False
        self.round = first_round - 1
        return again
