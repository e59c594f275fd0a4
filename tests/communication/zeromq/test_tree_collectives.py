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
    nodes,
    together,
    values,
)
from tests.conftest import free_ports, wait_until


@pytest.mark.sampled
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_means_are_means_and_alike_everywhere(transport: str, n: int) -> None:
    shares = [values(2 * BLOCK_ELEMENTS + 3, torch.float32, u) for u in range(n)]
    with nodes(transport, n, flat_schema(4)) as made:
        big = together(made, lambda node: node.mean("big", shares[node.uid]))
        small = together(made, lambda node: node.mean("small", torch.tensor([[float(node.uid)]], dtype=torch.float64)))

        def take(node: Communication) -> tuple[torch.Tensor, int]:
            mean, contributors = small[node.uid].wait(60)  # type: ignore[attr-defined]
            assert mean.shape == (1, 1) and float(mean) == pytest.approx((n - 1) / 2) and contributors == n
            return big[node.uid].wait(60)  # type: ignore[attr-defined,no-any-return]

        results = together(made, take)
    expected = np.mean([share.double().numpy() for share in shares], axis=0)
    first = results[0][0]  # type: ignore[index]
    np.testing.assert_allclose(first.numpy(), expected, atol=1e-6)
    assert all(torch.equal(first, mean) and count == n for mean, count in results.values())  # type: ignore[misc]
    if transport != "inproc":
        with nodes("inproc", n, flat_schema(4)) as twins:
            pending = together(twins, lambda node: node.mean("big", shares[node.uid]))
            assert torch.equal(pending[0].wait(1)[0], first)  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", NETWORKED)
def test_barriers_wait_for_the_last(transport: str) -> None:
    """Whoever it is: one node comes when all the others have come, at every barrier another one; names come again."""
    n, names, changed = 10, ("one", "two", "two", "one"), threading.Condition()
    arrived = [0] * len(names)
    passed: list[tuple[int, int, int]] = []

    with nodes(transport, n, flat_schema(4)) as made:

        def run(node: Communication) -> None:
            for number, name in enumerate(names):
                with changed:
                    if node.uid == (0, 9, 4, 1)[number]:
                        assert changed.wait_for(lambda: arrived[number] == n - 1, 60)  # noqa: B023
                    arrived[number] += 1
                    changed.notify_all()
                node.barrier(name, 60)
                passed.append((number, node.uid, arrived[number]))

        together(made, run)
    assert sorted(passed) == [(number, uid, n) for number in range(len(names)) for uid in range(n)]


class Parent:
    """Collectives of node 0 at time 0, whose only child answers nothing by itself."""

    def __init__(self, uid: int = 0, n: int = 2) -> None:
        self.sent: list[tuple[int, str, int]] = []
        self.on_sent: Callable[[], None] = lambda: None
        session = Session(uid, n, "d", b"12345678")
        self.collectives = CollectiveState(session, 1 << 22, RunFacts(), self)

    def emit(self, pieces: Sequence[OutgoingPart], now: float) -> None:
        """No means here."""

    def consumed(self, uid: int, size: int) -> None:
        """As in `emit`."""

    def arrive(self, name: str, down: int, who: int) -> None:
        self.collectives.arrive(name, down, who, 0.0)

    def passes(self, name: str) -> bool:
        """Whether this node, which comes to a barrier, goes on at once; otherwise it waits in vain."""
        wait = self.collectives.enter_barrier(name, 0.01, 0.0)
        return wait.step(0.0) or wait.step(wait.deadline)

    def control(self, uid: int, kind: type[Message], values: tuple[object, ...], now: float) -> None:
        name, down = values
        assert isinstance(name, str) and isinstance(down, int)
        assert kind is Arrive
        self.sent.append((uid, name, down))
        self.on_sent()


def test_arrivals_count_for_one_barrier() -> None:
    parent = Parent()
    parent.arrive("b", 0, 1)
    assert parent.passes("b")
    with pytest.raises(PeerLost, match=r"barrier 'b' not passed within 0.01 s, waiting for node 1"):
        parent.passes("b")
    assert parent.sent == [(1, "b", 1)]


