from __future__ import annotations

import functools
import gc
import random
import threading
import time

import pytest
import torch

from decentnode.communication.base import Communication
from decentnode.communication.parts import Schema
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.shared_memory.path import SharedMemoryPath
from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.communication.zeromq.protocol.link_state import BULK
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import PeerLost
from decentnode.payload import SCALAR_BYTES, Payload, TensorSpec
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import (
    BATCHED,
    NETWORKED,
    TRANSPORTS,
    flat_schema,
    folder_prefix,
    gossip,
    open_nodes,
    random_values,
    ring,
    run_on_all,
)
from tests.conftest import scale, wait_until

LONG = 1000.0
"""A time-out in seconds that is longer than any test may take."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8]
SIZES = [1, 7, 1000, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 13]


@functools.cache
def reference_models(n: int, elements: int, dtype: torch.dtype, rounds: int) -> list[torch.Tensor]:
    """Returns the models after the same rounds of gossip over the in-process transport."""
    with open_nodes("inproc", n, flat_schema(elements, dtype)) as nodes:
        return gossip(nodes, elements, dtype, rounds)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
@pytest.mark.parametrize("elements", SIZES)
def test_gossip_gives_the_same_bits_over_all_transports(transport: str, elements: int) -> None:
    with open_nodes(transport, 4, flat_schema(elements)) as nodes:
        models = gossip(nodes, elements, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(4, elements, torch.float32, 3), strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gossip_in_every_dtype_gives_the_same_bits_over_all_transports(transport: str, dtype: torch.dtype) -> None:
    elements = BLOCK_ELEMENTS + 5
    with open_nodes(transport, 3, flat_schema(elements, dtype)) as nodes:
        models = gossip(nodes, elements, dtype, 2)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(3, elements, dtype, 2), strict=True))


@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
def test_payloads_of_faster_neighbors_are_kept_for_their_round(transport: str) -> None:
    draw = random.Random(2)
    delays = {(u, r): draw.choice([0, 0, 0, 0.02]) for u in range(5) for r in range(30)}
    with open_nodes(transport, 5, flat_schema(500)) as nodes:
        models = gossip(nodes, 500, torch.float32, 30, lambda u, r: time.sleep(delays[u, r]))
        assert all(not node.counters.faults for node in nodes)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(5, 500, torch.float32, 30), strict=True))


SPARSE_SCHEMAS = (
    Schema(
        1000,
        {"values": TensorSpec(torch.float32, 400, exact=False), "indices": TensorSpec(torch.int32, 400, False)},
        False,
    ),
)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", [*TRANSPORTS, BATCHED])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 3), (400, 0), (123, 400)])
def test_payloads_of_several_tensors_of_any_size_and_scalars_arrive(transport: str, sizes: tuple[int, int]) -> None:
    payload = Payload(
        {"values": random_values(sizes[0], torch.float32, 1), "indices": random_values(sizes[1], torch.int32, 2)},
        {"alpha": 0.25, "count": 3}, frozenset({"indices"}),
    )  # fmt: skip
    with open_nodes(transport, 2, SPARSE_SCHEMAS) as nodes:
        exchanges = run_on_all(nodes, lambda node: node.exchange(0, {1 - node.uid: payload}, (1 - node.uid,)))

        def take(node: Communication) -> None:
            (arrival,) = exchanges[node.uid].arrivals(60)  # type: ignore[attr-defined]
            received = arrival.received[1 - node.uid]
            assert all(torch.equal(received.tensors[name], payload.tensors[name]) for name in payload.tensors)
            assert dict(received.scalars) == dict(payload.scalars)

        run_on_all(nodes, take)
        edge = nodes[0].counters.edge(1)
        assert edge.data_bytes_sent == 4 * sizes[0]
        assert edge.metadata_bytes_sent == 4 * sizes[1] + 2 * SCALAR_BYTES


@pytest.mark.parametrize("transport", [*TRANSPORTS, BATCHED])
def test_every_neighbor_gets_its_own_payload_in_each_of_two_phases(transport: str) -> None:
    schemas = flat_schema(50) + flat_schema(8)
    with open_nodes(transport, 3, schemas) as nodes:

        def begin(node: Communication) -> list[object]:
            others = tuple(u for u in range(3) if u != node.uid)
            own = {u: Payload({"x": torch.full((50,), 10.0 * node.uid + u)}) for u in others}
            small = Payload({"x": torch.full((8,), float(node.uid))})
            return [node.exchange(0, own, others), node.exchange(0, dict.fromkeys(others, small), others, phase=1)]

        exchanges = run_on_all(nodes, begin)

        def take(node: Communication) -> None:
            first, second = exchanges[node.uid]  # type: ignore[misc]
            for exchange, value in ((first, lambda j: 10.0 * j + node.uid), (second, float)):
                for arrival in exchange.arrivals(60):
                    assert set(arrival.received) == {0, 1, 2} - {node.uid}
                    for uid, payload in arrival.received.items():
                        assert payload.tensors["x"].unique().tolist() == [value(uid)]

        run_on_all(nodes, take)


@pytest.mark.parametrize("transport", [*TRANSPORTS, BATCHED])
def test_a_sender_may_change_its_model_as_soon_as_exchange_returns(transport: str) -> None:
    with open_nodes(transport, 2, flat_schema(BLOCK_ELEMENTS * 2)) as nodes:

        def begin(node: Communication) -> object:
            x = torch.full((BLOCK_ELEMENTS * 2,), float(node.uid))
            exchange = node.exchange(0, {1 - node.uid: Payload({"x": x})}, (1 - node.uid,))
            x.fill_(-1)
            return exchange

        exchanges = run_on_all(nodes, begin)

        def check(node: Communication) -> None:
            sizes = []
            for arrival in exchanges[node.uid].arrivals(60):  # type: ignore[attr-defined]
                received = arrival.received[1 - node.uid].tensors["x"]
                assert bool((received == 1 - node.uid).all())
                sizes.append(received.numel())
            assert sum(sizes) == BLOCK_ELEMENTS * 2

        run_on_all(nodes, check)


@pytest.mark.parametrize("transport", NETWORKED)
@pytest.mark.slow
def test_a_silent_neighbor_is_missing_after_the_time_out(transport: str) -> None:
    timeout_seconds, both_sent = 1.5, threading.Barrier(2, timeout=60)
    with open_nodes(transport, 3, flat_schema(10)) as nodes:

        def run(node: Communication) -> object:
            others = tuple(u for u in range(3) if u != node.uid)
            if node.uid == 2:
                return None
            exchange = node.exchange(0, dict.fromkeys(others, Payload({"x": torch.ones(10)})), others)
            both_sent.wait()
            (arrival,) = exchange.arrivals(timeout_seconds)
            assert arrival.missing == exchange.missing == {2} and set(arrival.received) == {1 - node.uid}
            assert exchange.departed == frozenset()
            assert node.counters.edge(2).wait_seconds > 0.8 * timeout_seconds
            return None

        run_on_all(nodes, run)


@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
def test_a_departed_neighbor_is_not_waited_for(transport: str) -> None:
    with open_nodes(transport, 2, flat_schema(10)) as nodes:
        nodes[1].depart(0, (0,))
        waiting = nodes[0]
        assert isinstance(waiting, ZeroMQ)
        wait_until(lambda: 1 in waiting._run_state.departed, "node 0 was not told that node 1 departed")
        exchange = nodes[0].exchange(0, {1: Payload({"x": torch.ones(10)})}, (1,))
        (arrival,) = exchange.arrivals(LONG)
        assert arrival.missing == exchange.departed == exchange.undelivered == {1}


@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
def test_the_failure_of_a_node_ends_every_wait_with_its_reason(transport: str) -> None:
    all_wait = threading.Barrier(12, timeout=60)
    with open_nodes(transport, 12, flat_schema(10)) as nodes:

        def run(node: Communication) -> None:
            if node.uid == 7:
                all_wait.wait()
                node.fail(7, "its disk is on fire")
                return
            neighbors = ring(12)[node.uid]
            exchange = node.exchange(
                0,
                dict.fromkeys(neighbors, Payload({"x": torch.ones(10)})),
                neighbors + ((7,) if 7 not in neighbors else ()),
            )
            all_wait.wait()
            with pytest.raises(PeerLost, match=r"node 7 .*failed: its disk is on fire|node 7 failed: its"):
                list(exchange.arrivals(LONG))

        run_on_all(nodes, run)


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_stop_reaches_all_nodes(transport: str) -> None:
    with open_nodes(transport, 11, flat_schema(10)) as nodes:
        nodes[4].announce_stop()
        wait_until(lambda: all(node.stopping for node in nodes))


def test_payloads_that_do_not_match_the_schema_raise_a_value_error() -> None:
    for transport in TRANSPORTS:
        with open_nodes(transport, 2, flat_schema(10)) as nodes:
            for wrong in ({"x": torch.ones(9)}, {"x": torch.ones(10).double()}, {"y": torch.ones(10)}):
                with pytest.raises(ValueError, match="payload"):
                    nodes[0].exchange(0, {1: Payload(wrong)}, ())


def test_bytes_and_frames_are_counted_exactly() -> None:
    elements = 3 * BLOCK_ELEMENTS + 1
    with open_nodes("ipc", 3, flat_schema(elements), chunk_bytes=1 << 20) as nodes:
        gossip(nodes, elements, torch.float32, 2)
        for node in nodes:
            for edge in node.counters.edges.values():
                assert edge.data_bytes_sent == edge.payload_bytes_received == 2 * 4 * elements
                assert edge.frames_sent == edge.frames_received == 2 * 4
                assert edge.metadata_bytes_sent == 0 < edge.announced_bytes_sent + edge.framing_bytes_sent


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_window_smaller_than_the_payload_bounds_memory_and_does_not_deadlock(elementwise: bool) -> None:
    elements = 12 * BLOCK_ELEMENTS
    schemas = (Schema(elements, {"x": TensorSpec(torch.float32, elements)}, elementwise),)
    with open_nodes("ipc", 2, schemas, window_bytes=1 << 20) as nodes:

        def run(node: Communication) -> None:
            assert isinstance(node, ZeroMQ)
            for r in range(3):
                x = torch.full((elements,), float(r))
                exchange = node.exchange(r, {1 - node.uid: Payload({"x": x})}, (1 - node.uid,))
                time.sleep(0.1 * node.uid)  # node 0 runs ahead
                held = sum(i.unconsumed_bytes() for s in node._inbox.state.incoming.values() for i in s.values())
                assert held <= node._links.window
                for arrival in exchange.arrivals(60):
                    assert (arrival.received[1 - node.uid].tensors["x"] == r).all()

        run_on_all(nodes, run)
        assert all(not node.counters.faults for node in nodes)


def test_a_receiver_that_never_reads_holds_at_most_one_window() -> None:
    elements = 40 * BLOCK_ELEMENTS
    with open_nodes("ipc", 2, flat_schema(elements), window_bytes=4 << 20) as nodes:
        nodes[0].exchange(0, {1: Payload({"x": torch.ones(elements)})}, ())
        sender, receiver = nodes
        assert isinstance(sender, ZeroMQ) and isinstance(receiver, ZeroMQ)
        window, bulk = receiver._links.window, sender._links.sender.edges[1].planes[BULK]

        def window_is_full() -> bool:
            """Returns whether the sender has more to send, and all that it was allowed to send is acknowledged."""
            with sender._driver.lock:
                return bool(bulk.queue) and not bulk.out.kept

        wait_until(window_is_full, lambda: receiver.counters.edge(0))
        assert window / 2 < receiver.counters.edge(0).payload_bytes_received <= window
        exchange = receiver.exchange(0, {}, (0,))
        assert sum(a.stop - a.start for a in exchange.arrivals(60)) == elements
        assert receiver.counters.edge(0).payload_bytes_received == 4 * elements
        assert window >= 4 * ((1 << 21) + MESSAGE_COST)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
@pytest.mark.parametrize("late", [True, False])
def test_payloads_of_a_round_that_a_neighbor_skips_do_not_block_the_closing_mean(transport: str, late: bool) -> None:
    """After a stop some nodes make one more round than others, and the payloads that they send for it fill the credit
    window. late: the sender knows that its neighbor left when it sends."""
    elements = 12 * BLOCK_ELEMENTS
    sent, left = threading.Event(), threading.Event()
    with open_nodes(transport, 2, flat_schema(elements), window_bytes=1 << 20, chunk_bytes=1 << 20) as nodes:

        def run(node: Communication) -> torch.Tensor:
            if node.uid == 0:
                assert late or sent.wait(60)
                node.depart(0, (1,))
                left.set()
            else:
                assert not late or left.wait(60)
                exchange = node.exchange(0, {0: Payload({"x": torch.ones(elements)})}, (0,))
                sent.set()
                assert all(arrival.missing == {0} for arrival in exchange.arrivals(60))
                node.depart(1, (0,))
            mean, contributors = node.mean("closing", torch.full((elements,), float(node.uid)), closing=True).wait(60)
            assert contributors == 2
            return mean

        for mean in run_on_all(nodes, run).values():
            assert (mean == 0.5).all()  # type: ignore[attr-defined]
        assert all(not node.counters.faults for node in nodes)


@pytest.mark.slow
def test_start_and_close_leak_no_files_threads_or_shared_memory() -> None:
    import psutil

    process = psutil.Process()
    before = None
    for repetition in range(scale(8, 200)):
        for transport in ("shared_memory", "tcp"):
            with open_nodes(transport, 2, flat_schema(1000)) as nodes:
                gossip(nodes, 1000, torch.float32, 1)
        gc.collect()
        if repetition == 2:
            before = (process.num_fds(), threading.active_count())
    assert before is not None
    assert process.num_fds() <= before[0] + 2 and threading.active_count() <= before[1]

    assert not list(FOLDER.glob(f"decentnode-{folder_prefix()}*"))


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("elementwise", [True, False])
def test_payloads_with_nan_are_rejected_if_the_config_says_so(transport: str, elementwise: bool) -> None:
    elements = 3 * BLOCK_ELEMENTS
    schemas = (Schema(elements, {"x": TensorSpec(torch.float32, elements)}, elementwise),)
    with open_nodes(transport, 3, schemas, non_finite="reject", chunk_bytes=1 << 20) as nodes:

        def run(node: Communication) -> None:
            x = torch.ones(elements)
            if node.uid == 1:
                x[BLOCK_ELEMENTS + 5] = float("nan")
            others = tuple({0, 1, 2} - {node.uid})
            exchange = node.exchange(0, dict.fromkeys(others, Payload({"x": x})), others)
            for arrival in exchange.arrivals(60):
                for payload in arrival.received.values():
                    assert torch.isfinite(payload.tensors["x"]).all()
            rejected = frozenset({1} - {node.uid})
            assert exchange.missing == rejected and exchange.departed == rejected
            assert node.counters.faults == ({"non_finite": 1} if rejected else {})
            later = node.exchange(1, dict.fromkeys(others, Payload({"x": torch.ones(elements)})), others)
            assert all(len(arrival.received) == 2 for arrival in later.arrivals(60)) and not later.missing

        run_on_all(nodes, run)


def test_only_publish_buffers_of_partners_are_mapped_and_other_nodes_get_chunks() -> None:
    elements, n = 1000, 5
    with open_nodes("shared_memory", n, flat_schema(elements), start=False) as nodes:
        for node in nodes:
            node.partners = frozenset(ring(n)[node.uid])
        run_on_all(nodes, lambda node: node.start(60))
        paths = [node.parts.paths.of(SharedMemoryPath) for node in nodes]  # type: ignore[attr-defined]
        assert [set(path._buffer_readers) for path in paths] == [set(ring(n)[uid]) for uid in range(n)]
        assert [path.readers for path in paths] == [node.partners for node in nodes]

        def run(node: Communication) -> None:
            others = tuple(uid for uid in range(n) if uid != node.uid)
            for r in range(4):
                x = torch.full((elements,), 10.0 * r + node.uid)
                exchange = node.exchange(r, dict.fromkeys(others, Payload({"x": x})), others)
                for arrival in exchange.arrivals(60):
                    assert set(arrival.received) == set(others)
                    for uid, payload in arrival.received.items():
                        assert bool((payload.tensors["x"] == 10.0 * r + uid).all())

        run_on_all(nodes, run)
