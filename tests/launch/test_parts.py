"""The supervisor's parts, without processes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentnode.communication.shared_memory.publish_buffer import path_of, run_of
from decentnode.launch import provenance, sockets
from decentnode.launch.messages import (
    Bound,
    ChildMessage,
    Facts,
    Failed,
    Finished,
    Header,
    NodeJoined,
    NodesAbsent,
    PeerFailure,
    Peers,
    Progress,
    StopRun,
)
from decentnode.launch.outcome import Ledger, first_cause, summary
from decentnode.launch.pipe import Pipe
from decentnode.launch.signals import StopSignals
from decentnode.launch.sockets import UNFINISHED_SECONDS, SocketDir, remove_stale
from decentnode.launch.waiting import names, waiting_for
from decentnode.wire.generation import FIRST, Name, new_origin

FACTS = Facts(
    "ring", "abc", "runs", "", "", "", "", 10, 5, False, 60.0, 60.0, 0, [[0, 1], [2, 3, 5]], ["10.0.0.1", "10.0.0.2"],
    {"0": 1, "1": 1},
)  # fmt: skip
FINISHED = Finished(0, {"uid": 0, "rounds": 10, "accuracy": 0.5}, False)

MESSAGES: list[ChildMessage] = [
    FACTS, Header([["graph", "ring"]]), Bound(1, "ipc://a", "ipc://b"), NodeJoined(1), NodesAbsent([2], {"2": "late"}),
    Progress(1, {"kind": "round", "loss": None}), FINISHED, Failed(1, 8, "title", "text", True),
    Peers({"0": ["a", "b"]}), StopRun(), PeerFailure(1, "gone"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: ChildMessage) -> None:
    ours, theirs = multiprocessing.Pipe()
    Pipe(ours).send(message)
    assert Pipe(theirs).receive() == message
    ours.close()
    with pytest.raises(EOFError):
        Pipe(theirs).receive()
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


def test_bytes_of_processes_that_are_gone_are_in_the_totals() -> None:
    ledger = Ledger()

    def told(uid: int, round: int, data: int) -> None:
        ledger.progress(uid, {"kind": "round", "round": round, "data_bytes_sent": data, "evaluation_bytes_sent": 1})

    told(0, 2, 300)
    told(1, 2, 300)
    ledger.restarted(1)
    told(1, 6, 400)  # of its second process
    told(2, 3, 50)
    ledger.progress(0, {"kind": "generation", "members": [0, 1]})
    ledger.finished[0] = Finished(0, {"uid": 0, "rounds": 10, "bytes_data": 1000, "bytes_evaluation": 7}, False)
    ledger.finished[1] = Finished(1, {"uid": 1, "rounds": 10, "bytes_data": 700, "bytes_evaluation": 5}, False)
    found = summary(FACTS, ledger, 0, None, 1.0, 2.0)
    assert sorted(found["nodes"]) == ["0", "1"] and ledger.restarts == {1: 1}
    assert found["bytes_sent_total"] == found["bytes_data_total"] == 1000 + 700 + 300 + 50
    assert found["bytes_evaluation_total"] == 7 + 5 + 1 + 1


def test_reports_of_all_machines_come_through_uid_0() -> None:
    ledger = Ledger()
    reports: dict[str, dict[str, Any]] = {str(uid): {"uid": uid, "rounds": 10} for uid in (0, 1, 2, 3, 5)}
    ledger.finished[0] = replace(FINISHED, reports=reports)
    assert sorted(ledger.figures()) == [0, 1, 2, 3, 5]


def test_waiting_names_machines_and_nodes() -> None:
    assert names([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert names([]) == ""
    absent = NodesAbsent([2, 3, 5], {"5": "node 5 has another config"})
    text = waiting_for(FACTS, "joining", [0, 1], absent, 4.0)
    assert text == "machine 1 at 10.0.0.2 (node 2-3, 5); refused: node 5 has another config (4 s)"
    assert waiting_for(FACTS, "joining", [0], NodesAbsent([], {}), 4.0).startswith("the word to start")
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


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /tmp, beside one that stands for /dev/shm."""
    base, boards = tmp_path / "t", tmp_path / "shm"
    base.mkdir()
    boards.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(base))
    monkeypatch.setattr(sockets, "BUFFERS", boards)
    monkeypatch.setattr(sockets, "MAX_PATH_BYTES", 1000)
    return base


