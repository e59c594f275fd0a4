"""Exchanges over connections that are cut, corrupted, slow or frozen."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decentnode import clock
from decentnode.communication.zeromq.protocol.link_state import BULK, Body
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire import framing
from decentnode.wire.stream import STUCK_SECONDS
from tests.communication.contract import flat_schema, make_nodes, random_values, run_on_all
from tests.communication.faulty_proxy import FaultyProxy
from tests.conftest import scale, wait_until


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@contextlib.contextmanager
def nodes_over_proxies(
    transport: str, n: int, elements: int, settings: dict[str, int], target: int | None = None, seed: int = 0,
    **options: object,
) -> Iterator[tuple[list[ZeroMQ], list[FaultyProxy]]]:
    """Yields n started nodes and the proxies through which the connections to node `target` (None: to all nodes) go.

    settings: of the proxies. Control connections, which carry little, are cut and corrupted 64 times as often per byte.
    """
    with tempfile.TemporaryDirectory(prefix="dn") as folder, contextlib.ExitStack() as stack:
        nodes = make_nodes(transport, n, flat_schema(elements), Path(folder), **options)
        stack.callback(lambda: [node.close() for node in nodes])  # type: ignore[func-returns-value]
        proxies: list[FaultyProxy] = []
        endpoints = {}
        for node in nodes:
            endpoints[node.uid] = node.bind()
            if target in (None, node.uid):
                ports = []
                for plane, endpoint in enumerate(endpoints[node.uid]):
                    own = {k: v >> 6 if k.endswith("_every_bytes") and not plane else v for k, v in settings.items()}
                    address = ("127.0.0.1", port_of(endpoint))
                    proxies.append(FaultyProxy(address, seed=seed + len(proxies), **own))  # type: ignore[arg-type]
                    ports.append(stack.enter_context(proxies[-1]).port)
                endpoints[node.uid] = (f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        for node in nodes:
            node.set_peers(endpoints)
        run_on_all(nodes, lambda node: node.start(60))
        yield nodes, proxies
        closing = [threading.Thread(target=node.close) for node in nodes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(60)


def exchange_once(nodes: list[ZeroMQ], elements: int, r: int) -> None:
    """Makes round r between two nodes, and checks that the model of each arrives once, bit-exact."""

    def run(node: ZeroMQ) -> None:
        other = 1 - node.uid
        payload = Payload({"x": random_values(elements, torch.float32, 1000 * r + node.uid)})
        exchange = node.exchange(r, {other: payload}, (other,))
        expected = random_values(elements, torch.float32, 1000 * r + other)
        received = torch.empty(elements)
        for arrival in exchange.arrivals(60):
            received[arrival.start : arrival.stop] = arrival.received[other].tensors["x"]
        assert torch.equal(received, expected) and not exchange.missing

    run_on_all(nodes, run)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(0, scale(4, 32), 4))
@pytest.mark.parametrize("transport", ["tcp", "tcp+curve", "tcp+aes-gcm"])
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_every_model_arrives_once_and_bit_exact_wherever_connections_are_cut(transport: str, seed: int) -> None:
    elements, cuts = 3 * BLOCK_ELEMENTS + 17, scale(4, 50)
    settings = {"cut_every_bytes": 1 << 20, "cuts": cuts}
    with nodes_over_proxies(transport, 2, elements, settings, seed=seed, chunk_bytes=1 << 20) as (nodes, proxies):
        num_rounds = 0
        while sum(proxy.cut_count for proxy in proxies) < 2 * cuts and num_rounds < 40 * cuts:
            exchange_once(nodes, elements, num_rounds)
            num_rounds += 1
        assert sum(proxy.cut_count for proxy in proxies) >= 2 * cuts
        assert sum(edge.resends for node in nodes for edge in node.counters.edges.values()) > 0
        assert not {"stale_round", "duplicate_chunk", "window_exceeded"} & {k for n in nodes for k in n.counters.faults}


def check_resent_bytes(node: ZeroMQ) -> list[int]:
    """Makes the node's bulk sockets check that every message that is sent again has the same bytes as before. Returns
    a list with the number of messages sent again so far."""
    send, num_resent = node._driver.send, [0]
    digests: dict[tuple[int, int], bytes] = {}
    """(peer, sequence number) -> digest of the message."""

    def checked_send(uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        sequence = framing.opened(memoryview(first))[0]
        if plane == BULK and sequence:
            second = b"" if body is None else bytes(body if isinstance(body, bytes) else body.buffer)
            digest = hashlib.sha256(first + second).digest()
            num_resent[0] += (uid, sequence) in digests
            assert digests.setdefault((uid, sequence), digest) == digest, "two messages have one number, and one nonce"
        return send(uid, plane, first, body)

    node._driver.send = checked_send  # type: ignore[method-assign]
    return num_resent


@pytest.mark.parametrize("transport", ["tcp", "tcp+aes-gcm"])
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_messages_are_sent_again_unchanged_though_the_model_changes(transport: str) -> None:
    """The transport sends from the memory of the models, and connections are cut, so that many messages are sent
    again."""
    elements, rounds = 2 * BLOCK_ELEMENTS, scale(20, 200)
    settings = {"cut_every_bytes": 1 << 20, "cuts": scale(5, 60)}
    with nodes_over_proxies(transport, 2, elements, settings, chunk_bytes=1 << 20) as (nodes, proxies):
        num_resent = [check_resent_bytes(node) for node in nodes]

        def run(node: ZeroMQ) -> None:
            other, model = 1 - node.uid, torch.zeros(elements)
            for r in range(rounds):
                model.fill_(10.0 * r + node.uid)  # local steps change the model in place
                exchange = node.exchange(r, {other: Payload({"x": model})}, (other,))
                slot = node.acquire_slot(model, 60)
                assert slot is not None
                for arrival in exchange.arrivals(60):
                    received = arrival.received[other].tensors["x"]
                    assert bool((received == 10.0 * r + other).all())
                    slot[arrival.start : arrival.stop] = -1.0
                model = slot

        run_on_all(nodes, run, 200)  # type: ignore[arg-type]
        assert sum(proxy.cut_count for proxy in proxies) > 0 and sum(count for (count,) in num_resent) > 0
        assert not {"checksum_mismatch", "duplicate_chunk"} & {k for node in nodes for k in node.counters.faults}


@pytest.mark.parametrize("transport", ["tcp", "tcp+aes-gcm"])
@pytest.mark.timeout(300)
def test_messages_with_flipped_bits_are_detected_and_sent_again(transport: str) -> None:
    elements = 2 * BLOCK_ELEMENTS
    settings = {"corrupt_every_bytes": 1 << 19, "corruptions": scale(10, 200)}
    with nodes_over_proxies(transport, 2, elements, settings, chunk_bytes=1 << 20) as (nodes, proxies):
        for r in range(scale(8, 120)):
            exchange_once(nodes, elements, r)
        assert sum(proxy.corrupt_count for proxy in proxies) >= scale(8, 150)
        assert sum(edge.resends for node in nodes for edge in node.counters.edges.values()) > 0


def test_no_control_message_is_lost_when_connections_are_cut() -> None:
    with nodes_over_proxies("tcp", 3, 8, {}) as (nodes, proxies):
        for turn in range(5):
            for proxy in proxies:
                proxy.cut()
            run_on_all(nodes, lambda node: node.barrier(f"turn {turn}", 60))  # noqa: B023
        for proxy in proxies:
            proxy.cut()
        nodes[2].announce_stop()
        wait_until(lambda: all(node.stopping for node in nodes))


def test_a_slow_link_delays_only_the_nodes_at_its_ends() -> None:
    """Node 2 is behind a link of 200 kB/s. Nodes 0 and 1 complete their exchanges while node 2 still waits; then the
    link becomes fast."""
    elements = 2 * BLOCK_ELEMENTS
    settings = {"bytes_per_second": 200_000}
    with nodes_over_proxies("tcp", 3, elements, settings, target=2) as (nodes, proxies):
        x = torch.ones(elements)
        finished: list[int] = []

        def run(node: ZeroMQ) -> None:
            sources = (1 - node.uid,) if node.uid < 2 else (0, 1)
            outgoing = dict.fromkeys({0, 1, 2} - {node.uid}, Payload({"x": x})) if node.uid < 2 else {}
            for r in range(3):
                exchange = node.exchange(r, outgoing, sources)
                assert all(len(arrival.received) == len(sources) for arrival in exchange.arrivals(60))
            finished.append(node.uid)
            if len(finished) == 2:
                for proxy in proxies:
                    proxy.bytes_per_second = 1e12

        run_on_all(nodes, run)  # type: ignore[arg-type]
        assert finished[2] == 2, "a node with a fast link waited for the slow one"
        assert not any(edge.resends for node in nodes for edge in node.counters.edges.values())


@pytest.mark.slow
def test_a_message_on_a_slow_connection_is_not_sent_again() -> None:
    """The first message takes longer than a connection may be silent before it counts as stuck, and no earlier message
    has shown how slow the connection is."""
    elements = BLOCK_ELEMENTS
    slow = {"bytes_per_second": 4 * elements // 9, "receive_buffer": 1 << 16}
    with nodes_over_proxies("tcp", 2, elements, slow, target=1, timeout_seconds=60.0) as (nodes, proxies):
        started = clock.now()
        nodes[0].exchange(0, {1: Payload({"x": torch.ones(elements)})}, ())
        assert all(not arrival.missing for arrival in nodes[1].exchange(0, {}, (0,)).arrivals(60))
        assert clock.now() - started > STUCK_SECONDS + 2, "the connection is too fast for this test"
        assert not any(edge.resends for node in nodes for edge in node.counters.edges.values())
        for proxy in proxies:
            proxy.bytes_per_second = 1e12


def test_a_node_behind_a_frozen_link_is_missing_until_the_link_works_again() -> None:
    with nodes_over_proxies("tcp", 2, 8, {}) as (nodes, proxies):
        exchange_once(nodes, 8, 0)
        for proxy in proxies:
            proxy.pause()
        exchange = nodes[0].exchange(1, {1: Payload({"x": torch.ones(8)})}, (1,))
        assert [arrival.missing for arrival in exchange.arrivals(0.5)] == [frozenset({1})]
        assert exchange.missing == {1}
        nodes[1].exchange(1, {0: Payload({"x": torch.ones(8)})}, ())
        for proxy in proxies:
            proxy.resume()
        exchange_once(nodes, 8, 2)
