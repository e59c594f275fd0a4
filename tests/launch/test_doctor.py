"""`decentnode doctor`: this machine alone, and two that examine each other."""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from click.testing import CliRunner

from decentnode import clock
from decentnode.cli import main
from decentnode.errors import EnvironmentFault
from decentnode.experiment import load
from decentnode.launch import doctor
from decentnode.launch.children.messages import Request
from decentnode.launch.doctor import DoctorClient, DoctorServer, Finding, _check_machine, interface_to
from decentnode.launch.supervising.prepare import address_warnings, facts
from decentnode.simulate.links_file import read_links
from tests.commands import ROOT, started
from tests.conftest import free_ports, needs_ipv6


def mapping(port: int, hosts: str = "127.0.0.1, 127.0.0.2") -> str:
    return f"mapping={{name: linear, machines: 2, nodes_per_machine: 4, addresses: [{hosts}], base_port: {port}}}"


def parse_findings(output: str) -> dict[str, dict[str, object]]:
    return {found["what"]: found for found in map(json.loads, output.splitlines()) if isinstance(found, dict)}


def test_doctor_examines_one_machine() -> None:
    result = CliRunner().invoke(main, ["doctor", str(ROOT / "configs" / "quickstart.yaml"), "--json"])
    assert result.exit_code == 0, result.output
    assert {"cores", "memory", "shared memory", "open files", "ports"} <= parse_findings(result.output).keys()


@pytest.mark.parametrize(
    ("processes", "limit", "fits"), [(16, 400, True), (64, 200, False), (2, 600, False), (2, 800, True)]
)
def test_the_files_of_a_process_of_many_nodes_and_of_the_supervisor_of_many_processes_are_counted(
    processes: int, limit: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    nodes = ["-s", "graph={name: ring, nodes: 64}", "-s",
             f"mapping={{nodes_per_machine: 64, nodes_per_process: {64 // processes}}}"]  # fmt: skip
    result = CliRunner().invoke(main, ["doctor", str(ROOT / "configs" / "quickstart.yaml"), "--json", *nodes])
    json_lines = "\n".join(line for line in result.output.splitlines() if line.startswith("{"))
    assert parse_findings(json_lines)["open files"]["ok"] is fits


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if port > 60000:
            pytest.skip("no room for the ports after it")
        result = CliRunner().invoke(main, ["doctor", str(ROOT / "configs" / "two_machines.yaml"), "-m", "0",
                                           "-s", mapping(port), "--json"])  # fmt: skip
    assert result.exit_code == 3 and f"127.0.0.1:{port}" in result.output
    json_lines = "\n".join(line for line in result.output.splitlines() if line.startswith("{"))
    assert parse_findings(json_lines)["ports"]["ok"] is False


@pytest.mark.parametrize("hosts", [
    pytest.param("127.0.0.1, 127.0.0.2", id="IPv4"),
    pytest.param("'::1', localhost", id="IPv6 and a name", marks=needs_ipv6),
])  # fmt: skip
@pytest.mark.slow
def test_two_machines_examine_each_other_and_write_links_files(hosts: str, tmp_path: Path) -> None:
    port = free_ports(16)
    config = str(ROOT / "configs" / "two_machines.yaml")
    machines = mapping(port, hosts)
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(ROOT, "doctor", config, "-m", str(m), "-s", machines, "--json",
                                       "--links", str(tmp_path / f"{m}.yaml"), merged=True))
            for m in (0, 1)
        ]
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], outputs
    for machine, output in enumerate(outputs):
        found = parse_findings(output)
        other = 1 - machine
        assert any(what.startswith(f"machine {other} (") and f["ok"] for what, f in found.items())
        assert found["addresses"]["ok"] is True
        link = read_links(tmp_path / f"{machine}.yaml").machines[0]
        assert link.machines == (machine, other) and link.interface == "lo"
        assert link.mbit_per_second is not None and link.mbit_per_second > 1 and 0 < link.latency_seconds < 1
        assert abs(float(str(found[f"clock of machine {other}"]["detail"]).split()[0])) < 1000


def test_a_machine_that_does_not_answer_is_named() -> None:
    config = str(ROOT / "configs" / "two_machines.yaml")
    port = free_ports(16)
    result = CliRunner().invoke(main, ["doctor", config, "-m", "1", "--wait", "0.5", "-s", mapping(port)])
    assert result.exit_code == 3 and "machine 0 (127.0.0.1" in result.output and "no answer" in result.output


def test_the_address_that_is_tried_is_named_where_a_name_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "resolved", lambda host: ["127.0.0.1", "127.0.0.2"])
    with zmq.Context() as context:
        client = DoctorClient(context, "127.0.0.1", free_ports(1))
        client._socket.linger = 0
        (found,) = _check_machine(client, set(), (0, 1), ("machine 1", "lo"), clock.now() + 0.2)
        client.close()
    assert not found.ok and "(127.0.0.1, 127.0.0.2) only the first is tried" in found.detail


def test_a_machine_that_asks_but_cannot_be_reached_is_told_from_one_without_a_doctor() -> None:
    port = free_ports(2)
    with DoctorServer("127.0.0.1", port, 0, [1]) as server, zmq.Context() as context:
        hidden = DoctorClient(context, "127.0.0.1", port)
        next(_check_machine(hidden, set(), (1, 0), ("machine 0", "lo"), clock.now() + 5))
        client = DoctorClient(context, "127.0.0.1", port + 1)
        client._socket.linger = 0
        (found,) = _check_machine(client, server.heard, (0, 1), ("machine 1", "lo"), clock.now() + 0.2)
        hidden.close()
        client.close()
    assert not found.ok and "it reaches this machine" in found.detail and "mapping.behind_nat" in found.detail


