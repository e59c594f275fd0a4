"""Newcomers (nodes outside the mapping) over real sockets on two loopback addresses: admission and refusal."""

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
from tests.communication.contract import flat_schema, run_on_all
from tests.conftest import free_ports, wait_until

CONFIG = b"graph: {name: ring}\n"
"""The config that newcomers are sent."""
LIMITS = Limits(20.0, 60.0, 2)


class NotAdmittedYet(Exception):
    """The reason why the newcomer has not been admitted so far."""


def make_node(
    uid: int, port: int, control: dict[int, str], keys: Path | None = None, granted: Granted | None = None,
    newcomers: int = 1, secret: bytes = b"", experiment: tuple[bytes, str] = (CONFIG, "d"),
) -> ZeroMQ:
    """Returns a node that is not bound: a member (uid 0 or 1), or a newcomer with the seat that it was granted.

    control: uid -> control address of the members. newcomers: number of uids beyond the mapping. secret: the run's
    secret, if it asks newcomers for invitations. experiment: (config, digest).
    """
    options = {} if keys is None else {"keys": keys, "bulk_security": "none"}
    config = ZeroMQConfig.model_validate({"name": "zeromq", "start_timeout_seconds": 20, **options})
    token, seats = (b"", b"") if granted is None else (granted.seat, granted.seats)
    if keys is None:
        keyring = None
    else:
        keyring = load_newcomer(keys, uid) if granted is not None else load_keyring(keys, uid, 2)
    bind = BindPlan(None, host="127.0.0.1" if uid < 2 else "127.0.0.2", port=port)
    return ZeroMQ(config, TransportParts(
        uid=uid, machine_of={machine: machine for machine in range(2 + newcomers)}, schemas=flat_schema(8),
        digest=experiment[1], bind=bind, limits=LIMITS,
        growth=Growth(2, experiment[0], control, token, seats, secret if granted is None else b""),
    ), keyring)  # fmt: skip


