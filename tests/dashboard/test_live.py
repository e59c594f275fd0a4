"""The current state of a run: what its nodes are doing, and the machines that they run on."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from decentnode import clock
from decentnode.dashboard import live
from tests.dashboard.folder import write_run_folder


def write_status(run: Path, uid: int, **fields: object) -> None:
    """Writes the status.json of a node that is in its local steps; `fields` replace or add entries."""
    (run / "nodes" / f"{uid:03d}" / "status.json").write_text(json.dumps({
        "uid": uid, "pid": os.getpid(), "time": clock.wall(), "round": 1, "rounds": 6, "doing": "local steps",
        "waiting_for": [], "waiting_seconds": 0.0, "edges": {}, "faults": {}, **fields}))  # fmt: skip


@pytest.fixture
def poll_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the least time between two reads of the files."""
    monkeypatch.setattr(live, "NODES_SECONDS", 0.0)
    monkeypatch.setattr(live, "MACHINES_SECONDS", 0.0)


def test_status_changes_list_only_nodes_whose_activity_changed(tmp_path: Path, poll_without_delay: None) -> None:
    run = write_run_folder(tmp_path)
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
    os.utime(run / "nodes" / "000" / "status.json", ns=(1, 1))  # differs even where time stamps are coarse
    status.poll([0, 1, 2, 3])
    assert status.changes(first) == {"0": {"doing": "evaluation", "for": [], "seconds": 0.0}}
    assert status.pids == {os.getpid()}


def test_a_node_whose_process_has_ended_is_shown_as_gone(tmp_path: Path, poll_without_delay: None) -> None:
    run = write_run_folder(tmp_path)
    write_status(run, 0, pid=2**22 + 1, time=clock.wall() - 60)
    status = live.Status(run)
    status.poll([0])
    assert status.changes(0)["0"]["doing"] == "gone"


@pytest.mark.parametrize(("text", "expected"), [
    ("", {}), ("[]", {}), ("{", {}), ("null", {}),
    ('{"doing": 5, "waiting_for": "x", "waiting_seconds": []}', {"0": {"doing": "gone", "for": [], "seconds": 0.0}}),
])  # fmt: skip
def test_a_status_file_that_is_no_object_is_left_out_and_fields_of_wrong_types_are_replaced(
    tmp_path: Path, poll_without_delay: None, text: str, expected: dict[str, dict[str, object]]
) -> None:
    run = write_run_folder(tmp_path)
    (run / "nodes" / "000" / "status.json").write_text(text)
    status = live.Status(run)
    status.poll([0])
    assert status.changes(0) == expected


def test_each_machine_lists_its_nodes_and_the_local_machine_its_load(tmp_path: Path, poll_without_delay: None) -> None:
    run = write_run_folder(tmp_path)
    (run / "env.json").write_text(json.dumps({"machine": 0, "host": socket.gethostname(), "cores": 4, "cpu": "some"}))
    first, second = live.Machines(run).poll({os.getpid()})
    assert (first["host"], first["uids"], first["cores"]) == ("host0", [0, 2], "4")
    assert first["load"]["run_memory"] > 1e6
    assert second == {"machine": 1, "host": "host1", "uids": [1, 3]}


def test_the_state_of_a_run_is_read_from_its_summary_and_its_supervisor(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    assert live.state_of_run(run)["state"] == "finished"
    failed = {"status": "failed", "failure": {"node": 3, "title": "node 3 was killed\nTraceback ..."}}
    (run / "summary.json").write_text(json.dumps(failed))
    assert (live.state_of_run(run)["state"], live.state_of_run(run)["why"]) == ("failed", "node 3 was killed")
    (run / "summary.json").unlink()
    assert live.state_of_run(run)["state"] == "unfinished"
    (run / "supervisor.json").write_text(json.dumps({"pid": 2**22 + 1, "began": "1", "host": socket.gethostname(),
                                                     "boot": "x"}))  # fmt: skip
    assert live.state_of_run(run)["state"] == "died"
