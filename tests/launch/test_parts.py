"""The supervisor's parts, without processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentnode.launch import environment
from decentnode.launch.messages import (
    Absent,
    Bound,
    Channel,
    Facts,
    Failed,
    Finished,
    Header,
    Joined,
    Message,
    PeerFailed,
    Peers,
    Progress,
    Stop,
)
from decentnode.launch.outcome import Ledger, first_cause, summary
from decentnode.launch.signals import StopSignals
from decentnode.launch.sockets import BOARDS, SocketDir, remove_stale
from decentnode.launch.waiting import names, waiting_for

FACTS = Facts(
    "ring", "abc", "runs", "", "", "", "", 10, 5, False, 60.0, 60.0, 0, [[0, 1], [2, 3, 5]], ["10.0.0.1", "10.0.0.2"],
    {"0": 1, "1": 1},
)  # fmt: skip
FINISHED = Finished(0, {"uid": 0, "rounds": 10, "accuracy": 0.5}, False)

MESSAGES: list[Message] = [
    FACTS, Header([["graph", "ring"]]), Bound(1, "ipc://a", "ipc://b"), Joined(1), Absent([2], {"2": "late"}),
    Progress(1, {"kind": "round", "loss": None}), FINISHED, Failed(1, 8, "title", "text", True),
    Peers({"0": ["a", "b"]}), Stop(), PeerFailed(1, "gone"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    ours, theirs = multiprocessing.Pipe()
    Channel(ours).send(message)
    assert Channel(theirs).receive() == message
    ours.close()
    with pytest.raises(EOFError):
        Channel(theirs).receive()
    theirs.close()


def test_the_cause_is_the_first_that_is_no_echo() -> None:
    echo, cause = Failed(1, 5, "peer lost", "", True), Failed(2, 8, "boom", "")
    assert first_cause([echo, cause]) is cause
    assert first_cause([echo]) is echo
    assert first_cause([]) is None


def test_the_summary_of_a_node_that_died_is_what_it_last_told() -> None:
    ledger = Ledger()
    ledger.progress(1, {"kind": "round", "round": 3, "data_bytes_sent": 7, "metadata_bytes_sent": 2,
                        "evaluation_bytes_sent": 100})
    ledger.progress(1, {"kind": "evaluation", "round": 4, "accuracy": 0.25})
    ledger.finished[0] = FINISHED
    ledger.failures.append(Failed(1, 8, "boom", "..."))
    found = summary(FACTS, ledger, 8, None, 1.0, 2.0)
    assert (found["status"], found["exit_code"], found["rounds"]) == ("failed", 8, 4)
    assert (found["accuracy_min"], found["bytes_sent_total"], found["bytes_evaluation_total"]) == (0.25, 9, 100)
    assert found["failure"] == {"node": 1, "title": "boom", "exit_code": 8}


def test_reports_of_all_machines_come_through_uid_0() -> None:
    ledger = Ledger()
    reports: dict[str, dict[str, Any]] = {str(uid): {"uid": uid, "rounds": 10} for uid in (0, 1, 2, 3, 5)}
    ledger.finished[0] = replace(FINISHED, reports=reports)
    assert sorted(ledger.figures()) == [0, 1, 2, 3, 5]


def test_waiting_names_machines_and_nodes() -> None:
    assert names([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert names([]) == ""
    absent = Absent([2, 3, 5], {"5": "node 5 has another config"})
    text = waiting_for(FACTS, "joining", [0, 1], absent, 4.0)
    assert text == "machine 1 at 10.0.0.2 (node 2-3, 5); refused: node 5 has another config (4 s)"
    assert waiting_for(FACTS, "joining", [0], Absent([], {}), 4.0).startswith("the word to start")
    assert "node 0-1 to load" in waiting_for(FACTS, "starting", [0, 1], None, 4.0)
    assert "machine 0 (10.0.0.1)" in waiting_for(replace(FACTS, machine=1), "joining", [2], None, 4.0)


def test_signals_are_counted_and_wake_the_waiter() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
        assert signals.exit_code == 143
        signals.clear()
    assert signal.getsignal(signal.SIGTERM) is before


def test_socket_folders_of_killed_runs_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    monkeypatch.setattr("decentnode.launch.sockets.PREFIX", f"dn-test-{os.getpid()}-")
    alive, killed = SocketDir(), SocketDir()
    boards = [BOARDS / f"{Path(each.path).name}-0-3" for each in (alive, killed)]
    for board in boards:
        board.touch()
    os.close(killed._lock)  # what the system does with the files of a killed process
    remove_stale(Path("/tmp"))
    assert Path(alive.path).exists() and not Path(killed.path).exists()
    assert boards[0].exists() and not boards[1].exists()
    alive.remove()
    assert not boards[0].exists()
    alive.remove()
    assert not Path(alive.path).exists()


def test_the_environment_is_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    environment.write(tmp_path, {"name": "ring"}, tmp_path)
    text = (tmp_path / "env.json").read_text()
    assert '"torch"' in text and '"cpu"' in text
    assert "hunter2" not in text
    assert "numpy==" in (tmp_path / "pip-freeze.txt").read_text()