@contextmanager
def run_of_two(
    keys: Path | None = None, newcomers: int = 1, secret: bytes = b"", experiment: tuple[bytes, str] = (CONFIG, "d"),
) -> Iterator[tuple[list[ZeroMQ], dict[int, str]]]:
    """Yields the two started members of a run, and their control addresses by uid. Closes the members, and nodes that
    were appended to them, at the end."""
    ports = {uid: free_ports(2) for uid in range(2)}
    control = {uid: f"tcp://127.0.0.1:{port}" for uid, port in ports.items()}
    nodes = [make_node(uid, ports[uid], control, keys, None, newcomers, secret, experiment) for uid in range(2)]
    try:
        for node in nodes:
            node.bind()
            node.set_peers({uid: (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
                            for uid, port in ports.items()})  # fmt: skip
        run_on_all(nodes, lambda node: node.start(60))
        yield nodes, control
    finally:
        for node in nodes:
            node.close()


def ask_for_admission(
    control: dict[int, str], uid: int, keys: Path | None = None, seconds: float = 60.0,
    report: Callable[[str], None] = lambda _: None, invitation: str = "", reach: int = REACH_DIRECT,
) -> tuple[Granted, int]:
    """Asks node `uid` to admit a newcomer. Returns what it was granted, and its port. report: called with the reason
    while it is not admitted."""
    port = free_ports(2)
    host = "127.0.0.77" if reach == REACH_RELAYED else "127.0.0.2"  # nothing listens at .77
    request = Request(control[uid].removeprefix("tcp://"), uid, host, port, keys, invitation, reach)
    return admitted(request, seconds, report), port


def join_as_newcomer(
    nodes: list[ZeroMQ], control: dict[int, str], keys: Path | None = None, invitation: str = "",
    reach: int = REACH_DIRECT,
) -> Granted:
    """Lets a newcomer ask node 1, which refers it to node 0, and become a member. Returns what it was granted."""
    granted, port = ask_for_admission(control, 1, keys, invitation=invitation, reach=reach)
    assert granted.uid == 2 and granted.config == CONFIG
    newcomer = make_node(2, port, control, keys, granted)
    nodes.append(newcomer)
    newcomer.bind()
    newcomer.set_peers({uid: (address, f"{address.rpartition(':')[0]}:{int(address.rpartition(':')[2]) + 1}")
                        for uid, address in control.items()})  # fmt: skip
    newcomer.join()
    members: dict[int, tuple[int, ...]] = {}

    def enter_next_generation(node: ZeroMQ) -> None:
        wait_until(lambda: bool(node._run_state.regrouping))
        members[node.uid] = node.regroup().wait().members
        node.barrier("all there", 20)

    run_on_all(nodes, enter_next_generation)
    assert members == dict.fromkeys(range(3), (0, 1, 2))
    return granted


def test_a_newcomer_that_asks_a_member_other_than_the_leader_becomes_a_member() -> None:
    with run_of_two() as (nodes, control):
        join_as_newcomer(nodes, control)


def test_no_more_newcomers_are_admitted_than_the_config_allows() -> None:
    with run_of_two() as (_, control):
        ask_for_admission(control, 0)

        def raise_reason(reason: str) -> None:
            raise NotAdmittedYet(reason)

        with pytest.raises(NotAdmittedYet, match="all 1 uids beyond the mapping are taken"):
            ask_for_admission(control, 0, report=raise_reason)
    with run_of_two(newcomers=0) as (_, control), pytest.raises(AssemblyError, match=r"admits no nodes beyond"):
        ask_for_admission(control, 0)


def write_key_folders(folder: Path, authorized: bool) -> tuple[Path, Path]:
    """Returns the key folders of the members and of a newcomer, whose key the members have authorized or not."""
    members, own = folder / "members", folder / "own"
    write_keys(members, range(2))
    key = write_newcomer(own)
    (own / PUBLIC_FILE).write_bytes((members / PUBLIC_FILE).read_bytes())
    (own / PUBLIC_FILE).chmod(0o644)
    if authorized:
        (members / AUTHORIZED_FILE).write_bytes(key + b" who it is\n")
        (members / AUTHORIZED_FILE).chmod(0o644)
    return members, own


def test_a_newcomer_with_an_authorized_key_becomes_a_member(tmp_path: Path) -> None:
    members, own = write_key_folders(tmp_path, authorized=True)
    with run_of_two(members) as (nodes, control):
        join_as_newcomer(nodes, control, own)


@pytest.mark.slow
def test_a_newcomer_without_an_authorized_key_is_refused_and_counted(tmp_path: Path) -> None:
    members, own = write_key_folders(tmp_path, authorized=False)
    with run_of_two(members) as (nodes, control):
        with pytest.raises(AssemblyError, match="no answer"):
            ask_for_admission(control, 0, own, seconds=2.0)
        wait_until(lambda: nodes[0].counters.faults.get("stranger", 0) > 0)
        assert not nodes[0]._generations.reconfiguration.membership.seats.known  # type: ignore[union-attr]


SECRET = bytes(range(SECRET_BYTES))


def invitation(uses: int = 1, secret: bytes = SECRET) -> str:
    return issue(secret, uses, int(clock.wall()) + 600, entropy.draw)


def test_an_invitation_admits_so_many_and_uninvited_newcomers_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture
) -> None:
    with run_of_two(newcomers=3, secret=SECRET) as (nodes, control):
        for wrong, reason in (("", "has no invitation"), (invitation(secret=bytes(32)), "not made with this run's")):
            with pytest.raises(AssemblyError, match=f"refuses this node: it.* {reason}"):
                ask_for_admission(control, 0, invitation=wrong)
        assert nodes[0].counters.faults == {"uninvited": 2}
        assert "a node at tcp://127.0.0.2:" in caplog.text and "not admitted: it has no invitation" in caplog.text
        valid = invitation()
        assert ask_for_admission(control, 1, invitation=valid)[0].uid == 2
        with pytest.raises(AssemblyError, match="is for 1 nodes, and that many have joined"):
            ask_for_admission(control, 0, invitation=valid)


