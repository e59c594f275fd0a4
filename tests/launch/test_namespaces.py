"""Runs on two machines: two network namespaces joined by a virtual cable, with IPv4, IPv6 and host names. Each finds
out by its addresses which machine it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import ROOT, Command, started


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def connect_hosts(networks: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yields, for each of two hosts, its namespace and its addresses in `networks`, such as "10.0.0." or "fd00::".
    Skips the test where no namespaces can be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    prefix = f"dn{os.getpid() % 100000}"
    hosts = [(f"{prefix}{side}", *(f"{network}{number}" for network in networks))
             for number, side in enumerate("ab", 1)]  # fmt: skip
    try:
        try:
            for name, *_ in hosts:
                ip("netns", "add", name)
            ip("link", "add", f"{prefix}va", "type", "veth", "peer", "name", f"{prefix}vb")
            for (name, *addresses), side in zip(hosts, "ab", strict=True):
                ip("link", "set", f"{prefix}v{side}", "netns", name)
                for address in addresses:
                    size, more = ("/64", ["nodad"]) if ":" in address else ("/24", [])
                    ip("-n", name, "addr", "add", address + size, "dev", f"{prefix}v{side}", *more)
                ip("-n", name, "link", "set", f"{prefix}v{side}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        for name, *_ in hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def choose_network(ip_version: int) -> str:
    """Returns the prefix of a network that belongs to this process alone."""
    if ip_version == 6:
        return f"fd00:{os.getpid() % 65536:x}::"
    return f"10.{(os.getpid() >> 8) % 250 + 1}.{os.getpid() % 250 + 1}."


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, ...]]]:
    yield from connect_hosts([choose_network(4)])


@pytest.fixture
def hosts6() -> Iterator[list[tuple[str, ...]]]:
    yield from connect_hosts([choose_network(6)])


@pytest.fixture
def named_hosts(hosts6: list[tuple[str, ...]]) -> Iterator[list[tuple[str, str]]]:
    """Yields namespace and name of two hosts whose names only an /etc/hosts of their own resolves, to IPv6 addresses.
    Like `ip netns exec`, ENTER_NAMESPACE mounts that file."""
    folders = [Path("/etc/netns", name) for name, _ in hosts6]
    names = [f"{name}-host" for name, _ in hosts6]
    lines = "".join(f"{address} {name}\n" for (_, address), name in zip(hosts6, names, strict=True))
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        yield [(namespace, name) for (namespace, _), name in zip(hosts6, names, strict=True)]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


ENTER_NAMESPACE = """
import ctypes, os
from pathlib import Path

def call(name, *arguments):
    if ctypes.CDLL(None, use_errno=True)[name](*arguments):
        raise OSError(ctypes.get_errno(), name)

with open("/run/netns/{0}") as space:
    call("setns", space.fileno(), 0x40000000)  # CLONE_NEWNET
call("unshare", 0x20000)  # CLONE_NEWNS
call("mount", b"", b"/", None, 0x84000, None)  # MS_SLAVE | MS_REC: what is mounted here stays here
for file in Path("/etc/netns/{0}").glob("*"):
    call("mount", bytes(file), b"/etc/" + os.fsencode(file.name), None, 0x1000, None)  # MS_BIND
"""
"""Python code that does what `ip netns exec` does before it runs a command, as far as these tests need it."""


@contextlib.contextmanager
def launch(config: Path, folder: Path, *machines: tuple[tuple[str, ...], str]) -> Iterator[list[Command]]:
    """Runs `decentnode launch` on each host. machines: (host, value of --machine)."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(started(ROOT, "launch", str(config), "--machine", machine, "--plain", "--run-dir",
                                           str(folder / host[0]), merged=True, before=ENTER_NAMESPACE.format(host[0])))
               for host, machine in machines]  # fmt: skip


