"""All nodes carry out an order before the same round, whichever node it was given at and however messages and rounds
interleave."""

from __future__ import annotations

import random

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.messages import Due, Message, Order, Position
from decentnode.wire.orders import Action, NodeOrders, OrderDue, Ordered, OrderEvent, OrderTree
from decentnode.wire.session import Session

RUN = b"run-id-8"


class SimulatedRun:
    """Nodes on a ring, stepped in random order. A node ends a round once both neighbors have begun it. The messages of
    a link arrive in order."""

    def __init__(self, num_nodes: int, seed: int, apart: bool = False) -> None:
        """apart: nodes may be in different rounds (`NodeOrders.apart`)."""
        self.random = random.Random(seed)
        self.links: dict[tuple[int, int], list[Message]] = {}
        """(sender, receiver) -> messages in flight."""
        self.orders = [NodeOrders() for _ in range(num_nodes)]
        for orders in self.orders:
            orders.apart = apart
        self.trees = [self._order_tree(uid, num_nodes) for uid in range(num_nodes)]
        self.paused_before: dict[int, set[int]] = {}
        """Round -> the nodes that have paused before it."""
        self.evaluated: dict[int, list[int]] = {uid: [] for uid in range(num_nodes)}
        """uid -> the rounds before which it evaluated."""
        self.next_round = [0] * num_nodes

    def _order_tree(self, uid: int, num_nodes: int) -> OrderTree:
        return OrderTree(lambda *fields: self._send(uid, *fields), lambda: ControlTree.of(uid, num_nodes))

    def _send(self, uid: int, to: int, kind: type[Message], *values: int) -> None:
        self.links.setdefault((uid, to), []).append(kind(RUN, 0, uid, *values))

    def _handle_events(self, uid: int, events: list[OrderEvent]) -> None:
        for event in events:
            if isinstance(event, Ordered):
                self._handle_events(uid, self.trees[uid].answer(event.serial, self.orders[uid].hear(event.action)))
            else:
                self.orders[uid].due(event.action, event.round)

    def _deliver(self, link: tuple[int, int]) -> None:
        """Delivers the first message in flight on a link."""
        receiver = link[1]
        self._handle_events(receiver, self.trees[receiver].receive(self.links[link].pop(0)))

    def give_order(self, uid: int, action: Action) -> None:
        self._handle_events(uid, self.trees[uid].ask(action))

    def step_training(self, uid: int) -> bool:
        """Makes one step of a node's training thread. Returns whether anything changed."""
        round, n = self.next_round[uid], len(self.next_round)
        if round and min(self.next_round[uid - 1], self.next_round[(uid + 1) % n]) < round:
            return False  # the node is still in the previous round and waits for a neighbor
        action = self.orders[uid].next(round)
        if action == "evaluate":
            if self.evaluated[uid][-1:] != [round]:  # nodes evaluate once before a round
                self.evaluated[uid].append(round)
            self.orders[uid].evaluated(round)
        elif action == "hold":
            paused = self.paused_before.setdefault(round, set())
            changed = uid not in paused
            paused.add(uid)
            return changed
        elif action == "begin":
            self.next_round[uid] += 1
        return action != "agree"

    def run_random_steps(self, steps: int) -> None:
        """In each step delivers a random message, or steps the training of a random node."""
        for _ in range(steps):
            uid = self.random.randrange(len(self.next_round))
            links = [link for link, queue in self.links.items() if queue]
            if links and self.random.random() < 0.5:
                self._deliver(self.random.choice(links))
            else:
                self.step_training(uid)

    def settle(self) -> None:
        """Runs until no message is in flight and no training can continue."""
        while any(self.links.values()) or sum(self.step_training(uid) for uid in range(len(self.next_round))):
            for link, queue in [*self.links.items()]:
                if queue:
                    self._deliver(link)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_all_nodes_pause_before_the_same_round_and_evaluate_there(nodes: int, seed: int) -> None:
    run = SimulatedRun(nodes, seed)
    run.run_random_steps(30 * nodes)
    run.give_order(run.random.randrange(nodes), "pause")
    run.settle()
    round = run.next_round[0]
    assert run.next_round == [round] * nodes and run.paused_before[round] == set(range(nodes))
    assert all(orders.paused for orders in run.orders)
    run.give_order(run.random.randrange(nodes), "evaluate")
    run.settle()
    assert all(rounds == [round] for rounds in run.evaluated.values())
    assert run.next_round == [round] * nodes, "an evaluation does not end the pause"
    run.give_order(run.random.randrange(nodes), "resume")
    run.run_random_steps(60 * nodes + 100)
    assert min(run.next_round) > round


