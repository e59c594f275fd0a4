"""End to end: processes that are not in the mapping join runs, die and leave."""

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
def test_newcomers_join_an_asynchronous_run_die_and_leave_and_a_node_of_the_mapping_leaves(
    tmp_path: Path, keys: dict[str, str]
) -> None:
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

    def wait_for_members(members: list[int]) -> None:
        wait_until(lambda: bool(generations()) and generations()[-1]["members"] == members, f"members {members}")

    def join(folder: str) -> Any:
        return started(tmp_path, "join", "--seed", f"127.0.0.1:{first}", "--samples-of", "1", "--run-dir", folder)

    with started(tmp_path, "run", "open.yaml", *sets) as whole:
        wait_until(lambda: (latest / "nodes" / "000" / "metrics.jsonl").exists(), "the first round")
        with join("one") as newcomer:
            wait_for_members([0, 1, 2, 3, 4])
            _kill(newcomer)
            wait_for_members([0, 1, 2, 3])
        with join("two") as newcomer:
            wait_for_members([0, 1, 2, 3, 5])
            psutil.Process(newcomer.pid).send_signal(signal.SIGINT)
            assert newcomer.wait() == 0
            wait_for_members([0, 1, 2, 3])
        assert generations()[-1]["departed"] == [5]
        code, out, _ = run(tmp_path, "leave", str(latest), "--node", "3")
        assert (code, out) == (0, "node 3 leaves after its round\n")
        wait_for_members([0, 1, 2])
        with join("three") as newcomer:
            wait_for_members([0, 1, 2, 6])
            psutil.Process(whole.pid).send_signal(signal.SIGINT)
            whole.wait()
            newcomer.wait()
    found = json.loads((latest / "summary.json").read_text())
    assert found["newcomers"].keys() == {"4", "5", "6"} and found["left"].keys() == {"3"} and found["lost"] == {}
    assert found["own_rounds"] and found["members"] == [0, 1, 2, 6]
    for uid in range(3):
        rounds = [record["round"] for record in read_kind(latest / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")]
        assert rounds == sorted(set(rounds)) and len(rounds) > 20
    code, _, err = run(tmp_path, "run", "open.yaml", *sets, "--resume", f"--set=node.rounds={max(rounds) + 20}")
    assert code == 0, err
    found = json.loads((latest / "summary.json").read_text())
    assert found["resumed"]["round"] > 0 and "newcomers" not in found


@pytest.mark.slow
def test_a_newcomer_joins_a_run_with_faults_and_its_records_are_checked_once_collected(tmp_path: Path) -> None:
    first = free_ports(8)
    faults = [{"do": "kill", "nodes": [3], "at_round": 5}, {"do": "drop", "share": 0.02},
              {"do": "slow", "nodes": [4], "factor": 1.5, "at_round": 1}]  # fmt: skip
    training = {**experiment()["training"], "local_steps": 20}
    node = {"rounds": 100_000, "evaluate_every": 0, "missing": "regroup", "newcomers": 1, "restarts": 3}
    communication = {"name": "zeromq", "timeout_seconds": 60, "suspect_seconds": 10}
    mapping = {"nodes_per_machine": 4, "base_port": first}
    sections = experiment(training=training, node=node, communication=communication, mapping=mapping, faults=faults)
    (tmp_path / "open.yaml").write_text(yaml.safe_dump(sections))
    latest = tmp_path / "runs" / "tiny" / "latest"
    metrics = latest / "nodes" / "000" / "metrics.jsonl"
    with started(tmp_path, "run", "open.yaml") as whole:
        wait_until(metrics.exists, "the first round")
        with started(tmp_path, "join", "--seed", f"127.0.0.1:{first}", "--samples-of", "1", "--threads", "1",
                     "--run-dir", "came") as newcomer:  # fmt: skip
            (folder,) = wait_for_folder(tmp_path / "came" / "joined")
            events = folder / "nodes" / "004" / "events.jsonl"
            wait_until(lambda: events.exists() and sum(1 for _ in read_kind(events, "mixed")) > 5, "rounds of node 4")
            wait_until(lambda: [*read_kind(metrics, "generation")][-1]["members"] == [0, 1, 2, 3, 4], "all are there")
            psutil.Process(whole.pid).send_signal(signal.SIGINT)
            out, err = whole.communicate()
            newcomer.wait()
    summary = json.loads((latest / "summary.json").read_text())
    assert summary["checked"].keys() == {"payloads", "generations", "unseen"}, out + err
    assert summary["checked"]["unseen"].keys() == {"4"} and summary["process_faults"] == {"kill": 1}
    details = [event["detail"] for event in read_kind(events, "fault")]
    assert any('"slow"' in detail for detail in details) and any('"drop"' in detail for detail in details)
    code, out, err = run(tmp_path, "collect", "tiny", "came")
    assert code == 0 and "node 4, details of machine 1" in out, out + err
    code, out, err = run(tmp_path, "replay", "tiny", "--check", "--json")
    counts = json.loads(out)
    assert code == 0 and counts["nodes"] == 5 and "unseen" not in counts, out + err
    assert counts["payloads"] > summary["checked"]["payloads"] + summary["checked"]["unseen"]["4"]


def wait_for_folder(parent: Path) -> list[Path]:
    def run_folders() -> list[Path]:
        return [path for path in parent.glob("2*") if not path.is_symlink()]

    wait_until(lambda: bool(run_folders()), "a newcomer's folder")
    return run_folders()


def _kill(command: Command) -> None:
    processes = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=60)
