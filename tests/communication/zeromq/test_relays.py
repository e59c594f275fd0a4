"""Nodes to which no other node can connect: messages to them go through relays, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from decentnode.communication.parts import BindPlan, Endpoints, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.relays import relays
from decentnode.communication.zeromq.sockets.security import load_keyring, write_keys
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.wire.generation import Limits
from decentnode.wire.relay import DATA, Frame, RelayHub
from tests.communication.contract import connected, flat_schema, gossip, open_nodes, random_values, run_on_all
from tests.conftest import free_ports, wait_until

ELEMENTS = 100_000
HIDDEN = (2, 3)
"""Nodes to which no other node can connect."""
UNREACHABLE = "127.0.0.77"
"""An address of this host at which nothing listens; it is given as the address of hidden nodes."""


def make_nodes(folder: Path, bulk: str = "", limits: Limits | None = None) -> list[ZeroMQ]:
    """Returns nodes 0 and 1, which all others can reach, and the hidden nodes 2 and 3, each on a machine of its own."""
    options: dict[str, object] = {"start_timeout_seconds": 40}
    if bulk:
        write_keys(folder / "keys", range(4))
        options |= {"keys": folder / "keys", "bulk_security": bulk}
    config = ZeroMQConfig.model_validate({"name": "zeromq", **options})
    return [ZeroMQ(config, TransportParts(
        uid=uid, machine_of={machine: machine for machine in range(4)}, schemas=flat_schema(ELEMENTS), digest="d",
        bind=BindPlan(None, host="127.0.0.1", port=free_ports(2)), relayed=HIDDEN, limits=limits,
    ), load_keyring(folder / "keys", uid, 4) if bulk else None)
            for uid in range(4)]  # fmt: skip


@contextmanager
def started(nodes: Sequence[ZeroMQ]) -> Iterator[None]:
    """Starts the nodes, and closes them at the end."""
    try:
        endpoints: dict[int, Endpoints] = {node.uid: node.bind() for node in nodes}
        for uid in HIDDEN:
            endpoints[uid] = (f"tcp://{UNREACHABLE}:9", f"tcp://{UNREACHABLE}:10")
        for node in nodes:
            node.set_peers(endpoints)
        run_on_all(nodes, lambda node: node.start(60))
        yield
    finally:
        run_on_all(nodes, lambda node: node.close())


def expected_models(rounds: int) -> list[torch.Tensor]:
    """Returns the models after rounds of gossip over the in-process transport."""
    with open_nodes("inproc", 4, flat_schema(ELEMENTS)) as twins, connected(twins):
        return gossip(twins, ELEMENTS, torch.float32, rounds)


@pytest.mark.parametrize("bulk", ["", "curve", "aes-gcm", "none"])
def test_gossip_with_hidden_nodes_gives_the_same_bits(tmp_path: Path, bulk: str) -> None:
    nodes = make_nodes(tmp_path, bulk)
    with started(nodes):
        models = gossip(nodes, ELEMENTS, torch.float32, 3)
        run_on_all(nodes, lambda node: node.barrier("over", 30))
        assert all(not node.counters.faults for node in nodes), [node.counters.faults for node in nodes]
        relayed = [node.counters.relayed_bytes for node in nodes]
    assert all(torch.equal(a, b) for a, b in zip(models, expected_models(3), strict=True))
    # 1 -> 2, 2 -> 3, 3 -> 2 and 0 -> 3 in each round
    assert sum(relayed[:2]) > 3 * 4 * 4 * ELEMENTS and min(relayed[:2]) > 0 and relayed[2:] == [0, 0]


@pytest.mark.slow
def test_another_relay_replaces_one_that_no_longer_serves_its_nodes(tmp_path: Path) -> None:
    nodes, rounds = make_nodes(tmp_path, "curve"), 30
    with started(nodes):
        relayed, stopped = nodes[0]._io.listening.relayed, threading.Event()
        assert relayed is not None
        hub = relayed.hub

        def stop_serving() -> None:
            hub._known = lambda _identity: False  # as if a process of another run had this address
            for route in list(hub._connections):
                hub.disconnect(route)
            stopped.set()

        def before_round(uid: int, round: int) -> None:
            if (uid, round) == (0, 5):
                nodes[0]._io.call(stop_serving)
                assert stopped.wait(30)

        models = gossip(nodes, ELEMENTS, torch.float32, rounds, before_round)
        run_on_all(nodes, lambda node: node.barrier("over", 30))
        assert not hub._connections
    assert all(torch.equal(a, b) for a, b in zip(models, expected_models(rounds), strict=True))


class MaliciousHub(RelayHub):
    """A relay that records the bytes that it forwards, and changes some of them."""

    def __init__(self, known: Callable[[bytes], bool]) -> None:
        super().__init__(known)
        self.recorded = bytearray()
        self.num_to_change = 0
        """How many more frames it will change."""

    def _send(self, route: bytes, frame: Frame) -> None:
        if frame.kind == DATA:
            self.recorded += frame.body
            if self.num_to_change and len(frame.body) > 10_000:
                self.num_to_change -= 1
                body = bytearray(frame.body)
                body[5000] ^= 1
                frame = Frame(frame.kind, frame.stream, frame.plane, frame.number, bytes(body))
        super()._send(route, frame)


@pytest.mark.parametrize(("bulk", "readable"), [
    ("", True), ("none", True), ("aes-gcm", False),
    pytest.param("curve", False, marks=pytest.mark.slow),  # a change breaks the connection: 5 s until resent
])  # fmt: skip
def test_a_malicious_relay_cannot_change_models_nor_with_encryption_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bulk: str, readable: bool
) -> None:
    monkeypatch.setattr(relays, "RelayHub", MaliciousHub)
    nodes = make_nodes(tmp_path, bulk)
    with started(nodes):
        hubs = [relayed.hub for node in nodes[:2] if (relayed := node._io.listening.relayed) is not None]
        for hub in hubs:
            assert isinstance(hub, MaliciousHub)
            hub.num_to_change = 0 if bulk == "none" else 1  # "none" has no checksum that would detect a change
        models = gossip(nodes, ELEMENTS, torch.float32, 2)
        run_on_all(nodes, lambda node: node.barrier("over", 30))
        recorded = b"".join(bytes(hub.recorded) for hub in hubs if isinstance(hub, MaliciousHub))
    model = random_values(ELEMENTS, torch.float32, 1).numpy().tobytes()  # node 1 sends it to node 2
    assert (model[4000:4400] in recorded) is readable
    assert all(torch.equal(a, b) for a, b in zip(models, expected_models(2), strict=True))


def test_nodes_reached_through_a_relay_that_dies_stay_members(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, limits=Limits(5.0, 60.0, 2))
    with started(nodes):
        dead, survivors = nodes[0], nodes[1:]
        run_on_all(nodes, lambda node: node.barrier("all there", 30))
        dead._links.goodbye = lambda _now: None  # type: ignore[method-assign]
        dead._closed = True
        dead._io.close(0.0)
        dead._relays.close()
        survivors[0].suspect([0], "it died")
        members: dict[int, tuple[int, ...]] = {}

        def enter_next_generation(node: ZeroMQ) -> None:
            wait_until(lambda: bool(node._run_state.regrouping))
            members[node.uid] = node.regroup().wait().members
            node.barrier("without it", 30)

        run_on_all(survivors, enter_next_generation)  # type: ignore[arg-type]
        assert members == dict.fromkeys((1, 2, 3), (1, 2, 3))
        assert survivors[0].counters.relayed_bytes > 0