@pytest.mark.parametrize("seed", range(12))
def test_concurrent_orders_of_several_nodes_are_carried_out_alike_everywhere(seed: int) -> None:
    run = SimulatedRun(12, seed)
    for _ in range(12):
        run.run_random_steps(run.random.randrange(200))
        run.give_order(run.random.randrange(12), run.random.choice(["pause", "resume", "evaluate", "evaluate"]))
    run.run_random_steps(4000)
    run.give_order(3, "resume")
    run.run_random_steps(6000)
    assert len({tuple(rounds) for rounds in run.evaluated.values()}) == 1, "all nodes take part in every evaluation"
    assert max(run.next_round) > 20 and not any(orders.paused for orders in run.orders)


def test_an_order_whose_messages_were_lost_is_agreed_on_when_it_is_given_again() -> None:
    run = SimulatedRun(9, 0)
    run.give_order(0, "pause")
    run.links.clear()  # lost together with the node that held them
    run.give_order(0, "pause")
    run.settle()
    assert all(orders.paused for orders in run.orders)


def test_a_node_that_gives_up_waiting_for_due_continues() -> None:
    orders = NodeOrders()
    assert orders.next(4) == "begin"
    assert orders.hear("pause") == 5
    assert orders.next(4) == "begin" and orders.next(5) == "agree"
    orders.give_up()
    assert orders.next(5) == "begin"


def test_nodes_of_asynchronous_schedules_pause_before_their_own_next_round() -> None:
    run = SimulatedRun(5, 1, apart=True)
    run.run_random_steps(100)
    run.give_order(2, "pause")
    run.settle()
    assert all(orders.paused for orders in run.orders)
    assert max(run.next_round) - min(run.next_round) <= 5


def test_a_new_generation_forgets_orders_and_returns_the_one_to_repeat() -> None:
    orders = NodeOrders()
    orders.due("pause", 3)
    assert orders.next(3) == "hold"
    assert orders.begin_generation(3) == "pause"
    assert orders.next(3) == "begin" and not orders.paused
    assert orders.begin_generation(3) is None
    orders.due("pause", 4)
    orders.due("meet", 4)
    assert orders.next(4) == "meet", "the order to meet before a stop replaces the pause"
    assert orders.begin_generation(4) == "meet"
    orders.due("pause", 5)
    assert orders.next(5) == "hold", "the meeting of the previous generation is over"


def running_sessions() -> list[Session]:
    sessions = [Session(uid, 12, "same", RUN) for uid in range(12)]
    for session in sessions:
        session.state = "running"
    return sessions


@pytest.mark.parametrize(("to", "message"), [
    (4, Order(RUN, 0, 5, 0, 1, 1)), (0, Order(RUN, 0, 11, 0, 0, 0)), (0, Order(RUN, 0, 1, 0, 1, 1)),
    (0, Position(RUN, 0, 11, 1, 5)), (1, Position(RUN, 0, 0, 1, 5)), (0, Due(RUN, 0, 1, 1, 5)),
    (4, Due(RUN, 0, 7, 1, 5)),
])  # fmt: skip
def test_orders_from_nodes_that_are_no_neighbors_in_the_tree_are_refused(to: int, message: Message) -> None:
    session = running_sessions()[to]
    with pytest.raises(PeerFault, match="wrong_sender"):
        session.receive(message, 0.0)
    assert not session.outbox


def test_a_session_sends_orders_down_its_tree_and_collects_the_answers() -> None:
    session = running_sessions()[0]
    assert session.orders.ask("pause") == [Ordered(1, "pause")]
    children = session.tree.children
    assert [(to, type(message)) for to, message in session.outbox] == [(child, Order) for child in children]
    assert session.orders.answer(1, 7) == []
    events = [event for child in children for event in session.receive(Position(RUN, 0, child, 1, 9), 0.0)]
    assert events == [OrderDue("pause", 9)]
    assert session.receive(Position(RUN, 0, children[0], 1, 99), 0.0) == [], "a late copy"
