"""Nodes to which nobody can connect: what is sent to them goes through relays, over real sockets."""

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
from tests.communication.contract import connected, flat_schema, gossip, nodes, together, values
from tests.conftest import free_ports, wait_until

ELEMENTS = 100_000
HIDDEN = (2, 3)
NOWHERE = "127.0.0.77"
"""An address of this host at which nothing listens: there a hidden node is said to be."""


def made(folder: Path, bulk: str = "", limits: Limits | None = None) -> list[ZeroMQ]:
    """Nodes 0 and 1, which all others reach, and 2 and 3, which nobody does; each on a machine of its own."""
    options: dict[str, object] = {"start_timeout_seconds": 40}
    if bulk:
        write_keys(folder / "keys", range(4))
        options |= {"keys": folder / "keys", "bulk_security": bulk}
    config = ZeroMQConfig.model_validate({"name": "zeromq", **options})
    return [ZeroMQ(config, TransportParts(
        uid=uid, machine_of={each: each for each in range(4)}, schemas=flat_schema(ELEMENTS), digest="d",
        bind=BindPlan(None, host="127.0.0.1", port=free_ports(2)), relayed=HIDDEN, limits=limits,
    ), load_keyring(folder / "keys", uid, 4) if bulk else None)
            for uid in range(4)]  # fmt: skip


@contextmanager
def started(run: Sequence[ZeroMQ]) -> Iterator[None]:
    try:
        places: dict[int, Endpoints] = {node.uid: node.bind() for node in run}
        for uid in HIDDEN:
            places[uid] = (f"tcp://{NOWHERE}:9", f"tcp://{NOWHERE}:10")
        for node in run:
            node.set_peers(places)
        together(run, lambda node: node.start(60))
        yield
    finally:
        together(run, lambda node: node.close())


def expected(rounds: int) -> list[torch.Tensor]:
    with nodes("inproc", 4, flat_schema(ELEMENTS)) as twins, connected(twins):
        return gossip(twins, ELEMENTS, torch.float32, rounds)


@pytest.mark.parametrize("bulk", ["", "curve", "aes-gcm", "none"])
def test_hidden_nodes_take_part_with_the_same_bits(tmp_path: Path, bulk: str) -> None:
    run = made(tmp_path, bulk)
    with started(run):
        found = gossip(run, ELEMENTS, torch.float32, 3)
        together(run, lambda node: node.barrier("over", 30))
        assert all(not node.counters.faults for node in run), [node.counters.faults for node in run]
        relayed = [node.counters.relayed_bytes for node in run]
    assert all(torch.equal(a, b) for a, b in zip(found, expected(3), strict=True))
    # 1 -> 2, 2 -> 3, 3 -> 2 and 0 -> 3 in each round
    assert sum(relayed[:2]) > 3 * 4 * 4 * ELEMENTS and min(relayed[:2]) > 0 and relayed[2:] == [0, 0]


@pytest.mark.slow
def test_where_a_relay_gives_up_another_takes_its_place(tmp_path: Path) -> None:
    run, rounds = made(tmp_path, "curve"), 30
    with started(run):
        relayed, gone = run[0]._io.listening.relayed, threading.Event()
        assert relayed is not None
        hub = relayed.hub

        def give_up() -> None:
            hub._known = lambda _identity: False  # as if this process were another one, of another run
            for route in list(hub._connections):
                hub.disconnect(route)
            gone.set()

        def work(uid: int, round: int) -> None:
            if (uid, round) == (0, 5):
                run[0]._io.call(give_up)
                assert gone.wait(30)

        found = gossip(run, ELEMENTS, torch.float32, rounds, work)
        together(run, lambda node: node.barrier("over", 30))
        assert not hub._connections
    assert all(torch.equal(a, b) for a, b in zip(found, expected(rounds), strict=True))


class Eavesdropper(RelayHub):
    """Keeps what it passes on, and changes some of it."""

    def __init__(self, known: Callable[[bytes], bool]) -> None:
        super().__init__(known)
        self.kept = bytearray()
        self.change = 0
        """How many more frames are changed."""

    def _send(self, route: bytes, frame: Frame) -> None:
        if frame.kind == DATA:
            self.kept += frame.body
            if self.change and len(frame.body) > 10_000:
                self.change -= 1
                body = bytearray(frame.body)
                body[5000] ^= 1
                frame = Frame(frame.kind, frame.stream, frame.plane, frame.number, bytes(body))
        super()._send(route, frame)


@pytest.mark.parametrize(("bulk", "readable"), [
    ("", True), ("none", True), ("aes-gcm", False),
    pytest.param("curve", False, marks=pytest.mark.slow),  # what was changed costs the connection, and 5 s until resent
])  # fmt: skip
def test_with_keys_a_relay_reads_no_model_and_changes_nothing_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bulk: str, readable: bool
) -> None:
    monkeypatch.setattr(relays, "RelayHub", Eavesdropper)
    run = made(tmp_path, bulk)
    with started(run):
        hubs = [relayed.hub for node in run[:2] if (relayed := node._io.listening.relayed) is not None]
        for hub in hubs:
            assert isinstance(hub, Eavesdropper)
            hub.change = 0 if bulk == "none" else 1  # without any protection nobody would notice
        found = gossip(run, ELEMENTS, torch.float32, 2)
        together(run, lambda node: node.barrier("over", 30))
        kept = b"".join(bytes(hub.kept) for hub in hubs if isinstance(hub, Eavesdropper))
    model = values(ELEMENTS, torch.float32, 1).numpy().tobytes()  # of node 1, for node 2
    assert (model[4000:4400] in kept) is readable
    assert all(torch.equal(a, b) for a, b in zip(found, expected(2), strict=True))


def test_who_is_reached_through_a_relay_that_dies_is_not_left_out_with_it(tmp_path: Path) -> None:
    run = made(tmp_path, limits=Limits(5.0, 60.0, 2))
    with started(run):
        dead, left = run[0], run[1:]
        together(run, lambda node: node.barrier("all there", 30))
        dead._links.goodbye = lambda _now: None  # type: ignore[method-assign]
        dead._closed = True
        dead._io.close(0.0)
        dead._relays.close()
        left[0].suspect([0], "it died")
        found: dict[int, tuple[int, ...]] = {}

        def enter(node: ZeroMQ) -> None:
            wait_until(lambda: bool(node._status.regrouping))
            found[node.uid] = node.regroup().wait().members
            node.barrier("without it", 30)

        together(left, enter)  # type: ignore[arg-type]
        assert found == dict.fromkeys((1, 2, 3), (1, 2, 3))
        assert left[0].counters.relayed_bytes > 0