def test_a_child_that_is_at_the_next_barrier_of_a_name_at_once_is_not_forgotten() -> None:
    parent = Parent()
    parent.arrive("b", 0, 1)
    parent.on_sent = lambda: parent.arrive("b", 0, 1)  # it heard that the first is passed, and goes on
    assert parent.passes("b")
    parent.on_sent = lambda: None
    assert parent.passes("b")
    assert parent.sent == [(1, "b", 1)] * 2


def test_nobody_is_let_through_a_barrier_that_it_did_not_reach() -> None:
    child = Parent(uid=1)
    with pytest.raises(PeerFault, match="passed before node 1 was there"):
        child.arrive("b", 1, 0)
    with pytest.raises(PeerLost, match="waiting for node 0"):
        child.passes("b")
    for name in ("c", "a"):
        with pytest.raises(PeerFault, match="unexpected_message"):
            child.arrive(name, 1, 0)
    child.arrive("b", 1, 0)
    assert child.sent == [(0, "b", 0)]


@pytest.mark.parametrize(("uid", "source", "down"), [(0, 9, 0), (0, 1, 1), (1, 0, 0), (1, 2, 1), (1, 2, 0), (9, 0, 1)])
def test_barriers_hear_of_the_tree_alone(uid: int, source: int, down: int) -> None:
    """Of nine children and a grandchild: neither somebody else's child nor a peer may arrive or let through."""
    session = Session(uid, 10, "d", b"12345678")
    with pytest.raises(PeerFault, match="wrong_sender"):
        session.receive(Arrive(b"12345678", 0, source, "b", down), 0.0)


def test_a_member_cannot_let_another_through_a_barrier() -> None:
    with nodes("tcp", 10, flat_schema(4)) as made:
        liar, victim = made[2], made[3]
        assert isinstance(liar, ZeroMQ) and isinstance(victim, ZeroMQ)
        liar._io.call(lambda: liar._protocol.control(victim.uid, Arrive, ("b", 1), clock.now()))
        wait_until(lambda: victim.counters.faults, "the liar's word did not come")
        with pytest.raises(PeerLost, match=r"barrier 'b' not passed within 0.2 s, waiting for node 0"):
            victim.barrier("b", 0.2)
        assert victim.counters.faults == {"wrong_sender": 1}


