"""Two machines for real: two network namespaces joined by a cable, each finding out by itself which machine it is;
over IPv4, over IPv6, and by names."""

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


def cable(networks: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """(namespace, its addresses in `networks`, such as "10.0.0." or "fd00::") of two hosts; skipped where namespaces
    may not be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    mark = f"dn{os.getpid() % 100000}"
    made = [(f"{mark}{side}", *(f"{each}{number}" for each in networks)) for number, side in enumerate("ab", 1)]
    try:
        try:
            for name, *_ in made:
                ip("netns", "add", name)
            ip("link", "add", f"{mark}va", "type", "veth", "peer", "name", f"{mark}vb")
            for (name, *addresses), side in zip(made, "ab", strict=True):
                ip("link", "set", f"{mark}v{side}", "netns", name)
                for each in addresses:
                    size, more = ("/64", ["nodad"]) if ":" in each else ("/24", [])
                    ip("-n", name, "addr", "add", each + size, "dev", f"{mark}v{side}", *more)
                ip("-n", name, "link", "set", f"{mark}v{side}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        for name, *_ in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def network_of(kind: int) -> str:
    if kind == 6:
        return f"fd00:{os.getpid() % 65536:x}::"
    return f"10.{(os.getpid() >> 8) % 250 + 1}.{os.getpid() % 250 + 1}."


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, ...]]]:
    yield from cable([network_of(4)])


@pytest.fixture
def hosts6() -> Iterator[list[tuple[str, ...]]]:
    yield from cable([network_of(6)])


@pytest.fixture
def named(hosts6: list[tuple[str, ...]]) -> Iterator[list[tuple[str, str]]]:
    """(namespace, name) of two hosts that know each other's IPv6 addresses by /etc/hosts alone, as `ip netns exec`
    shows it to its commands."""
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


ENTER = """
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
"""What `ip netns exec` does before it becomes its command, as far as it matters here."""


@contextlib.contextmanager
def launched(config: Path, folder: Path, *machines: tuple[tuple[str, ...], str]) -> Iterator[list[Command]]:
    """A machine's share of the run each, by (host, --machine), on the hosts' own networks."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(started(ROOT, "launch", str(config), "--machine", machine, "--plain", "--run-dir",
                                           str(folder / host[0]), merged=True, before=ENTER.format(host[0])))
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
def test_two_machines_find_themselves_and_train(hosts: list[tuple[str, ...]], tmp_path: Path) -> None:
    config = write_config(tmp_path, hosts)
    with launched(config, tmp_path, *((host, "auto") for host in hosts)) as processes:
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)
    assert f"on {hosts[1][1]}: " in outputs[0]
    (summary,) = (tmp_path / hosts[0][0]).glob("two/latest/summary.json")
    figures = json.loads(summary.read_text())
    assert sorted(figures["nodes"], key=int) == ["0", "1", "2", "3"] and figures["rounds"] == 6
    assert figures["accuracy_mean"] > 0.5


@pytest.mark.slow
def test_a_machine_that_never_comes_is_named(hosts: list[tuple[str, ...]], tmp_path: Path) -> None:
    config = write_config(tmp_path, hosts, communication="{name: auto, start_timeout_seconds: 3}")
    with launched(config, tmp_path, (hosts[0], "auto")) as (process,):
        output, _ = process.communicate()
        assert process.wait() == 4, output
    assert "machine 1" in output and hosts[1][1] in output, output


@pytest.mark.slow
def test_two_machines_train_over_ipv6_by_address_and_by_name(
    hosts6: list[tuple[str, ...]], named: list[tuple[str, str]], tmp_path: Path
) -> None:
    config = write_config(tmp_path, [hosts6[0], named[1]], node="{rounds: 2}")
    with launched(config, tmp_path, *zip(hosts6, ("auto", "1"), strict=True)) as processes:
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
def test_a_name_that_is_loopback_to_its_own_machine_ends_there_at_once(
    named: list[tuple[str, str]], tmp_path: Path
) -> None:
    own = Path("/etc/netns", named[0][0], "hosts")
    own.write_text(own.read_text().replace("127.0.0.1 localhost", f"127.0.1.1 {named[0][1]}\n127.0.0.1 localhost")
                   .replace(f"::1 {named[0][1]}\n", "::9 nobody\n"))  # fmt: skip
    with launched(write_config(tmp_path, named), tmp_path, (named[0], "0")) as (process,):
        output, _ = process.communicate()
        assert process.wait() == 3, output
    assert f"listens on '{named[0][1]}', which is 127.0.1.1 here" in output, output


def throttle(hosts: list[tuple[str, ...]]) -> None:
    """Let 2 MB/s through the cable each way, behind a buffer that takes half a second to empty, as slow links have."""
    mark = hosts[0][0][:-1]
    for (name, *_), side in zip(hosts, "ab", strict=True):
        words = ["dev", f"{mark}v{side}", "root", "tbf", "rate", "16mbit", "burst", "64kb", "limit", "1mb"]
        try:
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", *words], check=True,
                           capture_output=True, timeout=20)  # fmt: skip
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no throttled cable here: {error}")


@pytest.mark.slow
def test_a_cable_that_is_full_for_longer_than_a_silence_may_last_makes_nobody_a_suspect(
    hosts: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """The models of a round fill it for six seconds; answers took no time before, so that 1.5 s of silence would do."""
    throttle(hosts)
    config = write_config(tmp_path, hosts, model="{name: mlp, hidden: [800, 800]}", run="{record: true}",
                          node="{rounds: 3, evaluate_every: 0, missing: regroup}")  # fmt: skip
    with launched(config, tmp_path, *((host, "auto") for host in hosts)) as processes:
        outputs = [process.communicate()[0] for process in processes]
        assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)
    files = {file.resolve() for host, _ in hosts for file in (tmp_path / host).glob("two/*/nodes/*/events.jsonl")}
    events = [json.loads(line)["kind"] for file in files for line in file.read_text().splitlines()]
    assert events.count("finished") == 4 and not {"suspected", "generation_over", "outside"} & {*events}
