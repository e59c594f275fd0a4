from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import zmq

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.parts import BindPlan, TransportParts
from decentnode.communication.run_state import RunFacts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.collective_state import CollectiveState
from decentnode.communication.zeromq.protocol.tree_mean import OutgoingPart
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import AssemblyError, Interrupted, PeerFault, PeerLost
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire import codec, framing
from decentnode.wire.messages import PROTOCOL_VERSION, Ack, Arrive, Chunk, Hello, Key, Message, Probe, Stop
from decentnode.wire.session import Session
from tests.communication.contract import (
    NETWORKED,
    TRANSPORTS,
    check_cannot_bind,
    connected,
    flat_schema,
    gossip,
    open_nodes,
    random_values,
    run_on_all,
)
from tests.conftest import free_ports, wait_until


@pytest.mark.sampled
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_a_mean_is_correct_and_has_the_same_bits_on_every_node_and_transport(transport: str, n: int) -> None:
    tensors = [random_values(2 * BLOCK_ELEMENTS + 3, torch.float32, u) for u in range(n)]
    with open_nodes(transport, n, flat_schema(4)) as nodes:
        big = run_on_all(nodes, lambda node: node.mean("big", tensors[node.uid]))
        own_uid = [torch.tensor([[float(uid)]], dtype=torch.float64) for uid in range(n)]
        small = run_on_all(nodes, lambda node: node.mean("small", own_uid[node.uid]))

        def take(node: Communication) -> tuple[torch.Tensor, int]:
            mean, contributors = small[node.uid].wait(60)  # type: ignore[attr-defined]
            assert mean.shape == (1, 1) and float(mean) == pytest.approx((n - 1) / 2) and contributors == n
            return big[node.uid].wait(60)  # type: ignore[attr-defined,no-any-return]

        results = run_on_all(nodes, take)
    expected = np.mean([tensor.double().numpy() for tensor in tensors], axis=0)
    first = results[0][0]  # type: ignore[index]
    np.testing.assert_allclose(first.numpy(), expected, atol=1e-6)
    assert all(torch.equal(first, mean) and count == n for mean, count in results.values())  # type: ignore[misc]
    if transport != "inproc":
        with open_nodes("inproc", n, flat_schema(4)) as twins:
            pending = run_on_all(twins, lambda node: node.mean("big", tensors[node.uid]))
            assert torch.equal(pending[0].wait(1)[0], first)  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_barrier_waits_for_the_last_node(transport: str) -> None:
    """At every barrier another node is the last: it arrives after all the others. Names of barriers are used again."""
    n, names, changed = 10, ("one", "two", "two", "one"), threading.Condition()
    arrived = [0] * len(names)
    passed: list[tuple[int, int, int]] = []

    with open_nodes(transport, n, flat_schema(4)) as nodes:

        def run(node: Communication) -> None:
            for number, name in enumerate(names):
                with changed:
                    if node.uid == (0, 9, 4, 1)[number]:
                        assert changed.wait_for(lambda: arrived[number] == n - 1, 60)  # noqa: B023
                    arrived[number] += 1
                    changed.notify_all()
                node.barrier(name, 60)
                passed.append((number, node.uid, arrived[number]))

        run_on_all(nodes, run)
    assert sorted(passed) == [(number, uid, n) for number in range(len(names)) for uid in range(n)]


class BarriersOfNode:
    """The barriers of one node at time 0, without a network: the test plays its neighbors in the control tree."""

    def __init__(self, uid: int = 0, n: int = 2) -> None:
        self.sent: list[tuple[int, str, int]] = []
        """(receiver, name, down) of every `Arrive` that the node sent."""
        self.on_sent: Callable[[], None] = lambda: None
        session = Session(uid, n, "d", b"12345678")
        self.collectives = CollectiveState(session, 1 << 22, RunFacts(), self)

    def emit(self, pieces: Sequence[OutgoingPart], now: float) -> None:
        """Sends nothing: there are no means in these tests."""

    def consumed(self, uid: int, size: int) -> None:
        """Does nothing, as there are no means."""

    def receive_arrive(self, name: str, down: int, source: int) -> None:
        self.collectives.arrive(name, down, source, 0.0)

    def passes(self, name: str) -> bool:
        """Lets the node enter a barrier. Returns whether it passes at once; otherwise the wait times out, and raises
        PeerLost."""
        wait = self.collectives.enter_barrier(name, 0.01, 0.0)
        return wait.step(0.0) or wait.step(wait.deadline)

    def control(self, uid: int, kind: type[Message], values: tuple[object, ...], now: float) -> None:
        name, down = values
        assert isinstance(name, str) and isinstance(down, int)
        assert kind is Arrive
        self.sent.append((uid, name, down))
        self.on_sent()


