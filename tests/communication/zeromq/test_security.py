"""Keys and credentials: only nodes of the run are admitted, and each only under its own identity."""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq

from decentnode.clock import now
from decentnode.communication.base import Communication
from decentnode.communication.parts import TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.credentials import LOGIN_DIGITS, BulkCredential
from decentnode.communication.zeromq.sockets.security import (
    Keyring,
    load_keyring,
)
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import AssemblyError
from decentnode.wire import codec, framing
from decentnode.wire.messages import Chunk, Stop
from tests.communication.contract import flat_schema, gossip, make_nodes, open_nodes, run_on_all
from tests.communication.test_faults import exchange_once
from tests.conftest import wait_until


def dealer(context: zmq.Context, address: str, keys: tuple[bytes, bytes] | None, server: bytes) -> zmq.Socket:
    """Returns a socket connected to `address`, with CURVE if `keys` (public, secret) are given. server: its key."""
    connected = context.socket(zmq.DEALER)
    connected.linger = 0
    if keys is not None:
        connected.curve_publickey, connected.curve_secretkey = keys
        connected.curve_serverkey = server
    connected.connect(address)
    return connected


@pytest.mark.parametrize("bulk", ["curve", "aes-gcm"])
def test_strangers_are_refused_and_no_node_can_send_in_the_name_of_another(bulk: str, tmp_path: Path) -> None:
    nodes = make_nodes(f"tcp+{bulk}", 3, flat_schema(8), tmp_path)
    context = zmq.Context()
    try:
        addresses = {node.uid: node.bind() for node in nodes}
        for node in nodes:
            node.set_peers(addresses)
        run_on_all(nodes, lambda node: node.start(60))
        victim, ring = nodes[0], load_keyring(tmp_path / "keys", 2, 3)
        stop = framing.sealed(1 << 14, codec.encode(Stop(victim.run_id, 0, 1)), framing.NONE, 0)
        strangers = [
            dealer(context, victim._local[0], None, b""),  # without encryption
            dealer(context, victim._local[0], zmq.curve_keypair(), ring.public[0]),  # with an unknown key
            dealer(context, victim._local[0], zmq.curve_keypair(), zmq.curve_keypair()[0]),  # with a wrong server key
            dealer(context, victim._local[1], None, b""),
        ]
        for stranger in strangers:
            with suppress(zmq.Again):  # a connection that is already refused has no queue
                stranger.send(stop, zmq.NOBLOCK)
                stranger.send_multipart([stop, b"x"] * 500, zmq.NOBLOCK)
        insider = dealer(context, victim._local[0], (ring.public[2], ring.secret), ring.public[0])
        insider.send(stop)  # node 2 sends a stop in the name of node 1
        gossip(nodes, 8, torch.float32, 3)
        expected = {"stranger", "handshake_failed", "wrong_identity"}
        wait_until(lambda: expected <= victim.counters.faults.keys(), lambda: victim.counters.faults)
        assert not victim.stopping
        assert not {"wrong_run", "malformed_header", "malformed_multipart"} & victim.counters.faults.keys()
    finally:
        context.destroy(linger=0)
        for node in nodes:
            node.close()


def test_bulk_messages_that_are_not_encrypted_are_refused(tmp_path: Path) -> None:
    with open_nodes("tcp+aes-gcm", 2, flat_schema(8)) as nodes, zmq.Context() as context:
        gossip(nodes, 8, torch.float32, 2)
        victim = nodes[0]
        assert isinstance(victim, ZeroMQ)
        credential = victim._links.access.given[1]
        insider = BulkCredential(credential.token, credential.key, credential.logins)
        with context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.plain_username, plain.plain_password = b"1", insider.log_in()
            plain.connect(victim._local[1])
            header = codec.encode(Chunk(victim.run_id, 0, 1, 5, 0, 0, 0, 8, {}))
            plain.send_multipart([framing.sealed(50, header, framing.NONE, 0), bytes(32)])
            plain.send_multipart([framing.sealed(50, header, framing.AES_GCM, 0), bytes(48)])
            plain.send(framing.sealed(50, header, framing.NONE, 0, bytes(32)))
            checksum = framing.compute_body_checksum(framing.XXH3, bytes(32))
            plain.send(framing.sealed(50, header, framing.XXH3, checksum, bytes(32)))
            plain.send(framing.sealed(50, header, framing.AES_GCM, 0, bytes(48)))
            plain.send(framing.sealed(50, header, framing.AES_GCM, 0, b""))
            wait_until(lambda: sum(victim.counters.faults.values()) >= 6, lambda: victim.counters.faults)
        assert victim.counters.faults == {"not_encrypted": 3, "checksum_mismatch": 3}


