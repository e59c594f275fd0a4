"""The state that all nodes of an in-process run share: payloads, mailboxes, means, the membership generation, and user
orders."""

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
"""While all nodes are paused, one of them waits this long for an order to resume before the others are stepped."""
PayloadKey = tuple[int, int, int, int]
"""(round, phase, source, destination)"""


class Hub:
    """The state that all nodes of an in-process run share."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.run_id = b""
        """Set by the code that starts the run."""
        self.payloads: dict[PayloadKey, Payload] = {}
        self.mailboxes: dict[tuple[int, int], dict[int, dict[int, Payload]]] = {}
        """By (channel, receiver), then by source, then by round: the newest payloads that were not taken yet."""
        self.means: dict[str, dict[int, Tensor]] = {}
        self.taken: dict[str, int] = {}
        self._computed_means: dict[str, tuple[Tensor, int]] = {}
        self.reports: dict[int, dict[str, float | int | str]] = {}
        self.stopping = False
        self.departed: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.generation = Generation(0, tuple(range(num_nodes)))
        """The current generation; in force as soon as every member has asked for it."""
        self.asked: dict[int, tuple[int, bool]] = {}
        """By uid of a node that has asked for the generation: how many rounds are over there, and whether it has no
        model."""
        self.behind: set[int] = set()
        """Nodes in rounds before the first round of the generation. All others wait in that round, so that all nodes
        continue in step."""

    @functools.cached_property
    def orders(self) -> Orders:
        """User orders to all nodes."""
        return Orders(self)

    def lose(self, uid: int) -> None:
        """Removes the node `uid`, which is no longer stepped: the others continue in a new generation."""
        self._begin({*self.generation.members} - {uid})

    def admit(self, uid: int) -> None:
        """Adds a new node `uid`, created by `Communication.join`, to the next generation."""
        self._begin({*self.generation.members} | {uid})

    def _begin(self, members: set[int]) -> None:
        self.generation = Generation(self.generation.number + 1, tuple(sorted(members)))
        self.asked.clear()
        self.behind.clear()
        self.payloads.clear()
        self.mailboxes.clear()
        self.means.clear()
        self.taken.clear()
        self._computed_means.clear()

    def post(self, channel: int, target: int, source: int, round: int, payload: Payload, kept: int) -> None:
        """Puts a payload into a mailbox, which keeps the newest `kept` payloads of each source."""
        here = self.mailboxes.setdefault((channel, target), {}).setdefault(source, {})
        here[round] = payload
        if len(here) > kept:
            del here[min(here)]

    def deliver(self) -> None:
        """Puts into the mailboxes what has arrived by now; called before a node reads its mailboxes. Does nothing here,
        because payloads arrive immediately."""

    def computed(self) -> Wait | None:
        """See `Communication.computed`."""
        return None

    def take_mean(self, key: str) -> tuple[Tensor, int]:
        """Returns (mean, number of contributors) for one member, which may change the tensor. Every member has
        contributed. Once all have taken it, it is forgotten."""
        if key not in self._computed_means:
            self._computed_means[key] = self._tree_mean(key)
        mean, count = self._computed_means[key]
        self.taken[key] = self.taken.get(key, 0) + 1
        if self.taken[key] < len(self.generation.members):
            return mean.clone(), count
        del self.means[key], self.taken[key], self._computed_means[key]
        return mean, count

    def _tree_mean(self, key: str) -> tuple[Tensor, int]:
        """Returns the mean, added up along the control tree exactly as the networked transports do."""
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
    """User orders to all nodes of a hub, from any thread. All nodes are in this process, so none has to be asked by
    message."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._nodes: dict[int, NodeOrders] = {}
        self.apart = False

    def order(self, action: Action) -> None:
        """See `Communication.order`."""
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
        """See `Communication.next_step`."""
        with self._lock:
            return self._of(uid).next(round)

    def evaluated(self, uid: int, round: int) -> None:
        """See `Communication.order_done`."""
        with self._lock:
            self._of(uid).evaluated(round)

    def wait(self, uid: int) -> None:
        """Called by every paused node. Only the last of them blocks, for HOLD_SECONDS at most, because then all nodes
        are paused."""
        if uid == self._hub.generation.members[-1] and not self._hub.stopping:
            self._news.wait(HOLD_SECONDS)
            self._news.clear()
