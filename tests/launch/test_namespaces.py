"""Two machines for real: two network namespaces joined by a cable, each finding out by itself which machine it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of two hosts; skipped where namespaces may not be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    mark = f"dn{os.getpid() % 100000}"
    network = f"10.{(os.getpid() >> 8) % 250 + 1}.{os.getpid() % 250 + 1}"
    made = [(f"{mark}{side}", f"{network}.{number}") for number, side in enumerate("ab", 1)]
    try:
        try:
            for name, _ in made:
                ip("netns", "add", name)
            ip("link", "add", f"{mark}va", "type", "veth", "peer", "name", f"{mark}vb")
            for (name, address), side in zip(made, "ab", strict=True):
                ip("link", "set", f"{mark}v{side}", "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{mark}v{side}")
                ip("-n", name, "link", "set", f"{mark}v{side}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        for name, _ in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def start(host: tuple[str, str], config: Path, folder: Path) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host[0], sys.executable, "-m", "decentnode", "launch", str(config),
               "--machine", "auto", "--plain", "--run-dir", str(folder / host[0])]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def write_config(folder: Path, hosts: list[tuple[str, str]], **more: str) -> Path:
    path = folder / "two.yaml"
    addresses = ", ".join(address for _, address in hosts)
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


def test_two_machines_find_themselves_and_train(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    config = write_config(tmp_path, hosts)
    processes = [start(host, config, tmp_path) for host in hosts]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert f"on {hosts[1][1]}: " in outputs[0]
    (summary,) = (tmp_path / hosts[0][0]).glob("two/latest/summary.json")
    figures = json.loads(summary.read_text())
    assert sorted(figures["nodes"], key=int) == ["0", "1", "2", "3"] and figures["rounds"] == 6
    assert figures["accuracy_mean"] > 0.5


def test_a_machine_that_never_comes_is_named(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    config = write_config(tmp_path, hosts, communication="{name: auto, start_timeout_seconds: 3}")
    process = start(hosts[0], config, tmp_path)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 4, output
    assert "machine 1" in output and hosts[1][1] in output, output
