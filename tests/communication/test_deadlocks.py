"""The rules that prevent deadlocks of matched sends and receives (docs/explanation/transports.rst, "Rules against
deadlock"; R1 to R10 and H1 to H7 are their numbers there), and attempts to break them.

The tests use directed graphs that change every round, payloads whose sizes only their senders know, two phases in
flight at once, and delays that differ between nodes. Operations are matched by tags, by order alone (as in NCCL, here
on gloo), or are mixed with other paths.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.communication.base import Arrival, Communication
from decentnode.communication.parts import Schema
from decentnode.communication.torch_distributed.clique_path import SEND_WINDOW
from decentnode.communication.torch_distributed.communicator import MAX_OPERATIONS, GlooCommunicator
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import PeerLost
from decentnode.payload import Payload, TensorSpec
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import BATCHED, flat_schema, gossip, open_nodes, ring, run_on_all
from tests.conftest import scale, wait_until

TENSORS = {"values": TensorSpec(torch.float32, 64, False), "at": TensorSpec(torch.int32, 64, False)}
TWO_PHASES = (Schema(64, TENSORS, False),) * 2


def draw_edges(n: int, round: int) -> dict[int, tuple[int, ...]]:
    """Returns the out-neighbors in a random directed graph that differs in every round; some nodes have none."""
    draw = random.Random(1000 + round)
    return {u: tuple(v for v in range(n) if v != u and draw.random() < 0.4) for u in range(n)}


def payload_of(source: int, to: int, round: int, phase: int) -> Payload:
    """Returns what `source` sends to `to`; its size is random."""
    size = random.Random(f"{source} {to} {round} {phase}").randint(0, 64)
    values = torch.full((size,), float(1000 * round + 10 * source + to))
    return Payload({"values": values, "at": torch.arange(size, dtype=torch.int32)}, {"phase": phase})


def make_rounds(node: Communication, n: int, rounds: int) -> None:
    """Makes rounds with two phases in flight at once, with random delays that differ between nodes."""
    draw = random.Random(node.uid)
    for round in range(rounds):
        out = draw_edges(n, round)
        sources = tuple(u for u in range(n) if node.uid in out[u])
        exchanges = []
        for phase in range(2):
            payloads = {v: payload_of(node.uid, v, round, phase) for v in out[node.uid]}
            exchanges.append(node.exchange(round, payloads, sources, phase))
            if draw.random() < 0.05:
                time.sleep(draw.random() / 100)
        for phase, exchange in enumerate(exchanges):
            for arrival in exchange.arrivals(60):  # the next slice reuses the buffers
                check_arrival(arrival, node.uid, sources, round, phase)


def check_arrival(arrival: Arrival, uid: int, sources: tuple[int, ...], round: int, phase: int) -> None:
    assert not arrival.missing
    assert list(arrival.received) == sorted(sources)
    for source, received in arrival.received.items():
        sent = payload_of(source, uid, round, phase)
        assert received.scalars == sent.scalars
        assert all(torch.equal(received.tensors[name], sent.tensors[name]) for name in sent.tensors)


@pytest.mark.parametrize("transport", ["collective", BATCHED, "hybrid"])
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_rounds_on_changing_directed_graphs_do_not_deadlock_or_mix_payloads_up(transport: str) -> None:
    rounds = scale(200, 4000)
    with open_nodes(transport, 5, TWO_PHASES) as nodes:
        run_on_all(nodes, functools.partial(make_rounds, n=5, rounds=rounds), 800)
        assert all(not node.counters.faults for node in nodes)


@dataclass
class Launch:
    """One batch of operations that a node launched."""

    thread: int
    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]
    """(uid, bytes) of each operation, in the order of the call; the same for `sends`."""
    works: list[Any] = field(default_factory=list)


class LaunchRecorder:
    """Records the batches that every communicator of this process launches, and the operations that are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: dict[int, list[Launch]] = {}
        """By uid."""
        self.waited: set[int] = set()
        """Ids of the operations that were waited for."""
        original_batch, original_wait = GlooCommunicator.batch, GlooCommunicator.wait

        def batch(
            communicator: GlooCommunicator, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
        ) -> list[Any]:
            works = original_batch(communicator, sends, receives)
            sizes = [[(uid, tensor.nbytes) for uid, tensor in operations] for operations in (sends, receives)]
            launch = Launch(threading.get_ident(), sizes[0], sizes[1], works)
            self.launches.setdefault(communicator.uid, []).append(launch)
            return works

        def wait(communicator: GlooCommunicator, works: list[Any], timeout_seconds: float | None = None) -> None:
            original_wait(communicator, works, timeout_seconds)
            self.waited |= {id(work) for work in works}

        monkeypatch.setattr(GlooCommunicator, "batch", batch)
        monkeypatch.setattr(GlooCommunicator, "wait", wait)