@pytest.mark.parametrize("generation", [FIRST, (12, new_origin(3))], ids=["first", "later"])
@pytest.mark.parametrize("lent", [False, True])
def test_socket_folders_and_boards_of_killed_runs_are_removed_by_the_next(
    shared: Path, generation: Name, lent: bool
) -> None:
    alive, killed = SocketDir(), SocketDir()
    boards = [sockets.BUFFERS / path_of(run_of(Path(each.path), generation), 3, lent).name for each in (alive, killed)]
    for buffer in boards:
        buffer.touch()
    os.close(killed._lock)  # what the system does with the files of a killed process
    remove_stale(shared)
    assert Path(alive.path).exists() and not Path(killed.path).exists()
    assert boards[0].exists() and not boards[1].exists()
    alive.remove()
    assert not boards[0].exists()
    alive.remove()
    assert not Path(alive.path).exists()


def test_a_run_that_is_just_starting_is_not_taken_for_gone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run starts before and after every step of the start."""
    looks, looking = 0, False

    def look() -> None:
        nonlocal looks, looking
        if not looking:
            looking = True
            remove_stale(shared)
            looking = False
            looks += 1

    def watched(whole: Callable[..., object]) -> Callable[..., object]:
        def step(*words: object, **named: object) -> object:
            look()
            done = whole(*words, **named)
            look()
            return done

        return step

    with monkeypatch.context() as patch:
        for module, name in ((os, "open"), (os, "rename"), (os, "mkdir"), (fcntl, "flock")):
            patch.setattr(module, name, watched(getattr(module, name)))
        made = SocketDir()
    assert looks >= 6 and Path(made.path, "lock").exists()
    remove_stale(shared)
    assert Path(made.path, "lock").exists()
    made.remove()
    assert not list(shared.iterdir())


def test_names_and_links_in_the_shared_folder_are_not_trusted(shared: Path, tmp_path: Path) -> None:
    boards = tmp_path / "shm"
    live = boards / "decentnode-abcd1234-0-00-0"
    mine = tmp_path / "mine"
    mine.write_text("keep")
    for name in ("decentnode-*", "decentnode-abcd12?4", "decentnode-abcd123", "decentnode-"):
        (shared / name).mkdir()
        (shared / name / "lock").touch()  # a name that SocketDir does not give
    (shared / "decentnode-linklock").mkdir()
    (shared / "decentnode-linklock" / "lock").symlink_to(mine)
    (shared / "decentnode-fifolock").mkdir()
    os.mkfifo(shared / "decentnode-fifolock" / "lock")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (shared / "decentnode-linkfold").symlink_to(elsewhere)
    stale = shared / "decentnode-stale000"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "link").symlink_to(elsewhere)
    others = [live, boards / "decentnode-stale000-x", boards / "decentnode-stale0001-0-00-0"]
    its = [boards / "decentnode-stale000-0-00-3", boards / "decentnode-stale000-1-0a-3-lent"]
    for buffer in others + its:
        buffer.touch()
    before = {path for path in shared.iterdir() if path != stale}
    remove_stale(shared)
    assert set(shared.iterdir()) == before and mine.read_text() == "keep" and (elsewhere / "lock").exists()
    assert sorted(boards.iterdir()) == sorted(others)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_what_another_user_made_is_left_alone(shared: Path, tmp_path: Path) -> None:
    for name, owner in (("decentnode-theirs00", 12345), ("decentnode-itslock0", os.getuid())):
        (shared / name).mkdir()
        (shared / name / "lock").touch()
        os.chown(shared / name / "lock", 12345, 12345)
        os.chown(shared / name, owner, -1)
    gone = shared / "decentnode-gone0000"
    gone.mkdir()
    (gone / "lock").touch()
    theirs = tmp_path / "shm" / "decentnode-gone0000-0-00-0"
    theirs.touch()
    os.chown(theirs, 12345, 12345)
    remove_stale(shared)
    assert len(list(shared.iterdir())) == 2 and not gone.exists() and theirs.exists()


def test_a_folder_whose_run_was_killed_before_its_lock_is_removed_when_it_is_old(shared: Path) -> None:
    for name, age in (("decentnode-young000", 60), ("decentnode-old00000", 2 * UNFINISHED_SECONDS)):
        (shared / name).mkdir()
        os.utime(shared / name, (time.time() - age,) * 2)
    remove_stale(shared)
    assert [path.name for path in shared.iterdir()] == ["decentnode-young000"]


def test_the_environment_is_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    provenance.write(tmp_path, {"name": "ring"}, tmp_path)
    text = (tmp_path / "env.json").read_text()
    assert '"torch"' in text and '"cpu"' in text
    assert "hunter2" not in text
    assert "numpy==" in (tmp_path / "pip-freeze.txt").read_text()
