"""Queues for a neighbor that receives nothing are bounded on every transport."""

from __future__ import annotations

import pytest
import torch

from decentnode.communication.base import Communication
from decentnode.communication.shared_memory.layout import SLOTS
from decentnode.communication.zeromq.protocol.link_state import MAX_PAYLOADS, MAX_URGENT, PeerLink
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import flat_schema, open_nodes, run_on_all

ELEMENTS, ROUNDS = 4 * BLOCK_ELEMENTS, 20


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["shared_memory", "ipc", "tcp", "tcp+curve", "tcp+aes-gcm", "hybrid"])
def test_a_neighbor_that_is_far_behind_gets_a_bounded_number_of_payloads_and_is_told_which_it_missed(
    transport: str,
) -> None:
    """Node 0 has made 20 rounds before node 1 begins its first."""
    options = {"edges": [], "cliques": []} if transport == "hybrid" else {}
    with open_nodes(
        transport, 2, flat_schema(ELEMENTS), chunk_bytes=1 << 20, window_bytes=1 << 20, timeout_seconds=1.0, **options
    ) as nodes:
        ahead, behind = nodes
        assert isinstance(ahead, ZeroMQ)

        def send(round: int) -> bool:
            payload = Payload({"x": torch.full((ELEMENTS,), float(round))})
            exchange = ahead.exchange(round, {1: payload}, ())
            for _ in exchange.arrivals(0.0):
                pass
            return not exchange.undelivered

        sent = [send(round) for round in range(ROUNDS)]
        count = sum(sent)
        assert sent == [True] * count + [False] * (ROUNDS - count), "a payload was dropped, but a later one was sent"
        in_window = -(-ahead._links.window // (4 * ELEMENTS))
        assert MAX_PAYLOADS <= count <= MAX_PAYLOADS + in_window + SLOTS
        edge = ahead._links.sender.edges[1]
        assert edge.queued <= MAX_PAYLOADS and len(edge.planes[1].queue) <= 4 * MAX_PAYLOADS
        assert ahead.counters.faults == {"send_window": ROUNDS - count}

        def take(node: Communication, round: int) -> None:
            exchange = node.exchange(round, {}, (0,))
            for arrival in exchange.arrivals(600):  # far longer than the test may take
                assert set(arrival.received) == ({0} if round < count or round >= ROUNDS else set())
                assert all(bool((p.tensors["x"] == round).all()) for p in arrival.received.values())
            assert (not exchange.missing) == (round < count or round >= ROUNDS)

        run_on_all([behind], lambda node: [take(node, round) for round in range(ROUNDS)])
        for round in range(ROUNDS, ROUNDS + 3):
            assert send(round)
            run_on_all([behind], lambda node, round=round: take(node, round))  # type: ignore[misc]
        assert not behind.counters.faults and edge.queued == 0 and edge.withheld is None


def test_the_queue_of_unnumbered_messages_is_bounded() -> None:
    urgent = PeerLink(1 << 20, needs_credential=False).planes[0].urgent
    for number in range(3 * MAX_URGENT):
        urgent.append(b"%d" % number)
    assert len(urgent) == MAX_URGENT and urgent[-1] == b"%d" % (3 * MAX_URGENT - 1), "the newest are kept"
