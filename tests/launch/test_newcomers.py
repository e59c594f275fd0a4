"""End to end: processes that are in no mapping come to a run whose nodes are in rounds of their own, die and leave."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from decentnode.metrics.reader import read_kind
from tests.cli.terminal import wait_until
from tests.commands import Command, run, started
from tests.conftest import free_ports
from tests.launch.faults import experiment


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    {"node.schedule": "gossip_async"}, {"node.schedule": "gossip_async", "sharing.name": "push_sum"},
    {"node.schedule": "ad_psgd"},
], ids=["gossip_async", "push_sum", "ad_psgd"])  # fmt: skip
def test_newcomers_come_die_and_leave_and_so_does_a_node_of_the_mapping(tmp_path: Path, keys: dict[str, str]) -> None:
    first = free_ports(8)
    training = {**experiment()["training"], "local_steps": None, "local_seconds": 0.05}
    node = {"rounds": 1_000_000, "evaluate_every": 0, "missing": "regroup", "newcomers": 3, "checkpoint": {"every": 5}}
    communication = {"name": "auto", "timeout_seconds": 60, "suspect_seconds": 4}
    mapping = {"nodes_per_machine": 4, "base_port": first}
    sections = experiment(training=training, node=node, communication=communication, mapping=mapping)
    (tmp_path / "open.yaml").write_text(yaml.safe_dump(sections))
    sets = [f"--set={key}={value}" for key, value in keys.items()]
    latest = tmp_path / "runs" / "tiny" / "latest"

    def generations() -> list[dict[str, Any]]:
        file = latest / "nodes" / "000" / "metrics.jsonl"
        return list(read_kind(file, "generation")) if file.exists() else []

    def comes_to(members: list[int]) -> None:
        wait_until(lambda: bool(generations()) and generations()[-1]["members"] == members, f"members {members}")

    def joins(folder: str) -> Any:
        return started(tmp_path, "join", "--seed", f"127.0.0.1:{first}", "--samples-of", "1", "--run-dir", folder)

    with started(tmp_path, "run", "open.yaml", *sets) as whole:
        wait_until(lambda: (latest / "nodes" / "000" / "metrics.jsonl").exists(), "the first round")
        with joins("one") as newcomer:
            comes_to([0, 1, 2, 3, 4])
            _kill(newcomer)
            comes_to([0, 1, 2, 3])
        with joins("two") as newcomer:
            comes_to([0, 1, 2, 3, 5])
            psutil.Process(newcomer.pid).send_signal(signal.SIGINT)
            assert newcomer.wait() == 0
            comes_to([0, 1, 2, 3])
        assert generations()[-1]["departed"] == [5]
        code, out, _ = run(tmp_path, "leave", str(latest), "--node", "3")
        assert (code, out) == (0, "node 3 leaves after its round\n")
        comes_to([0, 1, 2])
        with joins("three") as newcomer:
            comes_to([0, 1, 2, 6])
            psutil.Process(whole.pid).send_signal(signal.SIGINT)
            whole.wait()
            newcomer.wait()
    found = json.loads((latest / "summary.json").read_text())
    assert found["newcomers"].keys() == {"4", "5", "6"} and found["left"].keys() == {"3"} and found["lost"] == {}
    assert found["own_rounds"] and found["members"] == [0, 1, 2, 6]
    for uid in range(3):
        rounds = [each["round"] for each in read_kind(latest / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")]
        assert rounds == sorted(set(rounds)) and len(rounds) > 20, "none twice"
    code, _, err = run(tmp_path, "run", "open.yaml", *sets, "--resume", f"--set=node.rounds={max(rounds) + 20}")
    assert code == 0, err
    found = json.loads((latest / "summary.json").read_text())
    assert found["resumed"]["round"] > 0 and "newcomers" not in found


def _kill(command: Command) -> None:
    family = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    for each in family:
        each.kill()
    psutil.wait_procs(family, timeout=60)
