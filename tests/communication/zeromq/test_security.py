"""The allow-list, identity, and that strangers stay outside."""

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
from tests.communication.contract import flat_schema, gossip, make, nodes, together
from tests.communication.test_faults import one_round
from tests.conftest import wait_until


def dealer(context: zmq.Context, address: str, keys: tuple[bytes, bytes] | None, server: bytes) -> zmq.Socket:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    if keys is not None:
        made.curve_publickey, made.curve_secretkey = keys
        made.curve_serverkey = server
    made.connect(address)
    return made


@pytest.mark.parametrize("bulk", ["curve", "aes-gcm"])
def test_strangers_stay_outside_and_nobody_speaks_for_another(bulk: str, tmp_path: Path) -> None:
    made = make(f"tcp+{bulk}", 3, flat_schema(8), tmp_path)
    context = zmq.Context()
    try:
        addresses = {node.uid: node.bind() for node in made}
        for node in made:
            node.set_peers(addresses)
        together(made, lambda node: node.start(60))
        victim, ring = made[0], load_keyring(tmp_path / "keys", 2, 3)
        stop = framing.sealed(1 << 14, codec.encode(Stop(victim.run_id, 0, 1)), framing.NONE, 0)
        strangers = [
            dealer(context, victim._local[0], None, b""),  # speaks without encryption
            dealer(context, victim._local[0], zmq.curve_keypair(), ring.public[0]),  # has a key, but no known one
            dealer(context, victim._local[0], zmq.curve_keypair(), zmq.curve_keypair()[0]),  # wrong server key
            dealer(context, victim._local[1], None, b""),
        ]
        for each in strangers:
            with suppress(zmq.Again):  # a door that is already shut leaves no queue to write to
                each.send(stop, zmq.NOBLOCK)
                each.send_multipart([stop, b"x"] * 500, zmq.NOBLOCK)
        insider = dealer(context, victim._local[0], (ring.public[2], ring.secret), ring.public[0])
        insider.send(stop)  # node 2 says that node 1 stops
        gossip(made, 8, torch.float32, 3)
        wanted = {"stranger", "handshake_failed", "wrong_identity"}
        wait_until(lambda: wanted <= victim.counters.faults.keys(), lambda: victim.counters.faults)
        assert not victim.stopping
        assert not {"wrong_run", "malformed_header", "malformed_multipart"} & victim.counters.faults.keys()
    finally:
        context.destroy(linger=0)
        for node in made:
            node.close()


def test_bulk_that_is_not_encrypted_is_refused(tmp_path: Path) -> None:
    with nodes("tcp+aes-gcm", 2, flat_schema(8)) as made, zmq.Context() as context:
        gossip(made, 8, torch.float32, 2)
        victim = made[0]
        assert isinstance(victim, ZeroMQ)
        given = victim._links.access.given[1]
        insider = BulkCredential(given.token, given.key, given.logins)
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


def with_keyring(node: ZeroMQ, public: dict[int, bytes], pair: tuple[bytes, bytes] | None = None) -> ZeroMQ:
    """The same node, closed and made anew, with what others' keys are to it, and its own key pair."""
    assert node._run.security is not None
    ring = node._run.security.keyring
    node.close()
    own, secret = pair or (ring.public[node.uid], ring.secret)
    return ZeroMQ(node.config, TransportParts(
        uid=node.uid, machine_of=node._run.machine_of, schemas=flat_schema(8), digest="d",
    ), Keyring(node.uid, secret, {**ring.public, node.uid: own, **public}))  # fmt: skip


def failures(made: list[ZeroMQ], known: dict[int, str], one_knows: str = "") -> list[str]:
    """What the start of each ends with. known: node 0, and those that never reach it -> a reason that each finds.

    Time is over for node 0 once all of these have theirs (and one of them the reason `one_knows`), and for the others
    of them once everybody else has heard of it from node 0.
    """
    told: dict[int, str] = {}
    try:
        addresses = {node.uid: node.bind() for node in made}
        for node in made:
            node.set_peers(addresses)

        def run(node: Communication) -> None:
            with pytest.raises(AssemblyError) as caught:
                node.start(1000)
            told[node.uid] = str(caught.value)

        def time_is_over() -> None:
            out = [made[uid] for uid in known if uid]
            wait_until(lambda: all(_knows(made[uid], says) for uid, says in known.items())
                       and any(_knows(made[uid], one_knows) for uid in known)
                       and len(made[0].absent) == len(out), lambda: [node.refusals for node in made])  # fmt: skip
            made[0]._io.call(lambda: made[0]._protocol.give_up(now()))
            wait_until(lambda: len(told) == len(made) - len(out), lambda: f"only {told.keys()} heard of it")
            for node in out:
                node._io.call(functools.partial(node._protocol.give_up, now()))

        clock = threading.Thread(target=time_is_over)
        clock.start()
        together(made, run, 200)
        clock.join()
        return [told[node.uid] for node in made]
    finally:
        for node in made:
            node.close()


