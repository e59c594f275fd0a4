"""The rules that keep matched sends and receives from waiting in a circle, and tries to break them
(docs/explanation/transports.rst, "Rules against deadlock").

Directed graphs that change every round, payloads whose sizes only their senders know, two phases under way at once and
delays that differ from node to node: over tags, over batches matched by order alone (NCCL's way, on gloo), and mixed
with other ways.
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
from tests.communication.contract import BATCHED, flat_schema, gossip, nodes, ring, together
from tests.conftest import scale, wait_until

OPEN = (Schema(64, {"values": TensorSpec(torch.float32, 64, False), "at": TensorSpec(torch.int32, 64, False)}, False),)


def drawn_edges(n: int, round: int) -> dict[int, tuple[int, ...]]:
    """Out-neighbors of a directed random graph, another one every round; some nodes have none."""
    draw = random.Random(1000 + round)
    return {u: tuple(v for v in range(n) if v != u and draw.random() < 0.4) for u in range(n)}


def message(source: int, to: int, round: int, phase: int) -> Payload:
    size = random.Random(f"{source} {to} {round} {phase}").randint(0, 64)
    values = torch.full((size,), float(1000 * round + 10 * source + to))
    return Payload({"values": values, "at": torch.arange(size, dtype=torch.int32)}, {"phase": phase})


def walk(node: Communication, n: int, rounds: int) -> None:
    """Rounds of two phases under way together, with delays that differ from node to node."""
    draw = random.Random(node.uid)
    for round in range(rounds):
        out = drawn_edges(n, round)
        sources = tuple(u for u in range(n) if node.uid in out[u])
        flying = []
        for phase in range(2):
            payloads = {v: message(node.uid, v, round, phase) for v in out[node.uid]}
            flying.append(node.exchange(round, payloads, sources, phase))
            if draw.random() < 0.05:
                time.sleep(draw.random() / 100)
        for phase, exchange in enumerate(flying):
            for arrival in exchange.arrivals(60):  # asking for the next slice gives these buffers to other receives
                check(arrival, node.uid, sources, round, phase)


def check(arrival: Arrival, uid: int, sources: tuple[int, ...], round: int, phase: int) -> None:
    assert not arrival.missing
    assert list(arrival.received) == sorted(sources)
    for source, got in arrival.received.items():
        sent = message(source, uid, round, phase)
        assert got.scalars == sent.scalars
        assert all(torch.equal(got.tensors[name], sent.tensors[name]) for name in sent.tensors)


@pytest.mark.parametrize("transport", ["collective", BATCHED, "hybrid"])
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_directed_graphs_that_change_every_round_never_deadlock_or_mix_up(transport: str) -> None:
    rounds = scale(200, 4000)
    with nodes(transport, 5, OPEN * 2) as made:
        together(made, functools.partial(walk, n=5, rounds=rounds), 800)
        assert all(not node.counters.faults for node in made)


@dataclass
class Launch:
    thread: int
    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]
    """(uid, bytes), in the order of the call."""
    works: list[Any] = field(default_factory=list)


class Witness:
    """Writes down what every communicator of this process is asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: dict[int, list[Launch]] = {}
        self.waited: set[int] = set()
        self.calls: dict[int, list[str]] = {}
        launch, wait = GlooCommunicator.batch, GlooCommunicator.wait

        def batch(
            itself: GlooCommunicator, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
        ) -> list[Any]:
            works = launch(itself, sends, receives)
            sizes = [[(uid, tensor.nbytes) for uid, tensor in each] for each in (sends, receives)]
            mine = self.launches.setdefault(itself.uid, [])
            mine.append(Launch(threading.get_ident(), sizes[0], sizes[1], works))
            return works

        def waiting(itself: GlooCommunicator, works: list[Any], timeout_seconds: float | None = None) -> None:
            wait(itself, works, timeout_seconds)
            self.waited |= {id(work) for work in works}

        monkeypatch.setattr(GlooCommunicator, "batch", batch)
        monkeypatch.setattr(GlooCommunicator, "wait", waiting)


def test_what_nodes_launch_keeps_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    witness, n = Witness(monkeypatch), 4
    with nodes(BATCHED, n, OPEN * 2) as made:
        together(made, functools.partial(walk, n=n, rounds=scale(60, 1000)))
    launches = witness.launches
    for uid, mine in launches.items():
        others = [other for other in range(n) if other != uid]
        assert sorted(to for to, _ in mine[0].sends) == sorted(of for of, _ in mine[0].receives) == others  # R5
        assert len({launch.thread for launch in mine[1:]}) == 1  # R10
        for launch in mine:
            assert len(launch.sends) + len(launch.receives) <= MAX_OPERATIONS  # R4
            assert all(len({u for u, _ in each}) == len(each) for each in (launch.sends, launch.receives))  # R3
            assert all(id(work) in witness.waited for work in launch.works)  # R9
        for other in others:  # R1, R2: in the same order, of the same sizes
            sent = [size for launch in mine for to, size in launch.sends if to == other]
            came = [size for launch in launches[other] for of, size in launch.receives if of == uid]
            assert sent == came and len(sent) > 50