def test_an_arrival_counts_for_one_barrier_only() -> None:
    parent = BarriersOfNode()
    parent.receive_arrive("b", 0, 1)
    assert parent.passes("b")
    with pytest.raises(PeerLost, match=r"barrier 'b' not passed within 0.01 s, waiting for node 1"):
        parent.passes("b")
    assert parent.sent == [(1, "b", 1)]


def test_a_child_that_reaches_the_next_barrier_of_the_same_name_at_once_is_not_forgotten() -> None:
    parent = BarriersOfNode()
    parent.receive_arrive("b", 0, 1)
    parent.on_sent = lambda: parent.receive_arrive("b", 0, 1)  # the child is told that it passed the first barrier
    assert parent.passes("b")
    parent.on_sent = lambda: None
    assert parent.passes("b")
    assert parent.sent == [(1, "b", 1)] * 2


def test_a_node_does_not_pass_a_barrier_that_it_has_not_reached() -> None:
    child = BarriersOfNode(uid=1)
    with pytest.raises(PeerFault, match="passed before node 1 was there"):
        child.receive_arrive("b", 1, 0)
    with pytest.raises(PeerLost, match="waiting for node 0"):
        child.passes("b")
    for name in ("c", "a"):
        with pytest.raises(PeerFault, match="unexpected_message"):
            child.receive_arrive(name, 1, 0)
    child.receive_arrive("b", 1, 0)
    assert child.sent == [(0, "b", 0)]


@pytest.mark.parametrize(("uid", "source", "down"), [(0, 9, 0), (0, 1, 1), (1, 0, 0), (1, 2, 1), (1, 2, 0), (9, 0, 1)])
def test_messages_of_barriers_are_accepted_only_from_neighbors_in_the_tree(uid: int, source: int, down: int) -> None:
    """In the tree of ten nodes node 0 has eight children, and node 9 is a child of node 1. A node accepts arrivals only
    from its own children, and permission to pass only from its parent."""
    session = Session(uid, 10, "d", b"12345678")
    with pytest.raises(PeerFault, match="wrong_sender"):
        session.receive(Arrive(b"12345678", 0, source, "b", down), 0.0)


def test_a_node_cannot_let_a_sibling_pass_a_barrier() -> None:
    with open_nodes("tcp", 10, flat_schema(4)) as nodes:
        liar, victim = nodes[2], nodes[3]
        assert isinstance(liar, ZeroMQ) and isinstance(victim, ZeroMQ)
        liar._io.call(lambda: liar._protocol.control(victim.uid, Arrive, ("b", 1), clock.now()))
        wait_until(lambda: victim.counters.faults, "the forged message did not arrive")
        with pytest.raises(PeerLost, match=r"barrier 'b' not passed within 0.2 s, waiting for node 0"):
            victim.barrier("b", 0.2)
        assert victim.counters.faults == {"wrong_sender": 1}


