"""Nodes that cannot join: the reason is reported on both sides."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from decentnode.clock import now
from decentnode.communication.parts import BindPlan, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.sockets.security import load_keyring, write_keys
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import AssemblyError, PeerLost
from decentnode.mapping import hosts
from decentnode.wire.generation import Limits
from tests.communication.contract import flat_schema, run_on_all
from tests.conftest import free_ports, wait_until


def make_node(
    uid: int, n: int, digest: str = "d", keys: Path | None = None, limits: Limits | None = None,
    again: tuple[str, ...] = (), **options: object,
) -> ZeroMQ:
    """Returns a node that is not bound. again: the addresses at which the node listened before."""
    options |= {} if keys is None else {"keys": keys, "bulk_security": "curve"}
    config = ZeroMQConfig.model_validate({"name": "zeromq", "suspect_seconds": 2, **options})
    return ZeroMQ(config, TransportParts(
        uid=uid, machine_of=dict.fromkeys(range(n), 0), schemas=flat_schema(8), digest=digest,
        bind=BindPlan(None, again=again), limits=limits,
    ), None if keys is None else load_keyring(keys, uid, n))  # fmt: skip


def test_both_sides_report_a_join_with_another_config() -> None:
    limits = Limits(20.0, 60.0, 2)
    nodes = [make_node(uid, 3, limits=limits) for uid in range(3)]
    events: list[tuple[str, str]] = []
    nodes[0].counters.on_event = lambda kind, _peer, detail: events.append((kind, detail))
    try:
        addresses = {node.uid: node.bind() for node in nodes}
        for node in nodes:
            node.set_peers(addresses)
        run_on_all(nodes, lambda node: node.start(60))
        nodes.pop().close()
        joiner = make_node(2, 3, "another", limits=limits, again=addresses[2])
        nodes.append(joiner)
        joiner.bind()
        joiner.set_peers(addresses)
        joiner.join()
        with pytest.raises(AssemblyError, match=r"node 2 was refused by node \d .*: node 2 .* another config or graph"):
            joiner.regroup().wait()
        wait_until(  # the request may reach node 0 after node 1 has refused it, which ends the joiner's wait
            lambda: any(kind == "wrong_config" and "node 2" in detail and "another" in detail
                        for kind, detail in events),
            lambda: f"node 0 has no event of the refusal: {events}",
        )  # fmt: skip
    finally:
        for node in nodes:
            node.close()


def test_joining_a_run_that_has_ended_fails_because_no_member_answers() -> None:
    joiner = make_node(2, 3, limits=Limits(20.0, 60.0, 2), start_timeout_seconds=0.3)
    try:
        joiner.set_peers({uid: (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
                          for uid, port in zip((0, 1), (free_ports(2), free_ports(2)), strict=True)})  # fmt: skip
        joiner.bind()
        joiner.join()
        with pytest.raises(PeerLost, match=r"outside; no member of the run answers, asked node 0.*, node 1"):
            joiner.regroup().wait()
    finally:
        joiner.close()


def test_the_time_out_of_a_start_mentions_refused_handshakes(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_keys(tmp_path / name, range(2))
    nodes = [make_node(0, 2, keys=tmp_path / "ours"), make_node(1, 2, keys=tmp_path / "theirs")]
    try:
        addresses = {node.uid: node.bind() for node in nodes}
        for node in nodes:
            node.set_peers(addresses)
        nodes[1]._io.start()

        def give_up_after_a_refused_handshake() -> None:
            wait_until(nodes[0].counters.refused_handshakes)
            nodes[0]._io.call(lambda: nodes[0]._protocol.give_up(now()))

        thread = threading.Thread(target=give_up_after_a_refused_handshake)
        thread.start()
        with pytest.raises(AssemblyError, match=r"did not join in time: node 1.*; refused here: \d+ handshakes"):
            nodes[0].start(1000)
        thread.join()
    finally:
        for node in nodes:
            node.close()


def test_the_time_out_of_a_start_names_the_addresses_of_a_name_of_which_only_the_first_is_tried(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "resolved", lambda _: ["192.0.2.1", "127.0.0.1"])
    node = make_node(1, 2)
    try:
        node.set_peers({0: ("tcp://localhost:1", "tcp://localhost:1"), 1: node.bind()})
        thread = threading.Thread(target=lambda: (wait_until(lambda: bool(node._io.peers.senders)),
                                                  node._io.call(lambda: node._protocol.give_up(now()))))  # fmt: skip
        thread.start()
        said = r"no answer from node 0.*; of the addresses of localhost \(192.0.2.1, 127.0.0.1\) only the first is"
        with pytest.raises(AssemblyError, match=said):
            node.start(1000)
        thread.join()
    finally:
        node.close()
