"""Nodes that listen on and connect to IPv4 addresses, IPv6 addresses and host names."""

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
from tests.communication.contract import check_cannot_bind, flat_schema, gossip, open_nodes, run_on_all
from tests.conftest import free_ports, needs_ipv6


def make_nodes(
    hosts: Sequence[str], reached_by: Sequence[str], kind: type[ZeroMQ] = ZeroMQ, keys: Path | None = None,
    **options: object,
) -> list[ZeroMQ]:
    """Returns nodes on machines of their own. hosts: where each listens. reached_by: how the others address it."""
    n, port = len(hosts), free_ports(2 * len(hosts))
    name = "collective" if kind is Collective else "zeromq"
    if keys is not None:
        write_keys(keys, range(n))
        options = {"keys": keys, **options}
    config = kind.Config.model_validate({"name": name, **options})
    nodes = [
        kind(config, TransportParts(
            uid=uid, machine_of={u: u for u in range(n)}, schemas=flat_schema(70_000), digest="d",
            bind=BindPlan(host=hosts[uid], port=port + 2 * uid),
        ), load_keyring(keys, uid, n) if keys is not None else None)
        for uid in range(n)
    ]  # fmt: skip
    for node in nodes:
        node.bind()
        node.set_peers({u: (endpoint(reached_by[u], port + 2 * u), endpoint(reached_by[u], port + 2 * u + 1))
                        for u in range(n)})  # fmt: skip
    return nodes


def check_gossip(nodes: list[ZeroMQ]) -> None:
    """Starts the nodes, checks that three rounds of gossip give the bits of the in-process transport, and closes
    them."""
    try:
        run_on_all(nodes, lambda node: node.start(60))
        models = gossip(nodes, 70_000, torch.float32, 3)
        assert all(not node.counters.faults for node in nodes)
    finally:
        run_on_all(nodes, lambda node: node.close())
    with open_nodes("inproc", len(nodes), flat_schema(70_000)) as twins:
        expected = gossip(twins, 70_000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, expected, strict=True))


@pytest.mark.parametrize(("hosts", "reached_by"), [
    (["::1", "[::1]", "127.0.0.1"], ["::1", "[::1]", "127.0.0.1"]),
    (["::", "0.0.0.0", "::"], ["127.0.0.1", "127.0.0.2", "::1"]),
], ids=["both families in one run", "every interface"])  # fmt: skip
@needs_ipv6
def test_nodes_with_ipv6_and_ipv4_addresses_exchange_in_one_run(hosts: list[str], reached_by: list[str]) -> None:
    check_gossip(make_nodes(hosts, reached_by))


@needs_ipv6
@pytest.mark.parametrize("bulk", ["curve", "aes-gcm"])
def test_nodes_with_ipv6_addresses_and_keys_exchange(bulk: str, tmp_path: Path) -> None:
    nodes = make_nodes(["::1"] * 2, ["::1"] * 2, keys=tmp_path / "keys", bulk_security=bulk)
    assert nodes[0].describe(1).startswith("node 1 (machine 1, [::1]:")
    check_gossip(nodes)


@needs_ipv6
def test_cliques_form_over_ipv6() -> None:
    check_gossip(make_nodes(["::1"] * 3, ["::1"] * 3, Collective))


def add_host_names(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    """Makes Python's resolver know additional names, with their addresses. libzmq's own resolver is not asked."""
    original = socket.getaddrinfo

    def getaddrinfo(host: str, *args: object, **kwargs: object) -> object:
        if host not in addresses:
            return original(host, *args, **kwargs)  # type: ignore[call-overload]
        return [(0, 0, 0, "", (address, 0)) for address in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_nodes_can_listen_on_and_connect_to_host_names() -> None:
    check_gossip(make_nodes(["localhost"] * 2, ["localhost"] * 2))


@needs_ipv6
def test_a_node_that_listens_on_a_name_is_reached_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    add_host_names(monkeypatch, both=["127.0.0.1", "::1", "192.0.2.77"])  # the last is another machine's
    check_gossip(make_nodes(["both"] * 2, ["::1", "127.0.0.1"]))


def test_a_name_of_another_machine_cannot_be_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    add_host_names(monkeypatch, elsewhere=["192.0.2.77", "192.0.2.78"])
    check_cannot_bind(BindPlan(host="elsewhere", port=free_ports(2)), r"cannot listen on tcp://elsewhere:\d+.*mapping.bind")


def test_a_name_that_cannot_be_resolved_is_reported_as_such_and_not_as_a_port_in_use(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    plan = BindPlan(host="nohost", port=free_ports(2))
    check_cannot_bind(plan, r"host or bind of machine 3 .*'nohost', a name .*be resolved", machine=3)


@needs_ipv6
def test_a_port_taken_at_one_address_of_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listening on the other address only is not enough: connections to the taken one would reach another process."""
    add_host_names(monkeypatch, both=["127.0.0.1", "::1"])
    port = free_ports(2)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other, context.socket(zmq.ROUTER) as mine:
        connections.listen(other, "::1", port)
        with pytest.raises(zmq.ZMQError, match="in use"):
            connections.listen(mine, "both", port)
