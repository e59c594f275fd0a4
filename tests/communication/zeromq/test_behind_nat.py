"""Nodes on two public hosts and on two hosts behind NAT routers, in network namespaces: all take part in rounds, and
newcomers behind a router are recognized by the address that they connect from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from decentnode.communication.parts import BindPlan, Endpoints, Growth, TransportParts
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
from decentnode.launch.nodes.admission import Request, admitted
from decentnode.wire.generation import Limits
from decentnode.wire.membership.seats import Seats
from decentnode.wire.messages import Granted
from tests.communication.contract import connected, flat_schema, gossip, open_nodes, run_on_all
from tests.communication.zeromq.home_networks import HOME, enter_namespace, home_networks, public_address, run_in
from tests.conftest import wait_until

ELEMENTS, PORT = 50_000, 21000
CONFIG = b"graph: {name: ring}\n"
"""The config that newcomers are sent."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with home_networks() as namespaces:
        yield namespaces


def endpoints_of(uid: int) -> Endpoints:
    host = public_address(uid) if uid < 2 else HOME
    return f"tcp://{host}:{PORT}", f"tcp://{host}:{PORT + 1}"


def run_on_hosts(hosts: list[str], nodes: Sequence[ZeroMQ], work: Callable[[ZeroMQ], object]) -> dict[int, object]:
    """Calls work(node) for all nodes, each in a thread on its host. Returns the results by uid."""

    def work_on_host(node: ZeroMQ) -> object:
        enter_namespace(hosts[node.uid])
        return work(node)

    return run_on_all(nodes, work_on_host)  # type: ignore[arg-type]


@contextmanager
def started(hosts: list[str], make: Callable[[int], ZeroMQ], count: int) -> Iterator[list[ZeroMQ]]:
    """Yields `count` started nodes, and closes them and those that were appended at the end."""
    nodes = [run_in(hosts[uid], lambda uid=uid: make(uid)) for uid in range(count)]  # type: ignore[misc]
    try:

        def begin(node: ZeroMQ) -> None:
            node.bind()
            node.set_peers({uid: endpoints_of(uid) for uid in range(count)})
            node.start(60)

        run_on_hosts(hosts, nodes, begin)
        yield nodes
    finally:
        run_on_hosts(hosts, nodes, lambda node: node.close())


@pytest.mark.slow
def test_gossip_with_nodes_behind_nat_routers_gives_the_same_bits(hosts: list[str], tmp_path: Path) -> None:
    write_keys(tmp_path, range(4))
    config = ZeroMQConfig.model_validate({"name": "zeromq", "start_timeout_seconds": 40, "keys": tmp_path})

    def make(uid: int) -> ZeroMQ:
        return ZeroMQ(config, TransportParts(
            uid=uid, machine_of={uid: uid for uid in range(4)}, schemas=flat_schema(ELEMENTS), digest="d",
            bind=BindPlan(None, host=public_address(uid) if uid < 2 else HOME, port=PORT), relayed=(2, 3),
        ), load_keyring(tmp_path, uid, 4))  # fmt: skip

    with started(hosts, make, 4) as nodes:
        models = gossip(nodes, ELEMENTS, torch.float32, 3)
        run_on_hosts(hosts, nodes, lambda node: node.barrier("over", 30))
        relayed = [node.counters.relayed_bytes for node in nodes]
        assert all(not node.counters.faults for node in nodes), [node.counters.faults for node in nodes]
    with open_nodes("inproc", 4, flat_schema(ELEMENTS)) as twins, connected(twins):
        assert all(torch.equal(a, b) for a, b in zip(models, gossip(twins, ELEMENTS, torch.float32, 3), strict=True))
    assert sum(relayed[:2]) > 3 * 4 * 4 * ELEMENTS and relayed[2:] == [0, 0]


@pytest.mark.slow
def test_newcomers_behind_nat_routers_are_recognized_and_exchange_with_each_other(
    hosts: list[str], tmp_path: Path
) -> None:
    members = tmp_path / "members"
    write_keys(members, range(2))
    own = {uid: tmp_path / f"own{uid}" for uid in (2, 3)}
    (members / AUTHORIZED_FILE).write_bytes(b"".join(write_newcomer(folder) + b"\n" for folder in own.values()))
    for folder in own.values():
        (folder / PUBLIC_FILE).write_bytes((members / PUBLIC_FILE).read_bytes())
    for path in tmp_path.glob("*/*.keys"):
        path.chmod(0o644)
    control = {uid: endpoints_of(uid)[0] for uid in range(2)}

    def make(uid: int, granted: Granted | None = None) -> ZeroMQ:
        folder = members if granted is None else own[uid]
        keyring = load_keyring(folder, uid, 2) if granted is None else load_newcomer(folder, uid)
        config = ZeroMQConfig.model_validate({"name": "zeromq", "start_timeout_seconds": 40, "keys": folder})
        token, seats = (b"", b"") if granted is None else (granted.seat, granted.seats)
        return ZeroMQ(config, TransportParts(
            uid=uid, machine_of={uid: uid for uid in range(4)}, schemas=flat_schema(ELEMENTS), digest="d",
            bind=BindPlan(None, host=public_address(uid) if uid < 2 else HOME, port=PORT), limits=Limits(20.0, 60.0, 2),
            growth=Growth(2, CONFIG, control, token, seats),
        ), keyring)  # fmt: skip

    def join_as_newcomer(uid: int) -> ZeroMQ:
        request = Request(control[1].removeprefix("tcp://"), 1, HOME, PORT, own[uid])
        granted = admitted(request, 60)
        seats = Seats(2, 4)
        seats.learn(granted.seats)
        assert granted.uid == uid and seats.known[uid].via == public_address(uid)
        node = make(uid, granted)
        node.bind()
        node.set_peers({member: endpoints_of(member) for member in range(2)})
        node.join()
        return node

    def enter_next_generation(node: ZeroMQ) -> object:
        wait_until(lambda: bool(node._run_state.regrouping))
        members = node.regroup().wait().members
        node.mark_caught_up()
        node.barrier("all there", 30)
        return members

    with started(hosts, make, 2) as nodes:
        for uid in (2, 3):
            nodes.append(run_in(hosts[uid], lambda uid=uid: join_as_newcomer(uid)))  # type: ignore[misc]
            members = run_on_hosts(hosts, nodes, enter_next_generation)
            assert members == dict.fromkeys(range(uid + 1), tuple(range(uid + 1)))
        gossip(nodes, ELEMENTS, torch.float32, 2)
        assert sum(node.counters.relayed_bytes for node in nodes) > 2 * 4 * 4 * ELEMENTS