def _knows(node: ZeroMQ, says: str) -> bool:
    return any(re.search(says, reason) for reason in node.refusals.values())


def test_a_node_with_a_key_of_its_own_making_does_not_get_in(tmp_path: Path) -> None:
    made = make("tcp+curve", 2, flat_schema(8), tmp_path)
    pair = zmq.curve_keypair()
    made[1] = with_keyring(made[1], {}, pair)
    key = re.escape(pair[0].decode())
    known = {
        0: rf"node 1 \(127.0.0.1:\d+\) came from 127.0.0.1 with key {key}, which is not in the public.keys of node 0",
        1: r"node 0 \(127.0.0.1:\d+\) does not have the key of node 1 in its public.keys",
    }
    told = failures(made, known)
    assert made[0].counters.faults["stranger"] >= 1
    assert "1 of 2 nodes did not join in time: node 1" in told[0]
    assert all(re.search(says, told[uid]) for uid, says in known.items()), told


def test_another_key_for_the_parent_is_told_on_both_sides(tmp_path: Path) -> None:
    """The list of node 1 is older than the key of node 0."""
    made = make("tcp+curve", 2, flat_schema(8), tmp_path)
    made[1] = with_keyring(made[1], {0: zmq.curve_keypair()[0]})
    known = {0: r"node 1 \(.*\) expects another key for node 0: the public.keys files differ",
             1: r"node 0 \(.*\) broke off the handshake: does its key differ from the one in this"}  # fmt: skip
    told = failures(made, known)
    assert all(re.search(says, told[uid]) for uid, says in known.items()), told


@pytest.mark.parametrize("open_one", [0, 1])
def test_one_side_without_keys_is_told_on_both(open_one: int, tmp_path: Path) -> None:
    made = make("tcp+curve", 2, flat_schema(8), tmp_path)
    made[open_one].close()
    made[open_one] = ZeroMQ(ZeroMQConfig(name="zeromq"), TransportParts(
        uid=open_one, machine_of={0: 0, 1: 0}, digest="d", schemas=flat_schema(8),
    ))  # fmt: skip
    known = {0: r"node 1 \(.*(communication.security differ)",
             1: r"node 0 \(.*(communication.security differs|other security)"}  # fmt: skip
    why = "communication.security differs"
    told = failures(made, known, one_knows=why)
    assert all(re.search(says, told[uid]) for uid, says in known.items()), told
    assert why in "".join(told), "at one end, the reason is known"


def test_the_root_hears_of_handshakes_that_break_off_elsewhere(tmp_path: Path) -> None:
    """Node 9 connects to node 1 alone, whose word goes up the tree; and down again to those who wait."""
    made = make("tcp+curve", 10, flat_schema(8), tmp_path)
    made[9] = with_keyring(made[9], {}, zmq.curve_keypair())
    of_all = "node 9 .*which is not in the public.keys of node 1"
    of_its_own = r"node 1 \(.*\) does not have the key of node 9"
    told = failures(made, {0: of_all, 9: of_its_own})
    assert all(re.search(of_all, each) for each in told[:9]), told
    assert re.search(of_its_own, told[9])


def test_a_credential_is_good_for_one_login() -> None:
    giver = BulkCredential()
    taker = BulkCredential(giver.token, giver.key)
    first, second, third = (taker.log_in() for _ in range(3))
    assert len({first, second, third}) == 3 and all(giver.token.hex().encode() not in each for each in (first, second))
    assert giver.refusal(second) is None
    assert [giver.refusal(each) for each in (second, first)] == ["replayed_login"] * 2
    assert giver.refusal(third) is None and giver.refusal(third) == "replayed_login"
    fourth = taker.log_in()
    renumbered = b"%0*x" % (LOGIN_DIGITS, 9) + fourth[LOGIN_DIGITS:]
    for false in (b"", fourth[:-1], fourth + b"0", renumbered, fourth.upper(), b"-" + fourth[1:], b"\xff" * 80,
                  BulkCredential().log_in(), fourth[:LOGIN_DIGITS] + bytes(64)):  # fmt: skip
        assert giver.refusal(false) == "stranger"
    assert giver.refusal(fourth) is None, "what strangers sent does not use it up"