def test_buckets_leave_in_their_order_whatever_the_neighbors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2, R3: three buckets per model, to both neighbors in one batch each."""
    witness, elements, draw = Witness(monkeypatch), 2 * BLOCK_ELEMENTS + 5, random.Random(3)
    delays = {(uid, r): draw.choice([0, 0.01]) for uid in range(3) for r in range(8)}
    with nodes(BATCHED, 3, flat_schema(elements), chunk_bytes=1 << 20) as made:
        gossip(made, elements, torch.float32, 8, lambda uid, r: time.sleep(delays[uid, r]))
    sizes = [4 * BLOCK_ELEMENTS, 4 * BLOCK_ELEMENTS, 20]
    for uid, mine in witness.launches.items():
        assert [[size for _, size in launch.sends] for launch in mine[1:]] == [[size] * 2 for size in sizes] * 8
        assert all({to for to, _ in launch.sends} == set(ring(3)[uid]) for launch in mine)


@pytest.mark.parametrize("count", [MAX_OPERATIONS + 1, 1000])
def test_a_batch_of_too_many_operations_is_refused(count: int) -> None:
    bare = object.__new__(GlooCommunicator)
    bare._rank, bare._group = {uid: uid for uid in range(count)}, None
    with pytest.raises(ValueError, match=f"at most 256 operations, got {count}"):
        bare.batch([(uid, torch.zeros(1)) for uid in range(count)], [])


@pytest.mark.slow
def test_a_receive_without_its_send_ends_in_a_named_loss() -> None:
    """R1 broken on purpose: node 1 expects what node 0 never sends, and takes nothing that it does send."""
    payload = Payload({"x": torch.ones(1 << 16)})
    with nodes(BATCHED, 2, flat_schema(1 << 16), timeout_seconds=0.3) as made:
        (arrival,) = made[1].exchange(0, {}, (0,)).arrivals(0.3)
        assert arrival.missing == {0}
        with pytest.raises(PeerLost, match="node 0 received nothing"):
            for r in range(1, SEND_WINDOW + 3):
                made[1].exchange(r, {0: payload}, ())


def test_a_node_that_fails_in_the_middle_hangs_nobody() -> None:
    with nodes(BATCHED, 3, flat_schema(100)) as made:

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

        def survive(node: Communication) -> None:
            try:
                run(node)
            except PeerLost as error:
                errors.append(error)

        together(made, survive)
        assert ["node 1 failed: it lost its mind" in str(error) for error in errors] == [True, True]


def test_a_departed_peer_is_left_out_on_both_sides() -> None:
    with nodes(BATCHED, 3, flat_schema(10)) as made:
        payload = Payload({"x": torch.ones(10)})
        made[2].depart(0, (0, 1))
        wait_until(lambda: all(2 in node._status.departed for node in made[:2] if isinstance(node, ZeroMQ)))

        def run(node: Communication) -> None:
            if node.uid == 2:
                return
            others = tuple({0, 1, 2} - {node.uid})
            for r in range(3):
                exchange = node.exchange(r, dict.fromkeys(others, payload), others)
                (arrival,) = exchange.arrivals(60)
                assert list(arrival.received) == [1 - node.uid]
                assert arrival.missing == exchange.departed == exchange.undelivered == {2}

        together(made, run)


def test_control_never_rides_on_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, H3: while a clique hangs in an exchange that has no other side, barriers and means go on without it."""
    witness, payload = Witness(monkeypatch), Payload({"x": torch.ones(1 << 18)})
    with nodes(BATCHED, 3, flat_schema(1 << 18)) as made:
        before = len(witness.launches[0])
        made[0].exchange(0, {1: payload}, (2,))
        wait_until(lambda: len(witness.launches[0]) > before, "node 0 launched nothing")
        launched = {uid: len(mine) for uid, mine in witness.launches.items()}

        def control(node: Communication) -> None:
            node.barrier("in between", 60)
            mean, contributors = node.mean("level", torch.tensor([float(node.uid)])).wait(60)
            assert (float(mean), contributors) == (1.0, 3)

        together(made, control)
        made[2].announce_stop()
        wait_until(lambda: all(node.stopping for node in made))
        assert launched == {uid: len(mine) for uid, mine in witness.launches.items()}
        io_threads = {node._io.ident for node in made if isinstance(node, ZeroMQ)}
        assert not io_threads & {launch.thread for mine in witness.launches.values() for launch in mine}


@pytest.mark.slow
def test_a_batch_with_a_peer_that_departs_meanwhile_is_not_waited_for() -> None:
    with nodes(BATCHED, 3, flat_schema(10)) as made:
        payload = Payload({"x": torch.ones(10)})
        flying = [
            node.exchange(0, dict.fromkeys({0, 1, 2} - {node.uid}, payload), tuple({0, 1, 2} - {node.uid}))
            for node in made[:2]
        ]
        made[2].depart(0, (0, 1))
        for exchange in flying:
            (arrival,) = exchange.arrivals(100)
            assert 2 in arrival.missing