def test_a_newcomer_with_an_invitation_needs_no_authorized_key(tmp_path: Path) -> None:
    members, own = write_key_folders(tmp_path, authorized=False)
    with run_of_two(members, secret=SECRET) as (nodes, control):
        with pytest.raises(AssemblyError, match="has no invitation"):
            ask_for_admission(control, 0, own)
        join_as_newcomer(nodes, control, own, invitation())


def test_a_newcomer_with_an_authorized_key_needs_no_invitation(tmp_path: Path) -> None:
    members, own = write_key_folders(tmp_path, authorized=True)
    with run_of_two(members, secret=SECRET) as (_, control):
        assert ask_for_admission(control, 0, own)[0].uid == 2


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_newcomer_that_is_reached_only_through_relays_becomes_a_member(tmp_path: Path, with_keys: bool) -> None:
    members, own = write_key_folders(tmp_path, authorized=True) if with_keys else (None, None)
    with run_of_two(members) as (nodes, control):
        join_as_newcomer(nodes, control, own, reach=REACH_RELAYED)
        assert sum(node.counters.relayed_bytes for node in nodes) > 0
        # messages of the newcomer may reach node 1 before node 0 has announced the newcomer
        assert {kind for node in nodes[:2] for kind in node.counters.faults} <= {"unknown_uid", "stranger"}


def known_seats(node: ZeroMQ) -> dict[int, object]:
    """Returns the seats of newcomers that a member knows, by uid."""
    reconfiguration = node._generations.reconfiguration  # type: ignore[union-attr]
    return dict(reconfiguration.membership.seats.known)


def make_request(control: dict[int, str], uid: int, invitation: str = "") -> Request:
    return Request(control[uid].removeprefix("tcp://"), uid, "127.0.0.2", free_ports(2), None, invitation, REACH_DIRECT)


def test_a_newcomer_can_ask_for_the_experiment_without_taking_a_seat() -> None:
    with run_of_two(secret=SECRET) as (nodes, control):
        with pytest.raises(AssemblyError, match="refuses this node: it has no invitation"):
            experiment_of(make_request(control, 1), 60.0)
        for member in (0, 1):
            answer = experiment_of(make_request(control, member, invitation()), 60.0)
            assert (answer.config, answer.digest) == (CONFIG, "d")
        assert not known_seats(nodes[0]) and not known_seats(nodes[1])
    with run_of_two(newcomers=0) as (_, control), pytest.raises(AssemblyError, match="admits no nodes beyond"):
        experiment_of(make_request(control, 0), 60.0)


@pytest.mark.parametrize("member", [0, 1])
def test_a_newcomer_that_resigns_returns_its_seat_and_its_invitation(member: int) -> None:
    """It resigns at either member. A resignation with another token has no effect."""
    valid = invitation()
    with run_of_two(secret=SECRET) as (nodes, control):
        first = make_request(control, member, valid)
        granted = admitted(first, 60.0)
        resign(first, replace(granted, seat=bytes(len(granted.seat))))
        assert set(known_seats(nodes[0])) == {2}, "another token gave up the seat"
        assert resign(first, granted)
        assert not known_seats(nodes[0])
        assert admitted(make_request(control, 0, valid), 60.0).uid == 2, "the invitation is used up"


def test_a_resignation_has_no_effect_once_the_newcomer_is_a_member() -> None:
    with run_of_two() as (nodes, control):
        granted = join_as_newcomer(nodes, control)
        resign(make_request(control, 0), granted)
        assert set(known_seats(nodes[0])) == {2}


def test_a_newcomer_is_told_how_long_ago_a_run_with_faults_began() -> None:
    with run_of_two(newcomers=2) as (nodes, control):
        assert ask_for_admission(control, 0)[0].age_milliseconds == 0, "this run has no timed faults"
        for node in nodes:
            node.run_began = clock.now() - 100.0
        assert 100_000 <= ask_for_admission(control, 0)[0].age_milliseconds < 200_000