def remake_with_keyring(node: ZeroMQ, public: dict[int, bytes], pair: tuple[bytes, bytes] | None = None) -> ZeroMQ:
    """Closes the node, and returns a new one in its place. public: keys of other nodes that differ from those in its
    keyring. pair: another key pair of its own: (public, secret)."""
    assert node._run.security is not None
    ring = node._run.security.keyring
    node.close()
    own, secret = pair or (ring.public[node.uid], ring.secret)
    return ZeroMQ(node.config, TransportParts(
        uid=node.uid, machine_of=node._run.machine_of, schemas=flat_schema(8), digest="d",
    ), Keyring(node.uid, secret, {**ring.public, node.uid: own, **public}))  # fmt: skip


def start_errors(nodes: list[ZeroMQ], refusals: dict[int, str], one_refusal: str = "") -> list[str]:
    """Starts nodes that cannot all join. Returns the error of each.

    refusals: a pattern of a reason that node 0, and each node that cannot join it, finds. one_refusal: a pattern of a
    reason that at least one of them finds. The time-out is simulated: node 0 gives up once all these reasons are known,
    and the nodes that cannot join once all others have been told by node 0.
    """
    errors: dict[int, str] = {}
    try:
        addresses = {node.uid: node.bind() for node in nodes}
        for node in nodes:
            node.set_peers(addresses)

        def run(node: Communication) -> None:
            with pytest.raises(AssemblyError) as caught:
                node.start(1000)
            errors[node.uid] = str(caught.value)

        def let_nodes_give_up() -> None:
            outside = [nodes[uid] for uid in refusals if uid]
            wait_until(lambda: all(_has_refusal(nodes[uid], pattern) for uid, pattern in refusals.items())
                       and any(_has_refusal(nodes[uid], one_refusal) for uid in refusals)
                       and len(nodes[0].absent) == len(outside), lambda: [node.refusals for node in nodes])  # fmt: skip
            nodes[0]._io.call(lambda: nodes[0]._protocol.give_up(now()))
            wait_until(lambda: len(errors) == len(nodes) - len(outside), lambda: f"only {errors.keys()} were told")
            for node in outside:
                node._io.call(functools.partial(node._protocol.give_up, now()))

        thread = threading.Thread(target=let_nodes_give_up)
        thread.start()
        run_on_all(nodes, run, 200)
        thread.join()
        return [errors[node.uid] for node in nodes]
    finally:
        for node in nodes:
            node.close()


def _has_refusal(node: ZeroMQ, pattern: str) -> bool:
    return any(re.search(pattern, reason) for reason in node.refusals.values())


def test_a_node_with_a_key_that_is_not_authorized_cannot_join(tmp_path: Path) -> None:
    nodes = make_nodes("tcp+curve", 2, flat_schema(8), tmp_path)
    pair = zmq.curve_keypair()
    nodes[1] = remake_with_keyring(nodes[1], {}, pair)
    key = re.escape(pair[0].decode())
    refusals = {
        0: rf"node 1 \(127.0.0.1:\d+\) came from 127.0.0.1 with key {key}, which is not in the public.keys of node 0",
        1: r"node 0 \(127.0.0.1:\d+\) does not have the key of node 1 in its public.keys",
    }
    errors = start_errors(nodes, refusals)
    assert nodes[0].counters.faults["stranger"] >= 1
    assert "1 of 2 nodes did not join in time: node 1" in errors[0]
    assert all(re.search(pattern, errors[uid]) for uid, pattern in refusals.items()), errors


