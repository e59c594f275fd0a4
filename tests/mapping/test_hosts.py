"""Hosts in mappings: their spellings, the addresses that they resolve to, and warnings about unreachable ones."""

from __future__ import annotations

import socket
import threading

import pytest

from decentnode.errors import MappingError
from decentnode.mapping import addresses, hosts
from decentnode.mapping.hosts import (
    by_ipv6,
    endpoint,
    host_of,
    is_loopback,
    normalized_host,
    resolve_all,
    resolved,
    unreachable,
)
from tests.mapping.test_mappings import linear, table


@pytest.mark.parametrize(("host", "spelled"), [
    ("10.0.0.1", "10.0.0.1"), ("[::1]", "::1"), ("FD00:0::2", "fd00::2"), ("::ffff:10.0.0.1", "10.0.0.1"),
    ("node-7.example.org", "node-7.example.org"), ("node-7.example.org.", "node-7.example.org."), ("a_b", "a_b"),
    ("*", "*"), ("::", "::"), ("169.254.1.1", "169.254.1.1"),
])  # fmt: skip
def test_spellings_of_a_host_are_normalized(host: str, spelled: str) -> None:
    assert normalized_host(host) == spelled


@pytest.mark.parametrize(("host", "message"), [
    ("fe80::1", "link-local"), ("[fe80::1%eth0]", "link-local"), ("fd00::2%eth0", "without a zone"),
    ("10.0.0.1:20000", "without a port"), ("[::1]:20000", "without a port"), ("tcp://10.0.0.1", "must be a name"),
    ("a b", "must be a name"), ("", "must be a name"), ("-a", "must be a name"), ("a/b", "must be a name"),
])  # fmt: skip
def test_invalid_hosts_are_refused_with_the_reason(host: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalized_host(host)


def test_the_error_about_an_invalid_host_names_its_machine() -> None:
    with pytest.raises(MappingError, match="host of machine 1 must not be a link-local address, got 'fe80::2'"):
        linear(machines=2, nodes_per_machine=1, addresses=["10.0.0.1", "fe80::2"])
    with pytest.raises(MappingError, match="bind of machine 0 must not be a link-local"):
        linear(nodes_per_machine=1, bind="fe80::2")
    for anywhere, bind in (("0.0.0.0", "0.0.0.0"), ("[::]", "::"), ("*", "0.0.0.0")):
        with pytest.raises(MappingError, match=f"host of machine 1 must be the address by which.*bind: {bind}"):
            linear(machines=2, nodes_per_machine=1, addresses=["a", anywhere])
    with pytest.raises(MappingError, match="port 20000 on fd00::1 is taken twice"):
        table({"nodes": 1, "host": "fd00::1"}, {"nodes": 1, "host": "[FD00:0::1]"})


def test_ipv6_hosts_have_normalized_places_and_bracketed_endpoints() -> None:
    mapping = linear(machines=2, nodes_per_machine=1, addresses=["[fd00::1]", "fd00::2"], bind="[::]")
    assert [(mapping.place(uid).host, mapping.place(uid).bind) for uid in (0, 1)] == [("fd00::1", "::"),
                                                                                      ("fd00::2", "::")]  # fmt: skip
    assert endpoint("fd00::1", 7) == endpoint("[fd00::1]", 7) == "tcp://[fd00::1]:7"
    assert [host_of(each) for each in ("tcp://[fd00::1]:7", "tcp://a.b:7", "ipc:///tmp/x")] == ["fd00::1", "a.b", ""]


def test_a_machine_finds_itself_in_the_mapping_by_any_spelling_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = linear(machines=3, nodes_per_machine=1, addresses=["Alpha", "FD00:0::2", "10.0.0.3"])
    assert mapping.find_machine({"fd00::2", "127.0.0.1"}) == 1
    assert mapping.find_machine({"alpha"}) == 0
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {
        "eth0": [type("A", (), {"family": socket.AF_INET6, "address": each}) for each in ("fe80::1%eth0", "FD00::0:2")],
    })  # fmt: skip
    assert mapping.find_machine(addresses.own_names()) == 1