@pytest.mark.parametrize("transport", NETWORKED)
def test_waits_end_at_their_time_out_and_name_the_missing_nodes(transport: str) -> None:
    with open_nodes(transport, 3, flat_schema(4)) as nodes:
        with pytest.raises(PeerLost, match=r"node 1.*node 2") as caught:
            nodes[0].mean("k", torch.ones(3)).wait(0.3)
        assert caught.value.missing == (1, 2)
        with pytest.raises(PeerLost, match=r"barrier 'b' not passed within 0.2 s, waiting for node 1"):
            nodes[0].barrier("b", 0.2)


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_stop_interrupts_all_means_but_closing_ones(transport: str) -> None:
    with open_nodes(transport, 3, flat_schema(4)) as nodes:
        interrupted = nodes[0].mean("round-5", torch.ones(2))
        nodes[2].announce_stop()
        with pytest.raises(Interrupted):
            interrupted.wait(60)
        pending = run_on_all(nodes, lambda node: node.mean("closing", torch.ones(2) * node.uid, closing=True))
        assert all(p.wait(60)[0].tolist() == [1, 1] for p in pending.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.slow
def test_reports_reach_the_lowest_uid(transport: str) -> None:
    with open_nodes(transport, 20, flat_schema(4)) as nodes:

        def run(node: Communication) -> dict[int, dict[str, float | int | str]]:
            node.report({"uid": node.uid, "accuracy": node.uid / 10, "note": "fine"})
            return {} if transport == "inproc" and node.uid else node.reports(60)

        if transport == "inproc":
            for node in nodes[1:]:
                run(node)
        results = run_on_all(nodes[:1] if transport == "inproc" else nodes, run)
    assert list(results[0]) == list(range(20))  # type: ignore[call-overload]
    assert results[0][7] == {"uid": 7, "accuracy": 0.7, "note": "fine"}  # type: ignore[index]
    assert all(not r for uid, r in results.items() if uid)


@pytest.mark.parametrize("n", [3, 12])
def test_the_wait_for_reports_ends_without_those_of_a_node_that_said_goodbye(n: int) -> None:
    """Node 1 closes without a report. With 12 nodes, the reports of nodes 9, 10 and 11 would have come through it. The
    time-out is longer than any test may take."""
    with open_nodes("zeromq", n, flat_schema(4)) as nodes:
        nodes[1].close()
        others = [node for node in nodes if node.uid != 1]
        for node in others:
            node.report({"uid": node.uid})
        reports = nodes[0].reports(10_000)
    assert {0, 2} <= reports.keys() and 1 not in reports


def make_node(uid: int, n: int, machine_of: dict[int, int] | None = None, digest: str = "d") -> ZeroMQ:
    config = ZeroMQConfig(name="zeromq")
    machines = machine_of or dict.fromkeys(range(n), 0)
    return ZeroMQ(config, TransportParts(
        uid=uid, machine_of=machines, schemas=flat_schema(4), digest=digest, bind=BindPlan(),
    ))


@pytest.mark.slow
def test_a_node_that_never_joins_is_named_with_its_machine() -> None:
    first, second = (make_node(uid, 3, {0: 0, 1: 0, 2: 1}) for uid in (0, 1))
    table = {0: first.bind(), 1: second.bind(), 2: ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")}
    for node in (first, second):
        node.set_peers(table)

    def run(node: Communication) -> None:
        with pytest.raises(
            AssemblyError, match=r"1 of 3 nodes did not join in time: node 2 \(machine 1, 127.0.0.1:1\)"
        ):
            node.start(2)

    try:
        run_on_all([first, second], run)
    finally:
        first.close()
        second.close()


def test_a_node_with_another_config_is_refused_with_the_reason() -> None:
    first, second = make_node(0, 2), make_node(1, 2, digest="other")

    def run(node: Communication) -> None:
        reason = "node 1 was refused: .*another config or graph"
        if not node.uid:
            reason = "did not join.*another config or graph"
        with pytest.raises(AssemblyError, match=reason):
            node.start(1000)
        if node.uid:
            first._io.call(lambda: first._protocol.give_up(clock.now()))  # as at its time-out

    with connected([first, second], start=False):
        run_on_all([first, second], run)


def test_a_port_in_use_is_an_environment_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_cannot_bind(BindPlan(port=port), f"cannot listen on tcp://127.0.0.1:{port}.*mapping.base_port")


@pytest.mark.parametrize("plane", [0, 1])
def test_a_port_that_was_taken_while_its_node_was_gone_is_an_environment_fault(plane: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        again = [f"tcp://127.0.0.1:{free_ports(1)}"] * 2
        again[plane] = f"tcp://127.0.0.1:{port}"
        check_cannot_bind(BindPlan(again=tuple(again)), f"listen on tcp://127.0.0.1:{port}, where it listened before")


def test_an_address_of_another_machine_is_an_environment_fault() -> None:
    elsewhere = "192.0.2.200"  # RFC 5737: of no machine
    check_cannot_bind(
        BindPlan(host=elsewhere, port=free_ports(2)),
        rf"cannot listen on tcp://{elsewhere}:\d+: [^(]*; no interface .* has this address: is it machine 3\?",
        machine=3,
    )


def test_a_folder_for_sockets_that_is_gone_is_an_environment_fault(tmp_path: Path) -> None:
    check_cannot_bind(BindPlan(ipc_dir=tmp_path / "gone"), r"cannot listen on ipc://.*gone")


FAR_AHEAD = (5_000).to_bytes(8, "little")
"""The sequence number of forged frames: far above those of the victim's real neighbor."""


def frame(
    header: bytes, sequence: int = 5_000, kind: int = framing.NONE, body: bytes | None = None
) -> bytes:
    """Returns the first frame of a message, by default with the sequence number FAR_AHEAD and without a checksum."""
    return framing.sealed(sequence, header, kind, 0, body)


def with_header_bytes(frame: bytes, size: int) -> bytes:
    """Returns the first frame with another header size in its prefix."""
    return frame[:10] + size.to_bytes(2, "little") + frame[12:]


def encode(kind: type[Message], *values: object) -> bytes:
    return codec.encode(kind(*values))


def main_faults(node: ZeroMQ) -> Counter[str]:
    """Returns the faults that a node counted, without those whose number depends on timing."""
    others = ("hello_flood", "handshake_failed", "duplicate_chunk")
    return Counter({reason: n for reason, n in node.counters.faults.items() if reason not in others})


def test_forged_messages_are_refused_counted_and_change_nothing() -> None:
    elements = 1000
    with open_nodes("tcp", 3, flat_schema(elements)) as nodes:
        victim = nodes[0]
        assert isinstance(victim, ZeroMQ)
        control, bulk = victim._local
        run = victim.run_id
        context = zmq.Context()
        dealers = []
        for address in (control, bulk):
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(address)
            dealers.append(dealer)
            host, port = address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        chunk = Chunk(run, 0, 1, 9, 0, 0, 0, elements, {})
        forged = [
            ([b"garbage", b"x"], "malformed_header"),
            ([b"", b""], "malformed_header"),
            ([frame(msgpack.packb([220, PROTOCOL_VERSION, 8]))], "malformed_header"),
            ([frame(codec.encode(chunk), 0), b"x" * 4000], "malformed_header"),
            ([frame(codec.encode(chunk))], "wrong_plane"),
            ([frame(codec.encode(chunk)), b"x", b"y"], "malformed_multipart"),
            ([frame(encode(Chunk, b"elsewher", 0, 1, 9, 0, 0, 0, elements, {})), b"x" * 4000], "wrong_run"),
            ([frame(encode(Chunk, run, 7, 1, 9, 0, 0, 0, elements, {})), b"x" * 4000], "wrong_generation"),
            ([frame(encode(Chunk, run, 0, 99, 9, 0, 0, 0, elements, {})), b"x" * 4000], "unknown_uid"),
            ([frame(encode(Chunk, run, 0, 1, 9, 0, 0, 0, 1 << 40, {})), b"x" * 4000], "wrong_shape"),
            ([frame(encode(Chunk, run, 0, 1, 9, 0, 5, 0, elements, {})), b"x" * 4000], "wrong_shape"),
            ([frame(codec.encode(chunk)), b"x" * 3999], "wrong_size"),
            ([frame(codec.encode(chunk), kind=framing.XXH3), b"x" * 4000], "checksum_mismatch"),
            ([frame(codec.encode(chunk), 1 << 40), b"x" * 4000], "sequence_jump"),
            ([frame(codec.encode(chunk), body=b"x" * 3999)], "wrong_size"),
            ([frame(codec.encode(chunk), kind=framing.XXH3, body=b"x" * 4000)], "checksum_mismatch"),
            ([frame(codec.encode(chunk), body=b"x" * 4000), b"x" * 4000], "malformed_multipart"),
            ([frame(codec.encode(chunk), body=b"")], "wrong_size"),
            ([with_header_bytes(frame(codec.encode(chunk)), 0xFFFF)], "malformed_header"),
            ([with_header_bytes(frame(codec.encode(chunk), body=b"x" * 4000), 3)], "malformed_header"),
            ([with_header_bytes(frame(codec.encode(chunk), body=b"x" * 4000), 300)], "malformed_header"),
            ([with_header_bytes(frame(codec.encode(chunk)), 1), b"x" * 4000], "malformed_multipart"),
            ([frame(encode(Stop, run, 0, 1), body=b"")], "wrong_plane"),
            ([frame(encode(Probe, run, 0, 1, 1, 3), 0, body=b"x")], "wrong_plane"),
            ([frame(encode(Stop, run, 0, 1)), b""], "wrong_plane"),
            ([frame(encode(Probe, run, 0, 1, 0, 3), 0)], "wrong_plane"),
        ]
        for number, (frames, _) in enumerate(forged):
            first = frames[0].replace(FAR_AHEAD, (5_000 + number).to_bytes(8, "little"))
            dealers[1].send_multipart([first, *frames[1:]])
        dealers[0].send(b"\xc1 nonsense")
        dealers[0].send(frame(encode(Stop, b"elsewher", 0, 1)))
        dealers[0].send(frame(encode(Key, run, 0, 1, bytes(16), bytes(32)), 60_000))
        dealers[0].send(frame(encode(Ack, run, 0, 1, 1, 1 << 40, b"", 0, 0), 0))
        dealers[0].send(frame(codec.encode(chunk), body=b"x" * 4000))
        dealers[0].send(frame(encode(Stop, run, 0, 1), body=b"x"))
        dealers[0].send_multipart([frame(codec.encode(chunk)), b"x" * 4000])
        for _ in range(20):
            dealers[0].send(frame(encode(Hello, run, 0, 1, PROTOCOL_VERSION, "d", 3, ""), 0))
        forged += [([], reason) for reason in (
            "malformed_header", "wrong_run", "sequence_jump", "wrong_acknowledgement", "wrong_plane", "wrong_plane",
            "malformed_multipart",
        )]  # fmt: skip
        gossip(nodes, elements, torch.float32, 5)
        expected = Counter(reason for _, reason in forged)
        expected_at_least = Counter(hello_flood=1, handshake_failed=2)
        wait_until(lambda: main_faults(victim) >= expected and Counter(victim.counters.faults) >= expected_at_least,
                   lambda: victim.counters.faults)  # fmt: skip
        assert main_faults(victim) == expected and not victim.stopping, victim.counters.faults
        for dealer in dealers:
            # A frame above the maximum size: the connection is closed. It is the last part of its message, because
            # libzmq 4.3.5 aborts its own process if a socket is closed with half a message in flight as its peer cuts.
            dealer.send_multipart([b"", b"x" * (64 << 20)])
        gossip([*nodes], elements, torch.float32, 0)
        context.destroy(linger=0)


def test_chunks_of_earlier_rounds_are_refused_as_stale() -> None:
    with open_nodes("tcp", 2, flat_schema(8)) as nodes:
        gossip(nodes, 8, torch.float32, 4)
        victim = nodes[0]
        assert isinstance(victim, ZeroMQ)
        victim._inbox.advance(4)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(victim._local[1])
            for round in (0, 3):
                header = encode(Chunk, victim.run_id, 0, 1, round, 0, 0, 0, 8, {})
                dealer.send_multipart([frame(header, 5_000 + round), bytes(32)])
            wait_until(lambda: victim.counters.faults.get("stale_round", 0) >= 2, lambda: victim.counters.faults)
        nodes[1].exchange(4, {0: Payload({"x": torch.ones(8)})}, ())
        (arrival,) = victim.exchange(4, {}, (1,)).arrivals(60)
        assert bool((arrival.received[1].tensors["x"] == 1).all()), "the forged chunks damaged the next round"