def test_both_sides_report_that_a_node_has_another_key_for_its_parent(tmp_path: Path) -> None:
    """The public.keys of node 1 is older than the key of node 0."""
    nodes = make_nodes("tcp+curve", 2, flat_schema(8), tmp_path)
    nodes[1] = remake_with_keyring(nodes[1], {0: zmq.curve_keypair()[0]})
    refusals = {0: r"node 1 \(.*\) expects another key for node 0: the public.keys files differ",
             1: r"node 0 \(.*\) broke off the handshake: does its key differ from the one in this"}  # fmt: skip
    errors = start_errors(nodes, refusals)
    assert all(re.search(pattern, errors[uid]) for uid, pattern in refusals.items()), errors


@pytest.mark.parametrize("without_keys", [0, 1])
def test_both_sides_report_that_one_of_them_has_no_keys(without_keys: int, tmp_path: Path) -> None:
    nodes = make_nodes("tcp+curve", 2, flat_schema(8), tmp_path)
    nodes[without_keys].close()
    nodes[without_keys] = ZeroMQ(ZeroMQConfig(name="zeromq"), TransportParts(
        uid=without_keys, machine_of={0: 0, 1: 0}, digest="d", schemas=flat_schema(8),
    ))  # fmt: skip
    refusals = {0: r"node 1 \(.*(communication.security differ)",
             1: r"node 0 \(.*(communication.security differs|other security)"}  # fmt: skip
    reason = "communication.security differs"
    errors = start_errors(nodes, refusals, one_refusal=reason)
    assert all(re.search(pattern, errors[uid]) for uid, pattern in refusals.items()), errors
    assert reason in "".join(errors), "neither side names the reason"


def test_the_root_and_all_waiting_nodes_are_told_of_a_handshake_refused_elsewhere(tmp_path: Path) -> None:
    """Node 9 connects only to node 1, which reports the refusal up the tree; the root tells the waiting nodes."""
    nodes = make_nodes("tcp+curve", 10, flat_schema(8), tmp_path)
    nodes[9] = remake_with_keyring(nodes[9], {}, zmq.curve_keypair())
    everywhere = "node 9 .*which is not in the public.keys of node 1"
    at_node_9 = r"node 1 \(.*\) does not have the key of node 9"
    errors = start_errors(nodes, {0: everywhere, 9: at_node_9})
    assert all(re.search(everywhere, error) for error in errors[:9]), errors
    assert re.search(at_node_9, errors[9])


def test_a_credential_is_good_for_one_login() -> None:
    giver = BulkCredential()
    taker = BulkCredential(giver.token, giver.key)
    first, second, third = (taker.log_in() for _ in range(3))
    assert len({first, second, third}) == 3
    assert all(giver.token.hex().encode() not in login for login in (first, second))
    assert giver.refusal(second) is None
    assert [giver.refusal(login) for login in (second, first)] == ["replayed_login"] * 2
    assert giver.refusal(third) is None and giver.refusal(third) == "replayed_login"
    fourth = taker.log_in()
    renumbered = b"%0*x" % (LOGIN_DIGITS, 9) + fourth[LOGIN_DIGITS:]
    for forged in (b"", fourth[:-1], fourth + b"0", renumbered, fourth.upper(), b"-" + fourth[1:], b"\xff" * 80,
                  BulkCredential().log_in(), fourth[:LOGIN_DIGITS] + bytes(64)):  # fmt: skip
        assert giver.refusal(forged) == "stranger"
    assert giver.refusal(fourth) is None, "a forged login used up the real one"