class FakeResolver:
    """Replaces socket.getaddrinfo by a function that knows these names and addresses only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **known: list[str]) -> None:
        self.known = known
        monkeypatch.setattr(hosts.socket, "getaddrinfo", self)

    def __call__(self, host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in self.known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (each, 0)) for each in self.known[host]]


def test_names_are_resolved_to_ipv4_and_ipv6_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeResolver(monkeypatch, a=["fd00::1", "10.0.0.1", "10.0.0.1"], six=["fd00::6", "fe80::6%eth0"],
                 here=["127.0.1.1"])  # fmt: skip
    assert resolved("a") == ["10.0.0.1", "fd00::1"] and resolved("six") == ["fd00::6"] and resolved("x") == []
    assert resolve_all(["a", "six", "x", "::1"]) == {"a": resolved("a"), "six": ["fd00::6"], "x": [], "::1": ["::1"]}
    families = [by_ipv6(resolved(each)) for each in ("a", "six", "x", "10.0.0.1", "::1")]
    assert families == [False, True, True, False, True]
    assert [is_loopback(resolved(each)) for each in ("a", "x", "here", "::1")] == [False, False, True, True]


def test_resolve_all_does_not_wait_for_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(hosts.socket, "getaddrinfo", lambda *_, **__: over.wait(60) and [])
    try:
        assert resolve_all(["silent", "10.0.0.1"], 0.05) == {"silent": [], "10.0.0.1": ["10.0.0.1"]}
    finally:
        over.set()


def test_a_host_that_resolves_to_loopback_on_its_own_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeResolver(monkeypatch, here=["127.0.1.1"], there=["10.0.0.2"], localhost=["::1", "127.0.0.1"], odd=["127.0.0.1"])

    def unreachable_among(*hosts_: str, machine: int = 0, **more: object) -> tuple[str, str]:
        return unreachable(linear(machines=len(hosts_), nodes_per_machine=1, addresses=list(hosts_), **more), machine)

    error, warning = unreachable_among("here", "there")
    assert "machine 0 listens on 'here', which is 127.0.1.1 here: machine 1 (there) cannot reach that" in error
    assert "/etc/hosts" in error and not warning
    plain, _ = unreachable_among("127.0.0.1", "10.0.0.2")
    assert "machine 0 listens on 127.0.0.1, which only itself can reach, not machine 1 (10.0.0.2)" in plain
    assert "/etc/hosts" not in plain, "/etc/hosts has no effect on numeric addresses"
    assert "'here'" in unreachable_among("10.0.0.1", "there", bind="here")[0]
    assert "machine 2 (there)" in unreachable_among("here", "odd", "there")[0]
    for reachable in (("here", "localhost"), ("127.0.0.1", "127.0.0.2"), ("::1", "odd"), ("10.0.0.1", "there"),
                      ("here",)):  # fmt: skip
        assert unreachable_among(*reachable) == ("", ""), reachable
    assert unreachable_among("here", "there", bind="127.0.0.1") == ("", ""), "an explicit bind may be for a tunnel"
    assert unreachable_among("here", "there", bind="0.0.0.0") == ("", "")
    error, warning = unreachable_among("there", "odd")
    assert not error and "machine 1 is 'odd' in the mapping, which is 127.0.0.1 here" in warning
    assert "machine 1 is '127.0.0.2' in the mapping: unless a tunnel" in unreachable_among("there", "127.0.0.2")[1]


def test_a_name_that_cannot_be_resolved_is_reported_with_its_place_in_the_mapping(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeResolver(monkeypatch, a=["10.0.0.1"])
    monkeypatch.setattr(hosts.psutil, "net_if_addrs", lambda: {"eth7": []})

    def unreachable_among(machine: int, *hosts_: str, **more: object) -> tuple[str, str]:
        return unreachable(linear(machines=len(hosts_), nodes_per_machine=2, addresses=list(hosts_), **more), machine)

    error, warning = unreachable_among(1, "a", "nohost")
    assert error.startswith("host of machine 1 in the mapping is 'nohost', a name that cannot be resolved on this")
    assert "/etc/hosts" in error and not warning
    error, _ = unreachable_among(0, "a", "10.0.0.2", bind="nowhere")
    assert error.startswith("bind of machine 0 in the mapping is 'nowhere'")
    assert unreachable_among(0, "127.0.0.1", bind="nowhere", base_port=20000)[0].startswith("bind of machine 0")
    assert unreachable_among(0, "127.0.0.1", bind="nowhere") == ("", ""), "without a port nobody listens there"
    for fine in ("eth7", "0.0.0.0", "::", "a"):
        assert unreachable_among(0, "a", "10.0.0.2", bind=fine) == ("", ""), fine
    error, warning = unreachable_among(0, "a", "nohost", "10.0.0.3", "gone")
    assert not error
    assert warning.startswith("a name in the mapping cannot be resolved here: 'nohost' (machine 1), 'gone' (machine 3)")
