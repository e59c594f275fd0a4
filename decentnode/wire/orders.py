"""Orders of people to all nodes of a run: to pause, to go on, to evaluate. All nodes obey before the same round.

An order goes up the control tree to its root and from there to every node (`Order`). Each answers with the round that
it begins next, and does not begin it; on the way up only the latest is kept (`Position`). That is the round before
which all nodes obey (`Due`), so that nothing is under way between them while they stand still, on no transport. What
each node does until then, `NodeOrders` knows. To go on, nothing has to be agreed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from decentnode.wire.control_tree import ControlTree
from decentnode.wire.messages import Due, Message, Order, Position

Action = Literal["pause", "resume", "evaluate", "meet"]
"""meet: as pause, before a stop, which whoever orders it tells soon after. Where nobody does, nodes stop by themselves:
a pause may last for ever, and who ordered a stop may be dead."""
ACTIONS: tuple[Action, ...] = ("pause", "resume", "evaluate", "meet")
"""In messages an action is its place here."""
MEET_SECONDS, MEET_ROUNDS = 5.0, 3.0
"""How long nodes may take to meet, in seconds and, beside that, in rounds as long as the longest of those that were
made last: the one under way, and one that others began."""
MOST_LATER = len(ACTIONS)
"""Orders that wait at the root until the one before is agreed on: each once."""

Next = Literal["begin", "agree", "hold", "meet", "evaluate"]
"""What comes next at a node before a round: it begins, it waits for the round of an order, it stands still, also until
the run stops, it evaluates."""


@dataclass(frozen=True)
class Ordered:
    """The run is ordered to do `action`: `OrderTree.answer` is to be given the round that this node begins next."""

    serial: int
    action: Action


@dataclass(frozen=True)
class OrderDue:
    """`action` is to be obeyed before `round`."""

    action: Action
    round: int


OrderEvent = Ordered | OrderDue
Send = Callable[..., None]
"""send(to, kind of message, fields)."""


class OrderTree:
    """One node's part in the agreement, within one generation of members. Not thread-safe; never blocks."""

    def __init__(self, send: Send, tree: Callable[[], ControlTree]) -> None:
        self._send, self._tree = send, tree
        self.begin_generation()

    def begin_generation(self) -> None:
        """Forget what the members of another generation were about to agree on."""
        self._serial = 0
        self._action: Action = "resume"
        self._open = self._own = False
        """Whether the last order is still to be agreed on, and whether this node has said its round."""
        self._waiting: set[int] = set()
        self._highest = 0
        self._later: list[Action] = []

    def ask(self, action: Action) -> list[OrderEvent]:
        """Somebody at this node orders. Asked again, an order that is not agreed on begins anew."""
        parent = self._tree().parent
        if parent is not None:
            self._send(parent, Order, ACTIONS.index(action), 0, 0)
            return []
        return self._take(action)

    def receive(self, message: Message) -> list[OrderEvent]:
        """An Order, Position or Due from a neighbor in the tree."""
        if isinstance(message, Order):
            action = ACTIONS[message.action]
            if not message.down:
                return self.ask(action)
            return self._hear(message.serial, action) if message.serial > self._serial else []
        if isinstance(message, Position):
            if message.serial != self._serial or message.source not in self._waiting:
                return []
            self._waiting.discard(message.source)
            self._highest = max(self._highest, message.round)
            return self._collect()
        assert isinstance(message, Due), "an order, or part of one"
        return self._decide(message.round) if message.serial == self._serial and self._open else []

    def answer(self, serial: int, round: int) -> list[OrderEvent]:
        """This node begins `round` next, and not before it hears when the order is due."""
        if serial != self._serial or not self._open:
            return []
        self._own, self._highest = True, max(self._highest, round)
        return self._collect()

    def _take(self, action: Action) -> list[OrderEvent]:
        """At the root."""
        if action == "resume":  # what else was ordered to stand still, it takes back
            self._later = [each for each in self._later if each == "evaluate"]
        elif self._open and action != self._action:
            if action not in self._later:
                self._later.append(action)
            return []
        return self._hear(self._serial + 1, action)

    def _hear(self, serial: int, action: Action) -> list[OrderEvent]:
        children = self._tree().children
        self._serial, self._action, self._open, self._own = serial, action, action != "resume", False
        self._waiting, self._highest = set(children), 0
        for child in children:
            self._send(child, Order, ACTIONS.index(action), serial, 1)
        return [Ordered(serial, action), *self._next()]

    def _collect(self) -> list[OrderEvent]:
        if not self._own or self._waiting:
            return []
        parent = self._tree().parent
        if parent is None:
            return self._decide(self._highest)
        self._send(parent, Position, self._serial, self._highest)
        return []

    def _decide(self, round: int) -> list[OrderEvent]:
        self._open = False
        for child in self._tree().children:
            self._send(child, Due, self._serial, round)
        return [OrderDue(self._action, round), *self._next()]

    def _next(self) -> list[OrderEvent]:
        return self._take(self._later.pop(0)) if self._later and not self._open else []


class NodeOrders:
    """What a node does of orders. Used under one lock by the thread of the links and by that of the training."""

    def __init__(self) -> None:
        self.round = -1
        """The one that was begun last."""
        self.apart = False
        """Whether nodes are in different rounds, as with asynchronous schedules: each obeys before its next one."""
        self._promised = False
        self._hold: int | None = None
        self._meets = False
        """Whether what this node stands still for is a stop."""
        self._evaluate: set[int] = set()
        """Before which rounds: a node that is behind may have several before it, one for each round at most."""

    @property
    def paused(self) -> bool:
        """Whether the run is ordered to stand still."""
        return self._hold is not None

    def hear(self, action: Action) -> int:
        """An order is being agreed on. Returns the round that this node begins next, and does not begin until `due`."""
        if action == "resume":
            self._promised, self._hold, self._meets = False, None, False
        else:
            self._promised = not self.apart
        return self.round + 1

    def due(self, action: Action, round: int) -> None:
        """The order is to be obeyed before `round`."""
        self._promised = False
        if action in ("pause", "meet"):
            self._hold = -1 if self.apart else round
            self._meets = self._meets or action == "meet"
        else:
            self._evaluate.add(-1 if self.apart else round)

    def give_up(self) -> None:
        """Nobody says when the order is due: go on."""
        self._promised = False

    def next(self, round: int) -> Next:
        """What comes next before `round`; where it begins, it is begun."""
        if self._evaluate and round >= min(self._evaluate):
            return "evaluate"
        if self._promised and round > self.round:
            return "agree"
        if self._hold is not None and round >= self._hold:
            return "meet" if self._meets else "hold"
        self.round = round
        return "begin"

    def evaluated(self, round: int) -> None:
        """The evaluation that was ordered before `round` is over."""
        self._evaluate = {each for each in self._evaluate if each > round}

    def begin_generation(self, first_round: int) -> Action | None:
        """Other members begin `first_round`. Returns with what order they have to be told anew to stand still: until
        then this node goes on with them. None where they need not."""
        again: Action | None = None if not self.paused else "meet" if self._meets else "pause"
        self._hold, self._meets, self._evaluate, self._promised = None, False, set(), False
        self.round = first_round - 1
        return again
