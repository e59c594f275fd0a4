"""Two public hosts and two at home behind routers that masquerade, in network namespaces: all take part in rounds, and
newcomers at home are found to be there by the address that they come from."""

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
from tests.communication.contract import connected, flat_schema, gossip, nodes, together
from tests.communication.zeromq.home_networks import HOME, enter, home_networks, on, public
from tests.conftest import wait_until

ELEMENTS, PORT = 50_000, 21000
TOLD = b"graph: {name: ring}\n"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with home_networks() as made:
        yield made


def place(uid: int) -> Endpoints:
    host = public(uid) if uid < 2 else HOME
    return f"tcp://{host}:{PORT}", f"tcp://{host}:{PORT + 1}"


def everywhere(hosts: list[str], run: Sequence[ZeroMQ], work: Callable[[ZeroMQ], object]) -> dict[int, object]:
    """work(node), each in a thread on its host."""

    def there(node: ZeroMQ) -> object:
        enter(hosts[node.uid])
        return work(node)

    return together(run, there)  # type: ignore[arg-type]


@contextmanager
def started(hosts: list[str], make: Callable[[int], ZeroMQ], count: int) -> Iterator[list[ZeroMQ]]:
    run = [on(hosts[uid], lambda uid=uid: make(uid)) for uid in range(count)]  # type: ignore[misc]
    try:

        def begin(node: ZeroMQ) -> None:
            node.bind()
            node.set_peers({uid: place(uid) for uid in range(count)})
            node.start(60)

        everywhere(hosts, run, begin)
        yield run
    finally:
        everywhere(hosts, run, lambda node: node.close())


@pytest.mark.slow
def test_hosts_behind_routers_that_masquerade_take_part_with_the_same_bits(hosts: list[str], tmp_path: Path) -> None:
    write_keys(tmp_path, range(4))
    config = ZeroMQConfig.model_validate({"name": "zeromq", "start_timeout_seconds": 40, "keys": tmp_path})

    def make(uid: int) -> ZeroMQ:
        return ZeroMQ(config, TransportParts(
            uid=uid, machine_of={each: each for each in range(4)}, schemas=flat_schema(ELEMENTS), digest="d",
            bind=BindPlan(None, host=public(uid) if uid < 2 else HOME, port=PORT), relayed=(2, 3),
        ), load_keyring(tmp_path, uid, 4))  # fmt: skip

    with started(hosts, make, 4) as run:
        found = gossip(run, ELEMENTS, torch.float32, 3)
        everywhere(hosts, run, lambda node: node.barrier("over", 30))
        relayed = [node.counters.relayed_bytes for node in run]
        assert all(not node.counters.faults for node in run), [node.counters.faults for node in run]
    with nodes("inproc", 4, flat_schema(ELEMENTS)) as twins, connected(twins):
        assert all(torch.equal(a, b) for a, b in zip(found, gossip(twins, ELEMENTS, torch.float32, 3), strict=True))
    assert sum(relayed[:2]) > 3 * 4 * 4 * ELEMENTS and relayed[2:] == [0, 0]


@pytest.mark.slow
def test_newcomers_at_home_are_found_to_be_there_and_speak_with_each_other(hosts: list[str], tmp_path: Path) -> None:
    members = tmp_path / "members"
    write_keys(members, range(2))
    own = {uid: tmp_path / f"own{uid}" for uid in (2, 3)}
    (members / AUTHORIZED_FILE).write_bytes(b"".join(write_newcomer(each) + b"\n" for each in own.values()))
    for each in own.values():
        (each / PUBLIC_FILE).write_bytes((members / PUBLIC_FILE).read_bytes())
    for path in tmp_path.glob("*/*.keys"):
        path.chmod(0o644)
    control = {uid: place(uid)[0] for uid in range(2)}

    def make(uid: int, granted: Granted | None = None) -> ZeroMQ:
        folder = members if granted is None else own[uid]
        keyring = load_keyring(folder, uid, 2) if granted is None else load_newcomer(folder, uid)
        config = ZeroMQConfig.model_validate({"name": "zeromq", "start_timeout_seconds": 40, "keys": folder})
        token, seats = (b"", b"") if granted is None else (granted.seat, granted.seats)
        return ZeroMQ(config, TransportParts(
            uid=uid, machine_of={each: each for each in range(4)}, schemas=flat_schema(ELEMENTS), digest="d",
            bind=BindPlan(None, host=public(uid) if uid < 2 else HOME, port=PORT), limits=Limits(20.0, 60.0, 2),
            growth=Growth(2, TOLD, control, token, seats),
        ), keyring)  # fmt: skip

    def come(uid: int) -> ZeroMQ:
        request = Request(control[1].removeprefix("tcp://"), 1, HOME, PORT, own[uid])
        granted = admitted(request, 60)
        seats = Seats(2, 4)
        seats.learn(granted.seats)
        assert granted.uid == uid and seats.known[uid].via == public(uid)
        node = make(uid, granted)
        node.bind()
        node.set_peers({each: place(each) for each in range(2)})
        node.join()
        return node

    def enter_next(node: ZeroMQ) -> object:
        wait_until(lambda: bool(node._status.regrouping))
        found = node.regroup().wait().members
        node.mark_caught_up()
        node.barrier("all there", 30)
        return found

    with started(hosts, make, 2) as run:
        for uid in (2, 3):
            run.append(on(hosts[uid], lambda uid=uid: come(uid)))  # type: ignore[misc]
            found = everywhere(hosts, run, enter_next)
            assert found == dict.fromkeys(range(uid + 1), tuple(range(uid + 1)))
        gossip(run, ELEMENTS, torch.float32, 2)
        assert sum(node.counters.relayed_bytes for node in run) > 2 * 4 * 4 * ELEMENTS
