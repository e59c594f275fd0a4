"""What all nodes of one process have in common: what they sent, in which generation they are, what was ordered."""

from __future__ import annotations

import functools
import threading

from torch import Tensor

from decentnode.communication.run_state import Wait
from decentnode.payload import Payload
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action, Next, NodeOrders

HOLD_SECONDS = 0.2
"""While all nodes stand still, one of them waits so long for an order to go on before the others are stepped."""
PayloadKey = tuple[int, int, int, int]
"""Round, phase, source, destination."""


class Hub:
    """What the nodes of one process have in common."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.run_id = b""
        """Set by whoever starts the run."""
        self.payloads: dict[PayloadKey, Payload] = {}
        self.mailboxes: dict[tuple[int, int], dict[int, dict[int, Payload]]] = {}
        """By channel and receiver, then source: the newest payloads that were not taken yet, by round."""
        self.means: dict[str, dict[int, Tensor]] = {}
        self.taken: dict[str, int] = {}
        self.reports: dict[int, dict[str, float | int | str]] = {}
        self.stopping = False
        self.departed: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.generation = Generation(0, tuple(range(num_nodes)))
        """In force as soon as every member asked for it."""
        self.asked: dict[int, tuple[int, bool]] = {}
        """Who asked for it already: rounds that are over there, and whether it has no model."""
        self.behind: set[int] = set()
        """Who makes rounds before the first of the generation. All others wait in that one, so that all go on in step.
        """

    @functools.cached_property
    def orders(self) -> Orders:
        """What people ordered."""
        return Orders(self)

    def lose(self, uid: int) -> None:
        """The node `uid` is stepped no more: the others go on in another generation."""
        self._begin({*self.generation.members} - {uid})

    def admit(self, uid: int) -> None:
        """A new node `uid`, made by `Communication.join`, takes part in the next generation."""
        self._begin({*self.generation.members} | {uid})

    def _begin(self, members: set[int]) -> None:
        self.generation = Generation(self.generation.number + 1, tuple(sorted(members)))
        self.asked.clear()
        self.behind.clear()
        self.payloads.clear()
        self.mailboxes.clear()
        self.means.clear()
        self.taken.clear()

    def post(self, channel: int, target: int, source: int, round: int, payload: Payload, kept: int) -> None:
        """Put a payload into a mailbox, which keeps the newest `kept` of each source."""
        here = self.mailboxes.setdefault((channel, target), {}).setdefault(source, {})
        here[round] = payload
        if len(here) > kept:
            del here[min(here)]

    def deliver(self) -> None:
        """Before a node looks into its mailboxes: put there what has arrived by now; here it has been at once."""

    def computed(self) -> Wait | None:
        """As `Communication.computed`."""
        return None

    def tree_mean(self, key: str) -> tuple[Tensor, int]:
        """The mean, added up along the control tree exactly as the networked transports do."""
        tensors, members = self.means[key], self.generation.members

        def total(uid: int) -> tuple[Tensor, int]:
            sum_, count = tensors[uid].clone(), 1
            for child in ControlTree.among(uid, members).children:
                below, contributors = total(child)
                sum_.add_(below.to(sum_.device))
                count += contributors
            return sum_, count

        sum_, count = total(members[0])
        return sum_.div_(count), count


class Orders:
    """Orders to all nodes of a hub, from any thread: all of them are here, so that nobody has to be asked."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._nodes: dict[int, NodeOrders] = {}
        self.apart = False

    def order(self, action: Action) -> None:
        """As `Communication.order`."""
        with self._lock:
            nodes = [self._of(uid) for uid in self._hub.generation.members]
            round = max([each.hear(action) for each in nodes], default=0)
            for each in nodes:
                if action != "resume":
                    each.due(action, round)
        self._news.set()

    def _of(self, uid: int) -> NodeOrders:
        if uid not in self._nodes:
            self._nodes[uid] = NodeOrders()
        self._nodes[uid].apart = self.apart
        return self._nodes[uid]

    def next(self, uid: int, round: int) -> Next:
        """As `Communication.next_step`."""
        with self._lock:
            return self._of(uid).next(round)

    def evaluated(self, uid: int, round: int) -> None:
        """As `Communication.order_obeyed`."""
        with self._lock:
            self._of(uid).evaluated(round)

    def wait(self, uid: int) -> None:
        """To be called by every node that stands still: the last of them blocks for HOLD_SECONDS at most, where all
        others do, too."""
        if uid == self._hub.generation.members[-1] and not self._hub.stopping:
            self._news.wait(HOLD_SECONDS)
            self._news.clear()
