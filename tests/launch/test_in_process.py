"""Runs with all nodes in one process leave the same files and events as runs with a process per node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import decentnode
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervisor import supervise
from tests.launch.faults import experiment
from tests.launch.stand_ins import RecordingObserver

ROOT = Path(__file__).parents[2]
COMMON = [
    "graph={name: regular, nodes: 3, degree: 2}", "mapping={name: linear, nodes_per_machine: 3, threads: 1}",
    "node={rounds: 3, evaluate_every: 0}",
]  # fmt: skip


def run_and_read_files(folder: Path, *overrides: str) -> tuple[int, list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Runs the quickstart; returns the exit code, and for each node its events and its last status."""
    request = Request(str(ROOT / "configs" / "quickstart.yaml"), [f"run.dir={folder}", *COMMON, *overrides])
    outcome = supervise(request, Observer(), command="decentnode run quickstart.yaml")
    assert outcome.run_dir is not None
    nodes = sorted((outcome.run_dir / "nodes").iterdir())
    events = [[json.loads(line) for line in (node / "events.jsonl").read_text().splitlines()] for node in nodes]
    return outcome.exit_code, events, [json.loads((node / "status.json").read_text()) for node in nodes]


@pytest.mark.slow
def test_events_and_status_equal_those_of_separate_processes(tmp_path: Path) -> None:
    found = {}
    for way in ("inproc", "zeromq"):
        code, events, status = run_and_read_files(tmp_path / way, f"communication={way}")
        kept = [[(event["uid"], event["kind"], event["peer"], event["detail"]) for event in of_node
                 if event["kind"] != "connection_lost"] for of_node in events]  # fmt: skip
        found[way] = code, kept, [(node.keys(), node["uid"], node["round"], node["doing"]) for node in status]
    assert found["inproc"] == found["zeromq"]
    code, kept, _ = found["inproc"]
    assert code == 0
    assert kept == [[(uid, "joined", None, ""), (uid, "finished", None, "3 rounds")] for uid in range(3)]


@pytest.mark.slow
def test_events_tell_the_node_that_diverged_from_those_that_lost_it_as_a_peer(tmp_path: Path) -> None:
    code, events, status = run_and_read_files(tmp_path, "communication=inproc", "training.optimizer.lr=1e30")
    assert code != 0
    assert [node["doing"] for node in status] == ["failed"] * 3
    last = [(of_node[-1]["kind"], of_node[-1]["peer"]) for of_node in events]
    failed = [uid for uid, (kind, _) in enumerate(last) if kind == "diverged"]
    assert len(failed) == 1
    assert all(event == ("peer_lost", failed[0]) for uid, event in enumerate(last) if uid not in failed)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_reported_while_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decentnode.checkpoint.store.write", full)
    observer = RecordingObserver()
    sections = experiment(node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 1}})
    decentnode.run(sections, processes=False, progress=observer, run={"dir": str(tmp_path)})
    text, = [text for text in observer.notices if "checkpoint after" in text]
    assert text.startswith("node 0: the checkpoint after round 1 could not be written: [Errno 28] No space left")
