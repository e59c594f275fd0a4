"""Nodes that are in no mapping, over real sockets on two loopback addresses: admitted, refused, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decentnode import clock, entropy
from decentnode.communication.parts import BindPlan, Growth, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.sockets.security import (
    AUTHORIZED_FILE,
    PUBLIC_FILE,
    load_keyring,
    load_newcomer,
    write_keys,
    write_newcomer,
)
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import AssemblyError
from decentnode.launch.nodes.admission import Request, admitted, experiment_of, resign
from decentnode.wire.generation import Limits
from decentnode.wire.invitation import SECRET_BYTES, issue
from decentnode.wire.messages import REACH_DIRECT, REACH_RELAYED, Granted
from tests.communication.contract import flat_schema, together
from tests.conftest import free_ports, wait_until

TOLD = b"graph: {name: ring}\n"
LIMITS = Limits(20.0, 60.0, 2)


class Told(Exception):
    """Why nobody was admitted so far."""


def made(uid: int, port: int, control: dict[int, str], keys: Path | None = None, granted: Granted | None = None,
         newcomers: int = 1, secret: bytes = b"", told: tuple[bytes, str] = (TOLD, "d")) -> ZeroMQ:  # fmt: skip
    options = {} if keys is None else {"keys": keys, "bulk_security": "none"}
    config = ZeroMQConfig.model_validate({"name": "zeromq", "start_timeout_seconds": 20, **options})
    token, seats = (b"", b"") if granted is None else (granted.seat, granted.seats)
    if keys is None:
        keyring = None
    else:
        keyring = load_newcomer(keys, uid) if granted is not None else load_keyring(keys, uid, 2)
    return ZeroMQ(config, TransportParts(
        uid=uid, machine_of={each: each for each in range(2 + newcomers)}, schemas=flat_schema(8), digest=told[1],
        bind=BindPlan(None, host="127.0.0.1" if uid < 2 else "127.0.0.2", port=port), limits=LIMITS,
        growth=Growth(2, told[0], control, token, seats, secret if granted is None else b""),
    ), keyring)  # fmt: skip


@contextmanager
def run_of_two(
    keys: Path | None = None, newcomers: int = 1, secret: bytes = b"", told: tuple[bytes, str] = (TOLD, "d"),
) -> Iterator[tuple[list[ZeroMQ], dict[int, str]]]:
    ports = {uid: free_ports(2) for uid in range(2)}
    control = {uid: f"tcp://127.0.0.1:{port}" for uid, port in ports.items()}
    nodes = [made(uid, ports[uid], control, keys, None, newcomers, secret, told) for uid in range(2)]
    try:
        for node in nodes:
            node.bind()
            node.set_peers({uid: (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
                            for uid, port in ports.items()})  # fmt: skip
        together(nodes, lambda node: node.start(60))
        yield nodes, control
    finally:
        for node in nodes:
            node.close()


def asks(
    control: dict[int, str], uid: int, keys: Path | None = None, seconds: float = 60.0,
    tell: Callable[[str], None] = lambda _: None, invitation: str = "", reach: int = REACH_DIRECT,
) -> tuple[Granted, int]:
    port = free_ports(2)
    host = "127.0.0.77" if reach == REACH_RELAYED else "127.0.0.2"  # where nobody listens
    request = Request(control[uid].removeprefix("tcp://"), uid, host, port, keys, invitation, reach)
    return admitted(request, seconds, tell), port


def takes_part(
    nodes: list[ZeroMQ], control: dict[int, str], keys: Path | None = None, invitation: str = "",
    reach: int = REACH_DIRECT,
) -> Granted:
    """A node asks node 1, which sends it to node 0, and becomes a member."""
    granted, port = asks(control, 1, keys, invitation=invitation, reach=reach)
    assert granted.uid == 2 and granted.config == TOLD
    guest = made(2, port, control, keys, granted)
    nodes.append(guest)
    guest.bind()
    guest.set_peers({uid: (at, f"{at.rpartition(':')[0]}:{int(at.rpartition(':')[2]) + 1}")
                     for uid, at in control.items()})  # fmt: skip
    guest.join()
    found: dict[int, tuple[int, ...]] = {}

    def enter(node: ZeroMQ) -> None:
        wait_until(lambda: bool(node._status.regrouping))
        found[node.uid] = node.regroup().wait().members
        node.barrier("all there", 20)

    together(nodes, enter)
    assert found == dict.fromkeys(range(3), (0, 1, 2))
    return granted


def test_a_newcomer_becomes_a_member_whomever_it_asks() -> None:
    with run_of_two() as (nodes, control):
        takes_part(nodes, control)


def test_there_are_so_many_uids_and_no_more() -> None:
    with run_of_two() as (_, control):
        asks(control, 0)

        def tell(reason: str) -> None:
            raise Told(reason)

        with pytest.raises(Told, match="all 1 uids beyond the mapping are taken"):
            asks(control, 0, tell=tell)
    with run_of_two(newcomers=0) as (_, control), pytest.raises(AssemblyError, match=r"admits no nodes beyond"):
        asks(control, 0)


def keys_of(folder: Path, authorized: bool) -> tuple[Path, Path]:
    members, own = folder / "members", folder / "own"
    write_keys(members, range(2))
    key = write_newcomer(own)
    (own / PUBLIC_FILE).write_bytes((members / PUBLIC_FILE).read_bytes())
    (own / PUBLIC_FILE).chmod(0o644)
    if authorized:
        (members / AUTHORIZED_FILE).write_bytes(key + b" who it is\n")
        (members / AUTHORIZED_FILE).chmod(0o644)
    return members, own


def test_with_keys_an_authorized_key_gets_in(tmp_path: Path) -> None:
    members, own = keys_of(tmp_path, authorized=True)
    with run_of_two(members) as (nodes, control):
        takes_part(nodes, control, own)


@pytest.mark.slow
def test_with_keys_a_stranger_is_refused_and_counted(tmp_path: Path) -> None:
    members, own = keys_of(tmp_path, authorized=False)
    with run_of_two(members) as (nodes, control):
        with pytest.raises(AssemblyError, match="no answer"):
            asks(control, 0, own, seconds=2.0)
        wait_until(lambda: nodes[0].counters.faults.get("stranger", 0) > 0)
        assert not nodes[0]._generations.reconfiguration.membership.seats.known  # type: ignore[union-attr]


SECRET = bytes(range(SECRET_BYTES))


def invitation(uses: int = 1, secret: bytes = SECRET) -> str:
    return issue(secret, uses, int(clock.wall()) + 600, entropy.draw)


def test_an_invitation_lets_in_so_many_and_strangers_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with run_of_two(newcomers=3, secret=SECRET) as (nodes, control):
        for wrong, why in (("", "has no invitation"), (invitation(secret=bytes(32)), "not made with this run's")):
            with pytest.raises(AssemblyError, match=f"refuses this node: it.* {why}"):
                asks(control, 0, invitation=wrong)
        assert nodes[0].counters.faults == {"uninvited": 2}
        assert "a node at tcp://127.0.0.2:" in caplog.text and "not admitted: it has no invitation" in caplog.text
        mine = invitation()
        assert asks(control, 1, invitation=mine)[0].uid == 2
        with pytest.raises(AssemblyError, match="is for 1 nodes, and that many have joined"):
            asks(control, 0, invitation=mine)


def test_with_keys_an_invitation_stands_for_a_line_of_authorized_keys(tmp_path: Path) -> None:
    members, own = keys_of(tmp_path, authorized=False)
    with run_of_two(members, secret=SECRET) as (nodes, control):
        with pytest.raises(AssemblyError, match="has no invitation"):
            asks(control, 0, own)
        takes_part(nodes, control, own, invitation())


def test_with_an_authorized_key_no_invitation_is_needed(tmp_path: Path) -> None:
    members, own = keys_of(tmp_path, authorized=True)
    with run_of_two(members, secret=SECRET) as (_, control):
        assert asks(control, 0, own)[0].uid == 2


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_newcomer_that_nobody_can_connect_to_becomes_a_member(tmp_path: Path, with_keys: bool) -> None:
    members, own = keys_of(tmp_path, authorized=True) if with_keys else (None, None)
    with run_of_two(members) as (nodes, control):
        takes_part(nodes, control, own, reach=REACH_RELAYED)
        assert sum(node.counters.relayed_bytes for node in nodes) > 0
        # node 1 hears of the newcomer from itself before node 0 has told it who that is
        assert {kind for node in nodes[:2] for kind in node.counters.faults} <= {"unknown_uid", "stranger"}


def seats(node: ZeroMQ) -> dict[int, object]:
    """Who was granted a uid, as far as a member knows."""
    reconfiguration = node._generations.reconfiguration  # type: ignore[union-attr]
    return dict(reconfiguration.membership.seats.known)


def request(control: dict[int, str], uid: int, invited: str = "") -> Request:
    return Request(control[uid].removeprefix("tcp://"), uid, "127.0.0.2", free_ports(2), None, invited, REACH_DIRECT)


def test_what_the_experiment_is_can_be_asked_without_taking_a_seat() -> None:
    with run_of_two(secret=SECRET) as (nodes, control):
        with pytest.raises(AssemblyError, match="refuses this node: it has no invitation"):
            experiment_of(request(control, 1), 60.0)
        for member in (0, 1):
            told = experiment_of(request(control, member, invitation()), 60.0)
            assert (told.config, told.digest) == (TOLD, "d")
        assert not seats(nodes[0]) and not seats(nodes[1])
    with run_of_two(newcomers=0) as (_, control), pytest.raises(AssemblyError, match="admits no nodes beyond"):
        experiment_of(request(control, 0), 60.0)


@pytest.mark.parametrize("told", [0, 1])
def test_who_does_not_come_gives_its_seat_and_its_invitation_back(told: int) -> None:
    mine = invitation()
    with run_of_two(secret=SECRET) as (nodes, control):
        first = request(control, told, mine)
        granted = admitted(first, 60.0)
        assert not resign(first, replace(granted, seat=bytes(len(granted.seat)))) or seats(nodes[0]), "whose seat it is"
        assert set(seats(nodes[0])) == {2}
        assert resign(first, granted)
        assert not seats(nodes[0])
        assert admitted(request(control, 0, mine), 60.0).uid == 2, "another one, at once, with the invitation"


def test_a_member_does_not_give_up_its_seat_by_such_a_word() -> None:
    with run_of_two() as (nodes, control):
        granted = takes_part(nodes, control)
        resign(request(control, 0), granted)
        assert set(seats(nodes[0])) == {2}


def test_a_newcomer_is_told_how_long_ago_a_run_with_faults_began() -> None:
    with run_of_two(newcomers=2) as (nodes, control):
        assert asks(control, 0)[0].age_milliseconds == 0, "faults come about by no time"
        for node in nodes:
            node.run_began = clock.now() - 100.0
        assert 100_000 <= asks(control, 0)[0].age_milliseconds < 200_000