class Eavesdropper:
    """A TCP proxy to a port of this host that records the bytes that every client sends."""

    def __init__(self, port: int) -> None:
        self.recorded: list[bytearray] = []
        """By connection, the bytes of the client."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self._target_port = self._server.getsockname()[1], port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                target = socket.create_connection(("127.0.0.1", self._target_port))
                self.recorded.append(bytearray())
                threading.Thread(target=self._forward, args=(client, target, self.recorded[-1]), daemon=True).start()
                threading.Thread(target=self._forward, args=(target, client, None), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket, recorded: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if recorded is not None:
                    recorded += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def logins(self) -> list[tuple[bytes, bytes]]:
        """Returns (user name, password) of all connections, as PLAIN sends them (ZeroMQ RFC 24)."""
        logins = []
        for recorded in map(bytes, self.recorded):
            _, command, rest = recorded.partition(b"\x05HELLO")
            if command:
                name, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
                logins.append((name, rest[1 : 1 + rest[0]]))
        return logins

    def close(self) -> None:
        self._server.close()


@pytest.mark.parametrize("bulk", ["none", "aes-gcm"])
def test_a_recorded_login_cannot_be_used_again(bulk: str, tmp_path: Path) -> None:
    nodes = make_nodes(f"tcp+{bulk}", 2, flat_schema(8), tmp_path)
    addresses = {node.uid: node.bind() for node in nodes}
    victim = nodes[0]
    eavesdropper = Eavesdropper(int(victim._local[1].rpartition(":")[2]))
    addresses[0] = (addresses[0][0], f"tcp://127.0.0.1:{eavesdropper.port}")
    with zmq.Context() as context:
        try:
            for node in nodes:
                node.set_peers(addresses)
            run_on_all(nodes, lambda node: node.start(60))
            gossip(nodes, 8, torch.float32, 2)
            ((name, password),) = eavesdropper.logins()
            assert name == b"1" and len(password) == LOGIN_DIGITS + 64
            token, key = victim._links.access.given[1].token, victim._links.access.given[1].key
            recorded = b"".join(map(bytes, eavesdropper.recorded))
            assert not any(secret in recorded or secret.hex().encode() in recorded for secret in (token, key))
            with context.socket(zmq.DEALER) as thief:
                thief.linger = 0
                thief.plain_username, thief.plain_password = name, password
                thief.connect(victim._local[1])
                with suppress(zmq.Again):
                    thief.send(b"let me in", zmq.NOBLOCK)
                wait_until(lambda: victim.counters.faults.get("replayed_login"), lambda: victim.counters.faults)
            exchange_once(nodes, 8, 2)
            assert victim.counters.faults["replayed_login"] == 1
            assert victim.counters.faults.keys() <= {"replayed_login", "handshake_failed"}
        finally:
            for node in nodes:
                node.close()
            eavesdropper.close()


def test_secrets_appear_in_no_log_event_or_repr(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    with caplog.at_level("DEBUG"), open_nodes("tcp+aes-gcm", 2, flat_schema(8)) as nodes:
        for node in nodes:
            node.counters.on_event = lambda kind, peer, detail: events.append(f"{kind} {peer} {detail}")
        gossip(nodes, 8, torch.float32, 2)
        secrets = [node._run.security.keyring.secret.decode() for node in nodes]  # type: ignore[attr-defined]
        secrets += [credential.key.hex() for node in nodes for credential in node._links.access.given.values()]  # type: ignore[attr-defined]
        shown = repr([node._links.access.given for node in nodes]) + repr(nodes) + caplog.text + "".join(events)  # type: ignore[attr-defined]
    assert len(secrets) == 4 and not any(secret in shown for secret in secrets)


@pytest.mark.skipif(os.geteuid() != 0 and not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_gossip_over_shared_memory_with_keys_gives_the_same_bits(tmp_path: Path) -> None:
    with open_nodes("shared_memory+curve", 3, flat_schema(1000)) as nodes:
        models = gossip(nodes, 1000, torch.float32, 3)
    with open_nodes("inproc", 3, flat_schema(1000)) as twins:
        assert all(torch.equal(a, b) for a, b in zip(models, gossip(twins, 1000, torch.float32, 3), strict=True))
