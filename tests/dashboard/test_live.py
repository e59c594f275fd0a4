"""What nodes do at this moment, and on which machines."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from decentnode import clock
from decentnode.dashboard import live
from tests.dashboard.folder import run_folder


def write_status(run: Path, uid: int, **fields: object) -> None:
    (run / "nodes" / f"{uid:03d}" / "status.json").write_text(json.dumps({
        "uid": uid, "pid": os.getpid(), "time": clock.wall(), "round": 1, "rounds": 6, "doing": "local steps",
        "waiting_for": [], "waiting_seconds": 0.0, "edges": {}, "faults": {}, **fields}))  # fmt: skip


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "NODES_SECONDS", 0.0)
    monkeypatch.setattr(live, "MACHINES_SECONDS", 0.0)


def test_only_nodes_that_do_something_else_are_told(tmp_path: Path, at_once: None) -> None:
    run = run_folder(tmp_path)
    write_status(run, 0)
    write_status(run, 1, doing="exchange", waiting_for=[0, 2], waiting_seconds=1.5)
    status = live.Status(run)
    status.poll([0, 1, 2, 3])
    first = status.version
    assert status.changes(0) == {
        "0": {"doing": "local steps", "for": [], "seconds": 0.0},
        "1": {"doing": "exchange", "for": [0, 2], "seconds": 1.5},
    }
    status.poll([0, 1, 2, 3])
    assert status.changes(first) == {}
    write_status(run, 0, doing="evaluation")
    os.utime(run / "nodes" / "000" / "status.json", ns=(1, 1))  # another time, however coarse the disk's is
    status.poll([0, 1, 2, 3])
    assert status.changes(first) == {"0": {"doing": "evaluation", "for": [], "seconds": 0.0}}
    assert status.pids == {os.getpid()}


def test_a_node_whose_process_is_gone_is_said_to_be(tmp_path: Path, at_once: None) -> None:
    run = run_folder(tmp_path)
    write_status(run, 0, pid=2**22 + 1, time=clock.wall() - 60)
    status = live.Status(run)
    status.poll([0])
    assert status.changes(0)["0"]["doing"] == "gone"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"doing": 5, "waiting_for": "x", "waiting_seconds": []}', "null"])
def test_a_status_that_cannot_be_read_is_left_out(tmp_path: Path, at_once: None, text: str) -> None:
    run = run_folder(tmp_path)
    (run / "nodes" / "000" / "status.json").write_text(text)
    status = live.Status(run)
    status.poll([0])
    assert all(set(each) == {"doing", "for", "seconds"} for each in status.changes(0).values())


def test_machines_have_their_nodes_and_this_one_its_load(tmp_path: Path, at_once: None) -> None:
    run = run_folder(tmp_path)
    (run / "env.json").write_text(json.dumps({"machine": 0, "host": socket.gethostname(), "cores": 4, "cpu": "some"}))
    first, second = live.Machines(run).poll({os.getpid()})
    assert (first["host"], first["uids"], first["cores"]) == ("host0", [0, 2], "4")
    assert first["load"]["run_memory"] > 1e6
    assert second == {"machine": 1, "host": "host1", "uids": [1, 3]}


def test_the_state_of_a_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert live.state_of_run(run)["state"] == "finished"
    failed = {"status": "failed", "failure": {"node": 3, "title": "node 3 was killed\nTraceback ..."}}
    (run / "summary.json").write_text(json.dumps(failed))
    assert (live.state_of_run(run)["state"], live.state_of_run(run)["why"]) == ("failed", "node 3 was killed")
    (run / "summary.json").unlink()
    assert live.state_of_run(run)["state"] == "unfinished"
    (run / "supervisor.json").write_text(json.dumps({"pid": 2**22 + 1, "began": "1", "host": socket.gethostname(),
                                                     "boot": "x"}))  # fmt: skip
    assert live.state_of_run(run)["state"] == "died"
