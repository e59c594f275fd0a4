"""All nodes obey an order before the same round, whoever gave it and however messages and rounds mix."""

from __future__ import annotations

import random

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.messages import Due, Message, Order, Position
from decentnode.wire.orders import Action, NodeOrders, OrderDue, Ordered, OrderEvent, OrderTree
from decentnode.wire.session import Session

RUN = b"run-id-8"


class Run:
    """Nodes on a ring: one ends a round once both neighbors have begun it. Messages of a link keep their order."""

    def __init__(self, num_nodes: int, seed: int, apart: bool = False) -> None:
        self.draw = random.Random(seed)
        self.links: dict[tuple[int, int], list[Message]] = {}
        self.orders = [NodeOrders() for _ in range(num_nodes)]
        for each in self.orders:
            each.apart = apart
        self.trees = [self.tree(uid, num_nodes) for uid in range(num_nodes)]
        self.held: dict[int, set[int]] = {}
        self.evaluated: dict[int, list[int]] = {uid: [] for uid in range(num_nodes)}
        self.next = [0] * num_nodes

    def tree(self, uid: int, num_nodes: int) -> OrderTree:
        return OrderTree(lambda *fields: self.say(uid, *fields), lambda: ControlTree.of(uid, num_nodes))

    def say(self, uid: int, to: int, kind: type[Message], *values: int) -> None:
        self.links.setdefault((uid, to), []).append(kind(RUN, 0, uid, *values))

    def happens(self, uid: int, events: list[OrderEvent]) -> None:
        for event in events:
            if isinstance(event, Ordered):
                self.happens(uid, self.trees[uid].answer(event.serial, self.orders[uid].hear(event.action)))
            else:
                self.orders[uid].due(event.action, event.round)

    def order(self, uid: int, action: Action) -> None:
        self.happens(uid, self.trees[uid].ask(action))

    def go(self, uid: int) -> bool:
        """One step of a node's training thread. Returns whether anything happened."""
        round, n = self.next[uid], len(self.next)
        if round and min(self.next[uid - 1], self.next[(uid + 1) % n]) < round:
            return False  # in the round before, it waits for a neighbor
        what = self.orders[uid].next(round)
        if what == "evaluate":
            if self.evaluated[uid][-1:] != [round]:  # as nodes do
                self.evaluated[uid].append(round)
            self.orders[uid].evaluated(round)
        elif what == "hold":
            before = self.held.setdefault(round, set())
            changed = uid not in before
            before.add(uid)
            return changed
        elif what == "begin":
            self.next[uid] += 1
        return what != "agree"

    def some(self, steps: int, rounds: int = 10**9) -> None:
        for _ in range(steps):
            uid = self.draw.randrange(len(self.next))
            links = [link for link, queue in self.links.items() if queue]
            if links and self.draw.random() < 0.5:
                link = self.draw.choice(links)
                self.happens(link[1], self.trees[link[1]].receive(self.links[link].pop(0)))
            elif self.next[uid] < rounds:
                self.go(uid)

    def settle(self) -> None:
        while any(self.links.values()) or sum(self.go(uid) for uid in range(len(self.next))):
            for link, queue in [*self.links.items()]:
                if queue:
                    self.happens(link[1], self.trees[link[1]].receive(queue.pop(0)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_all_stand_still_before_one_round_and_evaluate_there(nodes: int, seed: int) -> None:
    run = Run(nodes, seed)
    run.some(30 * nodes)
    run.order(run.draw.randrange(nodes), "pause")
    run.settle()
    round = run.next[0]
    assert run.next == [round] * nodes and run.held[round] == set(range(nodes))
    assert all(each.paused for each in run.orders)
    run.order(run.draw.randrange(nodes), "evaluate")
    run.settle()
    assert all(found == [round] for found in run.evaluated.values())
    assert run.next == [round] * nodes, "an evaluation does not end the pause"
    run.order(run.draw.randrange(nodes), "resume")
    run.some(60 * nodes + 100)
    assert min(run.next) > round


@pytest.mark.parametrize("seed", range(12))
def test_orders_that_cross_each_other_are_obeyed_alike(seed: int) -> None:
    run = Run(12, seed)
    for _ in range(12):
        run.some(run.draw.randrange(200))
        run.order(run.draw.randrange(12), run.draw.choice(["pause", "resume", "evaluate", "evaluate"]))
    run.some(4000)
    run.order(3, "resume")
    run.some(6000)
    assert len({tuple(found) for found in run.evaluated.values()}) == 1, "each evaluation has all nodes in it"
    assert max(run.next) > 20 and not any(each.paused for each in run.orders)


def test_an_order_that_is_not_agreed_on_begins_anew_when_it_is_given_again() -> None:
    run = Run(9, 0)
    run.order(0, "pause")
    run.links.clear()  # lost, with the node that had them
    run.order(0, "pause")
    run.settle()
    assert all(each.paused for each in run.orders)


def test_who_hears_no_due_goes_on() -> None:
    orders = NodeOrders()
    assert orders.next(4) == "begin"
    assert orders.hear("pause") == 5
    assert orders.next(4) == "begin" and orders.next(5) == "agree"
    orders.give_up()
    assert orders.next(5) == "begin"


def test_nodes_in_different_rounds_obey_at_once() -> None:
    run = Run(5, 1, apart=True)
    run.some(100)
    run.order(2, "pause")
    run.settle()
    assert all(each.paused for each in run.orders)
    assert max(run.next) - min(run.next) <= 5


def test_a_new_generation_is_told_anew() -> None:
    orders = NodeOrders()
    orders.due("pause", 3)
    assert orders.next(3) == "hold"
    assert orders.begin_generation(3) == "pause"
    assert orders.next(3) == "begin" and not orders.paused
    assert orders.begin_generation(3) is None
    orders.due("pause", 4)
    orders.due("meet", 4)
    assert orders.next(4) == "meet", "a pause ends with the stop that is ordered in it"
    assert orders.begin_generation(4) == "meet"
    orders.due("pause", 5)
    assert orders.next(5) == "hold", "what another generation met for is over"


def sessions() -> list[Session]:
    made = [Session(uid, 12, "same", RUN) for uid in range(12)]
    for each in made:
        each.state = "running"
    return made


@pytest.mark.parametrize(("to", "message"), [
    (4, Order(RUN, 0, 5, 0, 1, 1)), (0, Order(RUN, 0, 11, 0, 0, 0)), (0, Order(RUN, 0, 1, 0, 1, 1)),
    (0, Position(RUN, 0, 11, 1, 5)), (1, Position(RUN, 0, 0, 1, 5)), (0, Due(RUN, 0, 1, 1, 5)),
    (4, Due(RUN, 0, 7, 1, 5)),
])  # fmt: skip
def test_only_neighbors_in_the_tree_are_obeyed(to: int, message: Message) -> None:
    session = sessions()[to]
    with pytest.raises(PeerFault, match="wrong_sender"):
        session.receive(message, 0.0)
    assert not session.outbox


def test_sessions_carry_orders() -> None:
    made = sessions()
    session = made[0]
    assert session.orders.ask("pause") == [Ordered(1, "pause")]
    children = session.tree.children
    assert [(to, type(each)) for to, each in session.outbox] == [(child, Order) for child in children]
    assert session.orders.answer(1, 7) == []
    found = [event for child in children for event in session.receive(Position(RUN, 0, child, 1, 9), 0.0)]
    assert found == [OrderDue("pause", 9)]
    assert session.receive(Position(RUN, 0, children[0], 1, 99), 0.0) == [], "a late copy"