def test_launched_batches_keep_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, n = LaunchRecorder(monkeypatch), 4
    with open_nodes(BATCHED, n, TWO_PHASES) as nodes:
        run_on_all(nodes, functools.partial(make_rounds, n=n, rounds=scale(60, 1000)))
    launches_of = recorder.launches
    for uid, launches in launches_of.items():
        others = [other for other in range(n) if other != uid]
        first = launches[0]
        assert sorted(to for to, _ in first.sends) == sorted(source for source, _ in first.receives) == others  # R5
        assert len({launch.thread for launch in launches[1:]}) == 1  # R10
        for launch in launches:
            assert len(launch.sends) + len(launch.receives) <= MAX_OPERATIONS  # R4
            for operations in (launch.sends, launch.receives):
                assert len({peer for peer, _ in operations}) == len(operations)  # R3
            assert all(id(work) in recorder.waited for work in launch.works)  # R9
        for other in others:  # R1, R2: in the same order, of the same sizes
            sent = [size for launch in launches for to, size in launch.sends if to == other]
            received = [size for launch in launches_of[other] for source, size in launch.receives if source == uid]
            assert sent == received and len(sent) > 50


def test_buckets_are_launched_in_order_whatever_the_delays_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2, R3: a model has three buckets, and each bucket is sent to both neighbors in one batch."""
    recorder, elements, draw = LaunchRecorder(monkeypatch), 2 * BLOCK_ELEMENTS + 5, random.Random(3)
    delays = {(uid, r): draw.choice([0, 0.01]) for uid in range(3) for r in range(8)}
    with open_nodes(BATCHED, 3, flat_schema(elements), chunk_bytes=1 << 20) as nodes:
        gossip(nodes, elements, torch.float32, 8, lambda uid, r: time.sleep(delays[uid, r]))
    sizes = [4 * BLOCK_ELEMENTS, 4 * BLOCK_ELEMENTS, 20]
    for uid, launches in recorder.launches.items():
        assert [[size for _, size in launch.sends] for launch in launches[1:]] == [[size] * 2 for size in sizes] * 8
        assert all({to for to, _ in launch.sends} == set(ring(3)[uid]) for launch in launches)


@pytest.mark.parametrize("count", [MAX_OPERATIONS + 1, 1000])
def test_a_batch_of_too_many_operations_is_refused(count: int) -> None:
    communicator = object.__new__(GlooCommunicator)
    communicator._rank, communicator._group = {uid: uid for uid in range(count)}, None
    with pytest.raises(ValueError, match=f"at most 256 operations, got {count}"):
        communicator.batch([(uid, torch.zeros(1)) for uid in range(count)], [])


@pytest.mark.slow
def test_a_receive_without_a_matching_send_ends_with_the_name_of_the_peer() -> None:
    """R1 is broken on purpose: node 1 waits for payloads that node 0 never sends, and node 0 receives none of node
    1's."""
    payload = Payload({"x": torch.ones(1 << 16)})
    with open_nodes(BATCHED, 2, flat_schema(1 << 16), timeout_seconds=0.3) as nodes:
        (arrival,) = nodes[1].exchange(0, {}, (0,)).arrivals(0.3)
        assert arrival.missing == {0}
        with pytest.raises(PeerLost, match="node 0 received nothing"):
            for r in range(1, SEND_WINDOW + 3):
                nodes[1].exchange(r, {0: payload}, ())


