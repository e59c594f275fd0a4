"""The open files that a run needs are known before it starts, and compared with the system's limit."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from decentnode.errors import EnvironmentFault
from decentnode.experiment import load
from decentnode.launch import open_files
from tests.cli.terminal import wait_until
from tests.commands import started
from tests.launch.faults import experiment


def files_of(process: psutil.Process, node: Path) -> int:
    """Returns how many files a child of `process` has open that writes to the folder `node`; 0 if there is none."""
    for each in process.children(recursive=True):
        folder = Path("/proc", str(each.pid), "fd")
        try:
            if Path(os.readlink(folder / "1")).parent == node:
                return len(os.listdir(folder))
        except OSError:  # it has ended
            continue
    return 0


@pytest.mark.parametrize("communication", ["auto", "zeromq"])
@pytest.mark.slow
def test_the_count_is_that_of_a_running_node(communication: str, tmp_path: Path) -> None:
    """Node 0 has most, as it is the root of the control tree: all other nodes are linked to it."""
    sections = experiment(graph={"name": "ring", "nodes": 8}, communication={"name": communication},
                          mapping={"nodes_per_machine": 8}, node={"rounds": 100_000})  # fmt: skip
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(sections))
    latest = tmp_path / "runs" / "tiny" / "latest"
    with started(tmp_path, "run", "tiny.yaml") as process:
        wait_until(lambda: (latest / "nodes" / "000" / "metrics.jsonl").exists(), "the first round")
        counted = open_files.count(load(config), 0)
        node = latest.resolve() / "nodes" / "000"
        wait_until(lambda: files_of(psutil.Process(process.pid), node) >= .9 * counted.process, "all connections")
        most = max(files_of(psutil.Process(process.pid), node) for _ in range(100))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
    assert counted.nodes == 1 and most <= 1.05 * counted.process


def test_a_run_with_too_low_a_limit_is_refused_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment()))
    found = load(tmp_path / "tiny.yaml")
    open_files.check(found, 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 50))
    with pytest.raises(EnvironmentFault, match=r"a process of 1 node needs \d+, .* the limit is 50 \(ulimit -Hn\)"):
        open_files.check(found, 0)


@pytest.mark.slow
def test_the_run_itself_says_so(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment()))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))"
    with started(tmp_path, "run", "tiny.yaml", before=limit) as process:
        _, err = process.communicate(timeout=200)
    assert process.returncode == EnvironmentFault.exit_code and "the limit is 50" in err
