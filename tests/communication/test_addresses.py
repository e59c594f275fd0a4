"""Nodes that listen on, and connect to, IPv4 and IPv6 addresses and names."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import zmq

from decentnode.communication.hybrid.transport import Collective
from decentnode.communication.parts import BindPlan, TransportParts
from decentnode.communication.zeromq.sockets import connections
from decentnode.communication.zeromq.sockets.security import load_keyring, write_keys
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.mapping.hosts import endpoint
from tests.communication.contract import check_cannot_bind, flat_schema, gossip, nodes, together
from tests.conftest import free_ports, needs_ipv6


def made(
    hosts: Sequence[str], reached_by: Sequence[str], kind: type[ZeroMQ] = ZeroMQ, keys: Path | None = None,
    **options: object,
) -> list[ZeroMQ]:
    """Nodes on machines of their own, listening on `hosts`, connected to as `reached_by` says."""
    n, port = len(hosts), free_ports(2 * len(hosts))
    name = "collective" if kind is Collective else "zeromq"
    if keys is not None:
        write_keys(keys, range(n))
        options = {"keys": keys, **options}
    config = kind.Config.model_validate({"name": name, **options})
    found = [
        kind(config, TransportParts(
            uid=uid, machine_of={u: u for u in range(n)}, schemas=flat_schema(70_000), digest="d",
            bind=BindPlan(host=hosts[uid], port=port + 2 * uid),
        ), load_keyring(keys, uid, n) if keys is not None else None)
        for uid in range(n)
    ]  # fmt: skip
    for node in found:
        node.bind()
        node.set_peers({u: (endpoint(reached_by[u], port + 2 * u), endpoint(reached_by[u], port + 2 * u + 1))
                        for u in range(n)})  # fmt: skip
    return found


def expected(n: int) -> list[torch.Tensor]:
    with nodes("inproc", n, flat_schema(70_000)) as twins:
        return gossip(twins, 70_000, torch.float32, 3)


def run(found: list[ZeroMQ]) -> list[torch.Tensor]:
    try:
        together(found, lambda node: node.start(60))
        models = gossip(found, 70_000, torch.float32, 3)
        assert all(not node.counters.faults for node in found)
        return models
    finally:
        together(found, lambda node: node.close())


@pytest.mark.parametrize(("hosts", "reached_by"), [
    (["::1", "[::1]", "127.0.0.1"], ["::1", "[::1]", "127.0.0.1"]),
    (["::", "0.0.0.0", "::"], ["127.0.0.1", "127.0.0.2", "::1"]),
], ids=["both families in one run", "every interface"])  # fmt: skip
@needs_ipv6
def test_ipv6_and_ipv4_side_by_side(hosts: list[str], reached_by: list[str]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(run(made(hosts, reached_by)), expected(3), strict=True))


@needs_ipv6
@pytest.mark.parametrize("bulk", ["curve", "aes-gcm"])
def test_ipv6_with_keys(bulk: str, tmp_path: Path) -> None:
    found = made(["::1"] * 2, ["::1"] * 2, keys=tmp_path / "keys", bulk_security=bulk)
    assert found[0].describe(1).startswith("node 1 (machine 1, [::1]:")
    assert all(torch.equal(a, b) for a, b in zip(run(found), expected(2), strict=True))


@needs_ipv6
def test_ipv6_with_cliques() -> None:
    found = made(["::1"] * 3, ["::1"] * 3, Collective)
    assert all(torch.equal(a, b) for a, b in zip(run(found), expected(3), strict=True))


class Names:
    """The system's resolver with names of its own, for both families as libzmq's own is not asked for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **known: list[str]) -> None:
        asked = socket.getaddrinfo

        def getaddrinfo(host: str, *more: object, **named: object) -> object:
            if host not in known:
                return asked(host, *more, **named)  # type: ignore[call-overload]
            return [(0, 0, 0, "", (each, 0)) for each in known[host]]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_names_work_for_listening_and_connecting() -> None:
    assert all(torch.equal(a, b) for a, b in zip(run(made(["localhost"] * 2, ["localhost"] * 2)), expected(2),
                                                 strict=True))  # fmt: skip


@needs_ipv6
def test_who_listens_on_a_name_is_reached_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, both=["127.0.0.1", "::1", "192.0.2.77"])  # the last is another machine's
    assert all(torch.equal(a, b) for a, b in zip(run(made(["both"] * 2, ["::1", "127.0.0.1"])), expected(2),
                                                 strict=True))  # fmt: skip


def test_a_name_of_another_machine_cannot_be_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, elsewhere=["192.0.2.77", "192.0.2.78"])
    check_cannot_bind(BindPlan(host="elsewhere", port=free_ports(2)), r"cannot listen on tcp://elsewhere:\d+.*mapping.bind")


def test_a_name_that_cannot_be_resolved_is_no_port_to_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    plan = BindPlan(host="nohost", port=free_ports(2))
    check_cannot_bind(plan, r"host or bind of machine 3 .*'nohost', a name .*be resolved", machine=3)


@needs_ipv6
def test_a_port_taken_at_one_address_of_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half a success: whoever goes to that address would reach somebody else."""
    Names(monkeypatch, both=["127.0.0.1", "::1"])
    port = free_ports(2)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other, context.socket(zmq.ROUTER) as mine:
        connections.listen(other, "::1", port)
        with pytest.raises(zmq.ZMQError, match="in use"):
            connections.listen(mine, "both", port)