def write_config(folder: Path, hosts: list[tuple[str, ...]], **more: str) -> Path:
    path = folder / "two.yaml"
    addresses = ", ".join(f'"{address}"' for _, address in hosts)
    lines = {
        "extends": str(ROOT / "configs" / "quickstart.yaml"),
        "name": "two",
        "graph": "{name: complete, nodes: 4}",
        "node": "{rounds: 6, evaluate_every: 3}",
        "mapping": f"{{name: linear, machines: 2, nodes_per_machine: 2, addresses: [{addresses}]}}",
        **more,
    }
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return path


@pytest.mark.slow
def test_two_machines_find_their_own_numbers_and_train(hosts: list[tuple[str, ...]], tmp_path: Path) -> None:
    config = write_config(tmp_path, hosts)
    with launch(config, tmp_path, *((host, "auto") for host in hosts)) as processes:
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)
    assert f"on {hosts[1][1]}: " in outputs[0]
    (summary,) = (tmp_path / hosts[0][0]).glob("two/latest/summary.json")
    figures = json.loads(summary.read_text())
    assert sorted(figures["nodes"], key=int) == ["0", "1", "2", "3"] and figures["rounds"] == 6
    assert figures["accuracy_mean"] > 0.5


@pytest.mark.slow
def test_a_machine_that_does_not_join_in_time_is_named(hosts: list[tuple[str, ...]], tmp_path: Path) -> None:
    config = write_config(tmp_path, hosts, communication="{name: auto, start_timeout_seconds: 3}")
    with launch(config, tmp_path, (hosts[0], "auto")) as (process,):
        output, _ = process.communicate()
        assert process.wait() == 4, output
    assert "machine 1" in output and hosts[1][1] in output, output


@pytest.mark.slow
def test_two_machines_train_over_ipv6_by_address_and_by_name(
    hosts6: list[tuple[str, ...]], named_hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    config = write_config(tmp_path, [hosts6[0], named_hosts[1]], node="{rounds: 2}")
    with launch(config, tmp_path, *zip(hosts6, ("auto", "1"), strict=True)) as processes:
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
def test_a_host_name_that_resolves_to_loopback_on_its_own_machine_ends_the_run_at_once(
    named_hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    own = Path("/etc/netns", named_hosts[0][0], "hosts")
    own.write_text(own.read_text().replace("127.0.0.1 localhost", f"127.0.1.1 {named_hosts[0][1]}\n127.0.0.1 localhost")
                   .replace(f"::1 {named_hosts[0][1]}\n", "::9 nobody\n"))  # fmt: skip
    with launch(write_config(tmp_path, named_hosts), tmp_path, (named_hosts[0], "0")) as (process,):
        output, _ = process.communicate()
        assert process.wait() == 3, output
    assert f"listens on '{named_hosts[0][1]}', which is 127.0.1.1 here" in output, output


def throttle(hosts: list[tuple[str, ...]]) -> None:
    """Limits the cable to 2 MB/s each way, behind a buffer that takes half a second to empty, as slow links have."""
    prefix = hosts[0][0][:-1]
    for (name, *_), side in zip(hosts, "ab", strict=True):
        words = ["dev", f"{prefix}v{side}", "root", "tbf", "rate", "16mbit", "burst", "64kb", "limit", "1mb"]
        try:
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", *words], check=True,
                           capture_output=True, timeout=20)  # fmt: skip
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no throttled cable here: {error}")


@pytest.mark.slow
def test_no_node_is_suspected_while_the_link_is_saturated_for_longer_than_the_suspicion_time(
    hosts: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """The models of a round take six seconds to send. Answers took no time before, so that after 1.5 s of silence a
    node would be suspected."""
    throttle(hosts)
    config = write_config(tmp_path, hosts, model="{name: mlp, hidden: [800, 800]}", run="{record: true}",
                          node="{rounds: 3, evaluate_every: 0, missing: regroup}")  # fmt: skip
    with launch(config, tmp_path, *((host, "auto") for host in hosts)) as processes:
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)
    files = {file.resolve() for host, _ in hosts for file in (tmp_path / host).glob("two/*/nodes/*/events.jsonl")}
    events = [json.loads(line)["kind"] for file in files for line in file.read_text().splitlines()]
    assert events.count("finished") == 4 and not {"suspected", "generation_over", "outside"} & {*events}
