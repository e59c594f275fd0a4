"""Who cannot be let in is told why, on both sides: another config, other keys."""

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
from decentnode.wire.generation import Limits
from tests.communication.contract import flat_schema, together
from tests.conftest import free_ports, wait_until


def make(
    uid: int, n: int, digest: str = "d", keys: Path | None = None, limits: Limits | None = None,
    again: tuple[str, ...] = (), **options: object,
) -> ZeroMQ:
    """again: where the node listened before."""
    options |= {} if keys is None else {"keys": keys, "bulk_security": "curve"}
    config = ZeroMQConfig.model_validate({"name": "zeromq", "suspect_seconds": 2, **options})
    return ZeroMQ(config, TransportParts(
        uid=uid, machine_of=dict.fromkeys(range(n), 0), schemas=flat_schema(8), digest=digest,
        bind=BindPlan(None, again=again), limits=limits,
    ), None if keys is None else load_keyring(keys, uid, n))  # fmt: skip


def test_a_join_with_another_config_is_told_on_both_sides_by_name() -> None:
    limits = Limits(20.0, 60.0, 2)
    made = [make(uid, 3, limits=limits) for uid in range(3)]
    told: list[tuple[str, str]] = []
    made[0].counters.on_event = lambda kind, _peer, detail: told.append((kind, detail))
    try:
        addresses = {node.uid: node.bind() for node in made}
        for node in made:
            node.set_peers(addresses)
        together(made, lambda node: node.start(60))
        made.pop().close()
        joiner = make(2, 3, "another", limits=limits, again=addresses[2])
        made.append(joiner)
        joiner.bind()
        joiner.set_peers(addresses)
        joiner.join()
        with pytest.raises(AssemblyError, match=r"node 2 was refused by node \d .*: node 2 .* another config or graph"):
            joiner.regroup().wait()
        wait_until(  # node 0 may hear of it after node 1, whose refusal is enough for the joiner
            lambda: any(kind == "wrong_config" and "node 2" in detail and "another" in detail for kind, detail in told),
            lambda: f"node 0 has no event of it: {told}",
        )
    finally:
        for node in made:
            node.close()


def test_who_joins_a_run_that_is_over_is_told_that_nobody_answers() -> None:
    joiner = make(2, 3, limits=Limits(20.0, 60.0, 2), start_timeout_seconds=0.3)
    try:
        joiner.set_peers({uid: (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
                          for uid, port in zip((0, 1), (free_ports(2), free_ports(2)), strict=True)})  # fmt: skip
        joiner.bind()
        joiner.join()
        with pytest.raises(PeerLost, match=r"outside; no member of the run answers, asked node 0.*, node 1"):
            joiner.regroup().wait()
    finally:
        joiner.close()


def test_the_time_out_of_a_start_names_handshakes_that_were_refused(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_keys(tmp_path / name, range(2))
    made = [make(0, 2, keys=tmp_path / "ours"), make(1, 2, keys=tmp_path / "theirs")]
    try:
        addresses = {node.uid: node.bind() for node in made}
        for node in made:
            node.set_peers(addresses)
        made[1]._io.start()

        def time_is_over() -> None:
            wait_until(made[0].counters.refused_handshakes)
            made[0]._io.call(lambda: made[0]._protocol.give_up(now()))

        clock = threading.Thread(target=time_is_over)
        clock.start()
        with pytest.raises(AssemblyError, match=r"did not join in time: node 1.*; refused here: \d+ handshakes"):
            made[0].start(1000)
        clock.join()
    finally:
        for node in made:
            node.close()