class Eavesdropper:
    """Passes connections on to a port, and keeps what came in the clear from whoever connected."""

    def __init__(self, port: int) -> None:
        self.heard: list[bytearray] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self._to = self._server.getsockname()[1], port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._server.accept()
                theirs = socket.create_connection(("127.0.0.1", self._to))
                self.heard.append(bytearray())
                threading.Thread(target=self._pass_on, args=(ours, theirs, self.heard[-1]), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(theirs, ours, None), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, heard: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if heard is not None:
                    heard += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def logins(self) -> list[tuple[bytes, bytes]]:
        """User names and passwords of all connections, as PLAIN sends them (RFC 24)."""
        found = []
        for heard in map(bytes, self.heard):
            _, command, rest = heard.partition(b"\x05HELLO")
            if command:
                name, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
                found.append((name, rest[1 : 1 + rest[0]]))
        return found

    def close(self) -> None:
        self._server.close()


@pytest.mark.parametrize("bulk", ["none", "aes-gcm"])
def test_who_overhears_a_login_does_not_get_in(bulk: str, tmp_path: Path) -> None:
    made = make(f"tcp+{bulk}", 2, flat_schema(8), tmp_path)
    addresses = {node.uid: node.bind() for node in made}
    victim = made[0]
    ear = Eavesdropper(int(victim._local[1].rpartition(":")[2]))
    addresses[0] = (addresses[0][0], f"tcp://127.0.0.1:{ear.port}")
    with zmq.Context() as context:
        try:
            for node in made:
                node.set_peers(addresses)
            together(made, lambda node: node.start(60))
            gossip(made, 8, torch.float32, 2)
            ((name, password),) = ear.logins()
            assert name == b"1" and len(password) == LOGIN_DIGITS + 64
            token, key = victim._links.access.given[1].token, victim._links.access.given[1].key
            said = b"".join(map(bytes, ear.heard))
            assert not any(secret in said or secret.hex().encode() in said for secret in (token, key))
            with context.socket(zmq.DEALER) as thief:
                thief.linger = 0
                thief.plain_username, thief.plain_password = name, password
                thief.connect(victim._local[1])
                with suppress(zmq.Again):
                    thief.send(b"let me in", zmq.NOBLOCK)
                wait_until(lambda: victim.counters.faults.get("replayed_login"), lambda: victim.counters.faults)
            one_round(made, 8, 2)
            assert victim.counters.faults["replayed_login"] == 1
            assert victim.counters.faults.keys() <= {"replayed_login", "handshake_failed"}
        finally:
            for node in made:
                node.close()
            ear.close()


def test_secrets_never_reach_logs_or_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    with caplog.at_level("DEBUG"), nodes("tcp+aes-gcm", 2, flat_schema(8)) as made:
        for node in made:
            node.counters.on_event = lambda kind, peer, detail: said.append(f"{kind} {peer} {detail}")
        gossip(made, 8, torch.float32, 2)
        secrets = [node._run.security.keyring.secret.decode() for node in made]  # type: ignore[attr-defined]
        secrets += [p.key.hex() for node in made for p in node._links.access.given.values()]  # type: ignore[attr-defined]
        shown = repr([node._links.access.given for node in made]) + repr(made) + caplog.text + "".join(said)  # type: ignore[attr-defined]
    assert len(secrets) == 4 and not any(secret in shown for secret in secrets)


@pytest.mark.skipif(os.geteuid() != 0 and not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_shared_memory_with_keys(tmp_path: Path) -> None:
    with nodes("shared_memory+curve", 3, flat_schema(1000)) as made:
        models = gossip(made, 1000, torch.float32, 3)
    with nodes("inproc", 3, flat_schema(1000)) as plain:
        assert all(torch.equal(a, b) for a, b in zip(models, gossip(plain, 1000, torch.float32, 3), strict=True))
