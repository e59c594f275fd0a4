"""Links over a virtual network that loses, repeats, damages and delays messages and cuts connections, in one thread."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from decentnode import clock
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.faults import Link
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from tests.communication.virtual_links import VirtualNode, count_faults, draw_link, schedule_breaks
from tests.conftest import scale

SEEDS, PER_CASE = scale(200, 20_000), scale(50, 500)
FAULTY_SECONDS, SETTLE_SECONDS = 4.0, 120.0
DAMAGE_FAULTS = {"checksum_mismatch", "protocol_version", "malformed_header", "malformed_multipart", "unknown_type"}
"""Faults that a flipped bit may cause."""
ENCRYPTED_DAMAGE_FAULTS = DAMAGE_FAULTS | {
    "wrong_run", "wrong_generation", "wrong_identity", "unknown_uid", "unknown_kind", "wrong_plane"}
"""The same if bodies are encrypted: a header then has no checksum, and is read before the body authenticates it."""


class Scenario:
    """A few nodes that send each other control and bulk messages, with faults during the first FAULTY_SECONDS."""

    def __init__(self, seed: int) -> None:
        draw = self.random = random.Random(seed)
        self.heap = EventQueue()
        self.network = VirtualNetwork(self.heap, draw_link(draw), seed)
        n, window, secure = draw.choice((2, 2, 4)), draw.choice((4000, 64_000)), draw.random() < 0.2
        self.nodes = [VirtualNode(uid, n, self.network, window, secure) for uid in range(n)]
        self.control: dict[tuple[int, int], int] = {}
        """(source, destination) -> number of control messages sent."""
        self.bulk: dict[tuple[int, int], dict[int, bytes]] = {}
        """(source, destination) -> bodies of the bulk messages sent, by number."""
        for node in self.nodes:
            node.others = [other for other in self.nodes if other is not node]
        self._schedule()

    def _schedule(self) -> None:
        draw = self.random
        for node in self.nodes:
            for number in range(draw.randrange(4, 25)):
                self.heap.at(draw.random() * FAULTY_SECONDS, lambda node=node, number=number: self._send(node, number))
        schedule_breaks(self.nodes, draw, FAULTY_SECONDS)

    def _send(self, node: VirtualNode, number: int) -> None:
        draw = self.random
        others = [other.uid for other in node.others if draw.random() < 0.7]
        for uid in others:
            count = self.control.get((node.uid, uid), 0)
            self.control[node.uid, uid] = count + 1
            node.send_control(uid, count)
        body = draw.randbytes(draw.choice((0, 100, 1500, 20_000 if node.credits.window > 20_500 else 2500)))
        for uid in others:
            self.bulk.setdefault((node.uid, uid), {})[number] = body
        node.send_bulk(others, number, body)

    def all_arrived(self) -> bool:
        """Returns whether every node has received exactly the messages that were sent to it, control in order."""
        return all(
            self.nodes[b].control_received.get(a, []) == list(range(self.control.get((a, b), 0)))
            and self.nodes[b].bulk_received.get(a, {}) == self.bulk.get((a, b), {})
            for a in range(len(self.nodes)) for b in range(len(self.nodes)) if a != b
        )

    def _all_finished(self) -> bool:
        finished = [node.finished() for node in self.nodes]  # every node has to work on its closing
        return all(finished)

    def run(self) -> None:
        """Runs the scenario, and checks that every message arrives once and that the links close."""
        with clock.use(self.heap.clock):
            self.heap.run(lambda: False, FAULTY_SECONDS)
            self.network.faulty = False
            limit = FAULTY_SECONDS + SETTLE_SECONDS
            assert self.heap.run(self.all_arrived, limit), "some messages did not arrive"
            assert self.heap.run(self._all_finished, limit)
            self.heap.run(lambda: False, self.heap.now + 10 * self.network.link.latency_seconds + 1)
            assert self.all_arrived(), "a message arrived twice"
            # Credit that was granted since then is acknowledged, too, over connections that may be broken
            assert self.heap.run(self._all_finished, self.heap.now + SETTLE_SECONDS)
            allowed = ENCRYPTED_DAMAGE_FAULTS if self.nodes[0].links.access.encrypts else DAMAGE_FAULTS
            allowed = allowed if self.network.happened["damaged"] else set()
            for node in self.nodes:
                assert node.counters.faults.keys() <= allowed, node.counters.faults
                assert not +node.held and not any(edge.planes[p].out.kept for edge in node.links.sender.edges.values()
                                                 for p in (CONTROL, BULK))  # fmt: skip
                node.links.goodbye(self.heap.now)
            intact = [(a, b) for a, b in self.control if self.network.takes(a, b, CONTROL)]
            assert self.heap.run(lambda: all(a in self.nodes[b].goodbyes_from for a, b in intact), self.heap.now + 5)


def run_scenario(seed: int) -> Counter[str]:
    """Runs a scenario. Returns how often each fault happened, and how many messages were sent again ("resent")."""
    scenario = Scenario(seed)
    scenario.run()
    resends = [edge.resends for node in scenario.nodes for edge in node.counters.edges.values()]
    return scenario.network.happened + Counter(resent=sum(resends))


@pytest.mark.sampled(one=["first"])
@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
def test_every_message_arrives_once_and_undamaged(first: int) -> None:
    happened = count_faults(run_scenario, range(first, first + PER_CASE))
    assert all(happened[what] for what in ("resent", "lost", "cut", "repeated", "damaged", "overtaken", "refused"))


def test_a_full_broken_connection_with_nothing_unacknowledged_is_renewed() -> None:
    """With this seed the connection is full of second copies of messages that arrived long before, so that no missing
    acknowledgement shows that it is broken."""
    Scenario(6668).run()


def test_a_broken_connection_that_carries_only_acknowledgements_is_renewed() -> None:
    """Node 0 sends, and node 1 only acknowledges: it has no numbered message of its own whose missing acknowledgement
    would show that its connection is broken."""
    heap = EventQueue()
    network = VirtualNetwork(heap, Link(), 0)
    network.faulty = False
    nodes = [VirtualNode(uid, 2, network, 64_000, False) for uid in range(2)]
    for node in nodes:
        node.others = [other for other in nodes if other is not node]

    def all_acknowledged() -> bool:
        return not any(plane.out.kept for plane in nodes[0].links.sender.edge(1).planes)

    with clock.use(heap.clock):
        nodes[0].send_control(1, 0)
        assert heap.run(all_acknowledged, 1.0)
        nodes[1].halve(0, CONTROL)
        nodes[0].send_control(1, 1)
        nodes[0].send_bulk([1], 0, b"body")
        assert heap.run(all_acknowledged, 20.0), "the acknowledgements never arrived"
    assert nodes[1].control_received == {0: [0, 1]}