@pytest.mark.parametrize("transport", NETWORKED)
def test_waits_end_and_say_for_whom(transport: str) -> None:
    with nodes(transport, 3, flat_schema(4)) as made:
        with pytest.raises(PeerLost, match=r"node 1.*node 2") as caught:
            made[0].mean("k", torch.ones(3)).wait(0.3)
        assert caught.value.missing == (1, 2)
        with pytest.raises(PeerLost, match=r"barrier 'b' not passed within 0.2 s, waiting for node 1"):
            made[0].barrier("b", 0.2)


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_stop_gives_up_means_but_closing_ones(transport: str) -> None:
    with nodes(transport, 3, flat_schema(4)) as made:
        lost = made[0].mean("round-5", torch.ones(2))
        made[2].announce_stop()
        with pytest.raises(Interrupted):
            lost.wait(60)
        pending = together(made, lambda node: node.mean("closing", torch.ones(2) * node.uid, closing=True))
        assert all(p.wait(60)[0].tolist() == [1, 1] for p in pending.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.slow
def test_reports_reach_the_lowest_uid(transport: str) -> None:
    with nodes(transport, 20, flat_schema(4)) as made:

        def run(node: Communication) -> dict[int, dict[str, float | int | str]]:
            node.report({"uid": node.uid, "accuracy": node.uid / 10, "note": "fine"})
            return {} if transport == "inproc" and node.uid else node.reports(60)

        if transport == "inproc":
            for node in made[1:]:
                run(node)
        results = together(made[:1] if transport == "inproc" else made, run)
    assert list(results[0]) == list(range(20))  # type: ignore[call-overload]
    assert results[0][7] == {"uid": 7, "accuracy": 0.7, "note": "fine"}  # type: ignore[index]
    assert all(not r for uid, r in results.items() if uid)


@pytest.mark.parametrize("n", [3, 12])
def test_reports_are_not_waited_for_from_who_said_the_last_word(n: int) -> None:
    """Node 1 leaves without figures; with 12 nodes those of 9, 10 and 11 would have come through it. The wait is longer
    than any test may take."""
    with nodes("zeromq", n, flat_schema(4)) as made:
        made[1].close()
        others = [node for node in made if node.uid != 1]
        for node in others:
            node.report({"uid": node.uid})
        found = made[0].reports(10_000)
    assert {0, 2} <= found.keys() and 1 not in found


def lone(uid: int, n: int, machine_of: dict[int, int] | None = None, digest: str = "d") -> ZeroMQ:
    config = ZeroMQConfig(name="zeromq")
    machines = machine_of or dict.fromkeys(range(n), 0)
    return ZeroMQ(config, TransportParts(
        uid=uid, machine_of=machines, schemas=flat_schema(4), digest=digest, bind=BindPlan(),
    ))


@pytest.mark.slow
def test_a_peer_that_never_comes_is_named_with_its_machine() -> None:
    first, second = (lone(uid, 3, {0: 0, 1: 0, 2: 1}) for uid in (0, 1))
    table = {0: first.bind(), 1: second.bind(), 2: ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")}
    for node in (first, second):
        node.set_peers(table)

    def run(node: Communication) -> None:
        with pytest.raises(
            AssemblyError, match=r"1 of 3 nodes did not join in time: node 2 \(machine 1, 127.0.0.1:1\)"
        ):
            node.start(2)

    try:
        together([first, second], run)
    finally:
        first.close()
        second.close()


def test_a_node_with_another_config_is_refused_by_name() -> None:
    first, second = lone(0, 2), lone(1, 2, digest="other")

    def run(node: Communication) -> None:
        says = "node 1 was refused: .*another config or graph" if node.uid else r"did not join.*another config or graph"
        with pytest.raises(AssemblyError, match=says):
            node.start(1000)
        if node.uid:
            first._io.call(lambda: first._protocol.give_up(clock.now()))  # as when its time is over

    with connected([first, second], start=False):
        together([first, second], run)


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


def sealed(header: bytes, sequence: int = 5_000, kind: int = framing.NONE, body: bytes | None = None) -> bytes:
    """A first frame, numbered far ahead of what the victim's true neighbor sends."""
    return framing.sealed(sequence, header, kind, 0, body)


def with_header_bytes(frame: bytes, size: int) -> bytes:
    """The same first frame, but for what it says of its header's size."""
    return frame[:10] + size.to_bytes(2, "little") + frame[12:]


def encoded(kind: type[Message], *values: object) -> bytes:
    return codec.encode(kind(*values))


def counted(node: ZeroMQ) -> Counter[str]:
    others = ("hello_flood", "handshake_failed", "duplicate_chunk")
    return Counter({reason: n for reason, n in node.counters.faults.items() if reason not in others})


def test_strangers_are_counted_and_change_nothing() -> None:
    elements = 1000
    with nodes("tcp", 3, flat_schema(elements)) as made:
        victim = made[0]
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
        bad = [
            ([b"garbage", b"x"], "malformed_header"),
            ([b"", b""], "malformed_header"),
            ([sealed(msgpack.packb([220, PROTOCOL_VERSION, 8]))], "malformed_header"),
            ([sealed(codec.encode(chunk), 0), b"x" * 4000], "malformed_header"),
            ([sealed(codec.encode(chunk))], "wrong_plane"),
            ([sealed(codec.encode(chunk)), b"x", b"y"], "malformed_multipart"),
            ([sealed(encoded(Chunk, b"elsewher", 0, 1, 9, 0, 0, 0, elements, {})), b"x" * 4000], "wrong_run"),
            ([sealed(encoded(Chunk, run, 7, 1, 9, 0, 0, 0, elements, {})), b"x" * 4000], "wrong_generation"),
            ([sealed(encoded(Chunk, run, 0, 99, 9, 0, 0, 0, elements, {})), b"x" * 4000], "unknown_uid"),
            ([sealed(encoded(Chunk, run, 0, 1, 9, 0, 0, 0, 1 << 40, {})), b"x" * 4000], "wrong_shape"),
            ([sealed(encoded(Chunk, run, 0, 1, 9, 0, 5, 0, elements, {})), b"x" * 4000], "wrong_shape"),
            ([sealed(codec.encode(chunk)), b"x" * 3999], "wrong_size"),
            ([sealed(codec.encode(chunk), kind=framing.XXH3), b"x" * 4000], "checksum_mismatch"),
            ([sealed(codec.encode(chunk), 1 << 40), b"x" * 4000], "sequence_jump"),
            ([sealed(codec.encode(chunk), body=b"x" * 3999)], "wrong_size"),
            ([sealed(codec.encode(chunk), kind=framing.XXH3, body=b"x" * 4000)], "checksum_mismatch"),
            ([sealed(codec.encode(chunk), body=b"x" * 4000), b"x" * 4000], "malformed_multipart"),
            ([sealed(codec.encode(chunk), body=b"")], "wrong_size"),
            ([with_header_bytes(sealed(codec.encode(chunk)), 0xFFFF)], "malformed_header"),
            ([with_header_bytes(sealed(codec.encode(chunk), body=b"x" * 4000), 3)], "malformed_header"),
            ([with_header_bytes(sealed(codec.encode(chunk), body=b"x" * 4000), 300)], "malformed_header"),
            ([with_header_bytes(sealed(codec.encode(chunk)), 1), b"x" * 4000], "malformed_multipart"),
            ([sealed(encoded(Stop, run, 0, 1), body=b"")], "wrong_plane"),
            ([sealed(encoded(Probe, run, 0, 1, 1, 3), 0, body=b"x")], "wrong_plane"),
            ([sealed(encoded(Stop, run, 0, 1)), b""], "wrong_plane"),
            ([sealed(encoded(Probe, run, 0, 1, 0, 3), 0)], "wrong_plane"),
        ]
        for number, (frames, _) in enumerate(bad):
            first = frames[0].replace(FAR_AHEAD, (5_000 + number).to_bytes(8, "little"))
            dealers[1].send_multipart([first, *frames[1:]])
        dealers[0].send(b"\xc1 nonsense")
        dealers[0].send(sealed(encoded(Stop, b"elsewher", 0, 1)))
        dealers[0].send(sealed(encoded(Key, run, 0, 1, bytes(16), bytes(32)), 60_000))
        dealers[0].send(sealed(encoded(Ack, run, 0, 1, 1, 1 << 40, b"", 0, 0), 0))
        dealers[0].send(sealed(codec.encode(chunk), body=b"x" * 4000))
        dealers[0].send(sealed(encoded(Stop, run, 0, 1), body=b"x"))
        dealers[0].send_multipart([sealed(codec.encode(chunk)), b"x" * 4000])
        for _ in range(20):
            dealers[0].send(sealed(encoded(Hello, run, 0, 1, PROTOCOL_VERSION, "d", 3, ""), 0))
        bad += [([], reason) for reason in ("malformed_header", "wrong_run", "sequence_jump", "wrong_acknowledgement",
                                            "wrong_plane", "wrong_plane", "malformed_multipart")]  # fmt: skip
        gossip(made, elements, torch.float32, 5)
        wanted = Counter(reason for _, reason in bad)
        wanted_beside = Counter(hello_flood=1, handshake_failed=2)
        wait_until(lambda: counted(victim) >= wanted and Counter(victim.counters.faults) >= wanted_beside,
                   lambda: victim.counters.faults)  # fmt: skip
        assert counted(victim) == wanted and not victim.stopping, victim.counters.faults
        for dealer in dealers:
            # More than a frame may be: the connection is cut. It is the last part of its message, since libzmq 4.3.5
            # aborts its own process where a socket is closed with half a message under way as its peer cuts.
            dealer.send_multipart([b"", b"x" * (64 << 20)])
        gossip([*made], elements, torch.float32, 0)
        context.destroy(linger=0)


def test_replayed_rounds_are_stale() -> None:
    with nodes("tcp", 2, flat_schema(8)) as made:
        gossip(made, 8, torch.float32, 4)
        victim = made[0]
        assert isinstance(victim, ZeroMQ)
        victim._inbox.advance(4)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(victim._local[1])
            for round in (0, 3):
                header = encoded(Chunk, victim.run_id, 0, 1, round, 0, 0, 0, 8, {})
                dealer.send_multipart([sealed(header, 5_000 + round), bytes(32)])
            wait_until(lambda: victim.counters.faults.get("stale_round", 0) >= 2, lambda: victim.counters.faults)
        exchange = victim.exchange(4, {1: Payload({"x": torch.ones(8)})}, ())
        assert not exchange.missing