def test_the_doctor_server_ignores_malformed_requests() -> None:
    port = free_ports(4)
    with DoctorServer("127.0.0.1", port, 4, [0]) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(f"tcp://127.0.0.1:{port}")
            for bad in (b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb(["who"]), msgpack.packb([1, "x", None])):
                stranger.send(bad)
            assert not stranger.poll(200)
        client = DoctorClient(context, "127.0.0.1", port)
        assert client.ask("who") is not None and client.ask("who")[0] == 4  # type: ignore[index]
        for other in (0, 5):
            client.ask("who", other)
            client.ask("done", other)
        client.close()
    assert server.heard == server.done == {0}, "machine 5 is none of the run's"


@contextlib.contextmanager
def slow_proxy(port: int, bytes_per_second: float, passed: float = math.inf) -> Iterator[int]:
    """Forwards one connection to `port`, so many bytes per second to the server, and nothing after the first `passed`
    bytes. Yields its own port."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as opened:

        def forward(source: socket.socket, to: socket.socket, rate: float, left: float) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(4096):
                    time.sleep(len(data) / rate)
                    left -= len(data)
                    if left >= 0:
                        to.sendall(data)

        def serve() -> None:
            inner = opened.enter_context(server.accept()[0])
            outer = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            threading.Thread(target=forward, args=(outer, inner, math.inf, math.inf), daemon=True).start()
            forward(inner, outer, bytes_per_second, passed)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def check_through_proxy(rate: float, passed: float) -> Finding:
    port = free_ports(1)
    with DoctorServer("127.0.0.1", port, 1), zmq.Context() as context, slow_proxy(port, rate, passed) as proxy:
        client = DoctorClient(context, "127.0.0.1", proxy)
        client._socket.linger = 0
        try:
            return next(_check_machine(client, set(), (0, 1), ("machine 1", "eth0"), clock.now() + 10))
        finally:
            client.close()


def test_a_slow_link_is_measured_with_smaller_blocks() -> None:
    """A block of 1 MiB takes longer than the deadline there."""
    found = check_through_proxy(6e4, math.inf)
    assert found.ok and found.link is not None, found
    assert 0.3 < found.link["mbit_per_second"] < 0.6


def test_a_path_that_loses_large_packets_is_told_from_one_that_loses_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BLOCK_SECONDS", 1.0)
    found = check_through_proxy(1e9, 8192)
    assert found.ok is False and "large packets get lost (try a smaller MTU" in found.detail


@pytest.mark.slow
def test_a_host_name_that_is_loopback_on_its_own_machine_is_refused_before_the_start() -> None:
    """A line `127.0.1.1 NAME` in /etc/hosts causes it; the other machines of the mapping could not connect."""
    config, port = str(ROOT / "configs" / "two_machines.yaml"), free_ports(16)
    chosen = mapping(port, "localhost, 192.0.2.77")
    with pytest.raises(EnvironmentFault, match=r"machine 0 listens on 'localhost', which is 127.0.0.1 here"):
        facts(load(config, [chosen]), Request(config, [chosen], machine=0))
    assert facts(load(config, [chosen]), Request(config, [chosen], machine=1)).machine == 1
    result = CliRunner().invoke(main, ["doctor", config, "-m", "0", "-s", chosen, "--json", "--wait", "0.1"])
    findings = parse_findings("\n".join(line for line in result.output.splitlines() if line.startswith("{")))
    assert result.exit_code == 3 and findings["addresses"]["ok"] is False
    assert "'localhost'" in str(findings["addresses"]["detail"])


def test_a_host_name_that_cannot_be_resolved_is_refused_on_its_machine_and_a_warning_elsewhere(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    config = str(ROOT / "configs" / "two_machines.yaml")
    chosen = mapping(free_ports(16), "nohost, 192.0.2.77")
    with pytest.raises(EnvironmentFault, match=r"host of machine 0 in the mapping is 'nohost', .* be resolved"):
        facts(load(config, [chosen]), Request(config, [chosen], machine=0))
    here = Request(config, [chosen], machine=1)
    assert facts(load(config, [chosen]), here).machine == 1
    ((kind, warning),) = address_warnings(load(config, [chosen]), here)
    assert kind == "warning" and "'nohost' (machine 0)" in warning
    result = CliRunner().invoke(main, ["doctor", config, "-m", "0", "-s", chosen, "--json", "--wait", "0.1"])
    findings = parse_findings("\n".join(line for line in result.output.splitlines() if line.startswith("{")))
    assert result.exit_code == 3 and findings["addresses"]["ok"] is False
    chosen = mapping(free_ports(16), "nohost, 127.0.0.1")
    result = CliRunner().invoke(main, ["doctor", config, "-m", "1", "-s", chosen, "--wait", "0.1"])
    assert result.exit_code == 3 and re.search(r"machine 0 \(nohost:\d+\): its name cannot be resolved", result.output)


def test_interface_to_returns_the_interface_of_the_route_to_a_host() -> None:
    assert interface_to("127.0.0.1") == "lo" and interface_to("no-such-host.invalid") is None