def test_the_failure_of_a_node_ends_the_waits_of_the_others() -> None:
    with open_nodes(BATCHED, 3, flat_schema(100)) as nodes:

        def run(node: Communication) -> None:
            payload = Payload({"x": torch.ones(100)})
            neighbors = ring(3)[node.uid]
            for r in range(20):
                if (node.uid, r) == (1, 10):
                    node.fail(1, "it lost its mind")
                    return
                for arrival in node.exchange(r, dict.fromkeys(neighbors, payload), neighbors).arrivals(60):
                    assert not arrival.missing

        errors: list[BaseException] = []

        def run_and_record_error(node: Communication) -> None:
            try:
                run(node)
            except PeerLost as error:
                errors.append(error)

        run_on_all(nodes, run_and_record_error)
        assert ["node 1 failed: it lost its mind" in str(error) for error in errors] == [True, True]


def test_a_departed_peer_is_neither_sent_to_nor_waited_for() -> None:
    with open_nodes(BATCHED, 3, flat_schema(10)) as nodes:
        payload = Payload({"x": torch.ones(10)})
        nodes[2].depart(0, (0, 1))
        wait_until(lambda: all(2 in node._run_state.departed for node in nodes[:2] if isinstance(node, ZeroMQ)))

        def run(node: Communication) -> None:
            if node.uid == 2:
                return
            others = tuple({0, 1, 2} - {node.uid})
            for r in range(3):
                exchange = node.exchange(r, dict.fromkeys(others, payload), others)
                (arrival,) = exchange.arrivals(60)
                assert list(arrival.received) == [1 - node.uid]
                assert arrival.missing == exchange.departed == exchange.undelivered == {2}

        run_on_all(nodes, run)


def test_control_messages_do_not_use_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, H3: barriers, means and stops still work while a clique hangs in an exchange that its peers never make."""
    recorder, payload = LaunchRecorder(monkeypatch), Payload({"x": torch.ones(1 << 18)})
    with open_nodes(BATCHED, 3, flat_schema(1 << 18)) as nodes:
        before = len(recorder.launches[0])
        nodes[0].exchange(0, {1: payload}, (2,))
        wait_until(lambda: len(recorder.launches[0]) > before, "node 0 launched nothing")
        num_launched = {uid: len(launches) for uid, launches in recorder.launches.items()}

        def control(node: Communication) -> None:
            node.barrier("in between", 60)
            mean, contributors = node.mean("level", torch.tensor([float(node.uid)])).wait(60)
            assert (float(mean), contributors) == (1.0, 3)

        run_on_all(nodes, control)
        nodes[2].announce_stop()
        wait_until(lambda: all(node.stopping for node in nodes))
        assert num_launched == {uid: len(launches) for uid, launches in recorder.launches.items()}
        io_threads = {node._io.ident for node in nodes if isinstance(node, ZeroMQ)}
        assert not io_threads & {launch.thread for launches in recorder.launches.values() for launch in launches}


@pytest.mark.slow
def test_a_batch_with_a_peer_that_departs_is_not_waited_for() -> None:
    with open_nodes(BATCHED, 3, flat_schema(10)) as nodes:
        payload = Payload({"x": torch.ones(10)})
        exchanges = [
            node.exchange(0, dict.fromkeys({0, 1, 2} - {node.uid}, payload), tuple({0, 1, 2} - {node.uid}))
            for node in nodes[:2]
        ]
        nodes[2].depart(0, (0, 1))
        for exchange in exchanges:
            (arrival,) = exchange.arrivals(100)
            assert 2 in arrival.missing
