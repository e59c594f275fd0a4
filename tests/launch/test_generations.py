"""End to end: real processes die or freeze, the other nodes continue, and nodes that come back are readmitted."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from decentnode.communication.parts import SILENCE_SECONDS
from decentnode.launch.reporting.outcome import Outcome
from decentnode.metrics.reader import read_kind
from tests.conftest import free_ports, scale
from tests.launch.faults import experiment
from tests.launch.test_supervisor import RunRecorder, run_tiny

COMMUNICATION = {"name": "auto", "timeout_seconds": 30, "start_timeout_seconds": 60}
FREEZES = {"suspect_seconds": 6}
"""For tests that wait until a frozen node is suspected. Even on a busy machine no other node is silent for so long."""


class NoticeRecorder(RunRecorder):
    """Records notices, too. Wakes the frozen node whose pid is in `pid_file` once the others continue without it."""

    def __init__(self, pid_file: Path) -> None:
        super().__init__()
        self.notices: list[str] = []
        self._pid_file = pid_file

    def notice(self, text: str) -> None:
        self.notices.append(text)
        if text.startswith("generation 1") and self._pid_file.exists():
            os.kill(int(self._pid_file.read_text()), signal.SIGCONT)


class StopsOnNotice(NoticeRecorder):
    """Stops the run by SIGINT at the first notice that contains `text`."""

    def __init__(self, pid_file: Path, text: str) -> None:
        super().__init__(pid_file)
        self._text = text

    def notice(self, text: str) -> None:
        super().notice(text)
        if self._text in text:
            self._text = "in no notice"
            os.kill(os.getpid(), signal.SIGINT)


def run_with_failure(
    folder: Path, training: str, *, nodes: int = 5, rounds: int = 40, keys: dict[str, str] | None = None,
    recorder: NoticeRecorder | None = None, **sections: Any,
) -> tuple[Outcome, NoticeRecorder]:
    """Runs with `training` of tests/launch/faults.py, and regrouping. keys: keys of that training's own config."""
    recorder = recorder or NoticeRecorder(folder / "pid")
    node = {"rounds": rounds, "evaluate_every": 10, "missing": "regroup", **sections.pop("node", {})}
    outcome = run_tiny(
        folder, recorder, node=node, graph=sections.pop("graph", {"name": "complete", "nodes": nodes}),
        training={**experiment()["training"], "name": f"tests.launch.faults:{training}", **(keys or {})},
        communication={**COMMUNICATION, **sections.pop("communication", {})}, **sections,
    )
    return outcome, recorder


def generations(outcome: Outcome, uid: int) -> list[dict[str, Any]]:
    """Returns the records of the generations in which a node took part, the first one excepted."""
    assert outcome.run_dir is not None
    return list(read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "generation"))


@pytest.mark.parametrize("way", ["auto", "zeromq", "collective"])
@pytest.mark.slow
def test_the_other_nodes_finish_without_a_node_that_dies(tmp_path: Path, way: str) -> None:
    outcome, recorder = run_with_failure(tmp_path, "Dies", communication={"name": way})
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 3, 4]
    assert "killed by SIGKILL" in outcome.summary["lost"]["2"]
    assert outcome.summary["rounds"] == 40
    assert outcome.summary["accuracy_merged"] > 0.5
    for uid in (0, 1, 3, 4):
        (record,) = generations(outcome, uid)
        assert (record["generation"], record["left"], record["members"]) == (1, [2], [0, 1, 3, 4])
        assert 3 <= record["round"] <= 7, "3 if the supervisor reports the death before the others have begun round 3"
    assert any("generation 1: 4 of 5 nodes continue" in text for text in recorder.notices)


@pytest.mark.parametrize("per_process", [1, 5])
@pytest.mark.slow
def test_a_failure_that_ends_the_run_ends_the_other_nodes_at_once(tmp_path: Path, per_process: int) -> None:
    """They neither continue in a generation without that node, nor have to be killed."""
    outcome, recorder = run_with_failure(
        tmp_path, "SetsNaN", rounds=100_000,
        mapping={"machines": 1, "nodes_per_machine": 5, "nodes_per_process": per_process},
    )  # fmt: skip
    assert outcome.exit_code == 6 and outcome.failure is not None and outcome.failure.uid == 2
    assert outcome.silent == () and set(outcome.followers) == {0, 1, 3, 4}
    assert not any("continue" in text for text in recorder.notices)


@pytest.mark.slow
@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", ["push_sum", "full"])
def test_asynchronous_nodes_learn_of_a_dead_process_from_its_supervisor(tmp_path: Path, rule: str) -> None:
    """At once, not after the 100 s of silence that make a node suspect."""
    outcome, recorder = run_with_failure(
        tmp_path, "Dies", rounds=200, sharing={"name": rule}, node={"schedule": "gossip_async"},
        communication={"timeout_seconds": 300, "suspect_seconds": 100},
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 3, 4] and outcome.run_dir is not None
    for uid in (0, 1, 3, 4):
        (record,) = generations(outcome, uid)
        assert record["left"] == [2] and record["round"] < 200
    events = (outcome.run_dir / "nodes" / "000" / "events.jsonl").read_text().splitlines()
    (over,) = [json.loads(event) for event in events if "generation_over" in event]
    *_, last = (outcome.run_dir / "nodes" / "002" / "metrics.jsonl").read_text().splitlines()
    # node 0 heard of it from the supervisor, or from another node that had
    assert over["time"] - json.loads(last)["time"] < SILENCE_SECONDS


@pytest.mark.slow
def test_a_node_that_cannot_be_restarted_because_its_port_is_taken_does_not_end_the_run(tmp_path: Path) -> None:
    """Node 2 dies, the test takes its port, and the restart of node 2 fails."""
    first = free_ports(10)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        class TakesPort(NoticeRecorder):
            def notice(self, text: str) -> None:
                super().notice(text)
                if "is started again" in text:
                    taken.bind(("127.0.0.1", first + 4))
                    taken.listen()

        recorder = TakesPort(tmp_path / "pid")
        outcome = run_tiny(
            tmp_path, recorder, node={"rounds": 30, "evaluate_every": 10, "missing": "regroup", "restarts": 1},
            graph={"name": "complete", "nodes": 5}, mapping={"nodes_per_machine": 5, "base_port": first},
            training={**experiment()["training"], "name": "tests.launch.faults:Dies"}, communication=COMMUNICATION,
        )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert "cannot listen on" in outcome.summary["lost"]["2"] and outcome.summary["rounds"] == 30


@pytest.mark.slow
def test_the_other_nodes_finish_without_a_node_that_raises(tmp_path: Path) -> None:
    outcome, _ = run_with_failure(tmp_path, "Raises")
    assert outcome.exit_code == 0
    assert "a bug in my model" in outcome.summary["lost"]["2"]


@pytest.mark.parametrize("way", ["auto", "collective"])
@pytest.mark.slow
def test_a_restarted_node_joins_the_next_generation(tmp_path: Path, way: str) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "DiesOnce", rounds=150, node={"restarts": 1}, communication={"name": way},
        keys={"pid_file": str(tmp_path / "pid")},
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 2, 3, 4]
    assert outcome.summary["restarts"] == {"2": 1}
    assert outcome.summary["lost"] == {}
    assert outcome.summary["nodes"]["2"]["accuracy"] == pytest.approx(outcome.summary["accuracy_mean"], abs=0.05)
    assert generations(outcome, 2)[0]["joined"] == [2]


@pytest.mark.slow
def test_a_node_that_freezes_is_excluded_and_rejoins_when_it_thaws(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "Freezes", rounds=250, keys={"pid_file": str(tmp_path / "pid")}, communication=FREEZES
    )
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 2, 3, 4]
    assert [record["left"] for record in generations(outcome, 0)] == [[2], []]
    assert outcome.run_dir is not None
    events = (outcome.run_dir / "nodes" / "002" / "events.jsonl").read_text()
    assert '"outside"' in events


@pytest.mark.slow
def test_fewer_nodes_than_min_nodes_end_the_run_and_the_log_says_how_many_it_needs(tmp_path: Path) -> None:
    communication = {"start_timeout_seconds": 10}
    outcome, _ = run_with_failure(tmp_path, "Dies", nodes=3, node={"min_nodes": 3}, communication=communication)
    assert outcome.exit_code == 8
    assert outcome.failure is not None and outcome.failure.uid == 2
    assert outcome.run_dir is not None
    assert "needs 3 of 3 nodes (node.min_nodes)" in (outcome.run_dir / "nodes" / "000" / "log.txt").read_text()


@pytest.mark.parametrize("way", ["auto", "collective"])
@pytest.mark.parametrize("when", ["the others continue", "is started again", "generation 1", "with node 2 again"])
@pytest.mark.slow
def test_a_stop_while_a_node_dies_restarts_or_rejoins_loses_no_results_of_the_others(
    tmp_path: Path, when: str, way: str
) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "DiesOnce", rounds=100_000, node={"restarts": 1}, communication={"name": way},
        keys={"pid_file": str(tmp_path / "pid")}, recorder=StopsOnNotice(tmp_path / "pid", when),
    )  # fmt: skip
    assert (outcome.exit_code, outcome.summary["status"]) == (130, "interrupted"), recorder.failures
    assert outcome.failure is None
    assert outcome.run_dir is not None and (outcome.run_dir / "summary.json").exists()
    assert outcome.summary["accuracy_merged"] is not None
    finished = {uid for uid in ("0", "1", "3", "4") if outcome.summary["nodes"][uid]["rounds"] >= 3}
    assert finished == {"0", "1", "3", "4"}


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_restarted_node_that_hangs_while_it_loads(tmp_path: Path) -> None:
    """Node 2 hangs where it would load its data."""
    outcome, recorder = run_with_failure(
        tmp_path, "HangsAfterRestart", rounds=100_000, node={"restarts": 1}, keys={"pid_file": str(tmp_path / "pid")},
        recorder=StopsOnNotice(tmp_path / "pid", "generation 1"),
    )  # fmt: skip
    assert (outcome.exit_code, outcome.summary["status"]) == (130, "interrupted"), recorder.failures
    assert outcome.summary["accuracy_merged"] is not None
    assert outcome.summary["members"] == [0, 1, 3, 4]


@pytest.mark.slow
def test_a_finished_run_does_not_wait_for_a_restarted_node_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise wait for the 600 s of a time-out, which is longer than this test may last."""
    monkeypatch.setattr("decentnode.launch.supervising.deadlines.REJOIN_SECONDS", 0.5)
    outcome, recorder = run_with_failure(
        tmp_path, "HangsAfterRestart", node={"restarts": 1}, keys={"pid_file": str(tmp_path / "pid")},
        communication={"timeout_seconds": 600},
    )  # fmt: skip
    assert (outcome.exit_code, outcome.summary["status"]) == (0, "finished"), recorder.failures
    assert outcome.summary["members"] == [0, 1, 3, 4] and outcome.summary["rounds"] == 40
    assert outcome.summary["restarts"] == {"2": 1}
    reason = outcome.summary["lost"]["2"]
    assert reason.startswith("node 2 was killed by SIGKILL") and reason in recorder.notices
    assert reason.endswith("; started again, it did not rejoin before the run ended")


@pytest.mark.slow
def test_a_finished_run_does_not_wait_for_a_frozen_node_that_it_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 2 freezes, the others continue without it, and nothing wakes it."""
    monkeypatch.setattr("decentnode.launch.supervising.deadlines.REJOIN_SECONDS", 0.5)
    recorder = NoticeRecorder(tmp_path / "no_pid_file")
    outcome, _ = run_with_failure(
        tmp_path, "Freezes", keys={"pid_file": str(tmp_path / "pid")}, recorder=recorder,
        communication={"timeout_seconds": 600},
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 3, 4]
    assert outcome.summary["lost"] == {"2": "node 2: left behind, it did not rejoin before the run ended"}


MESSAGE_FAULTS = [
    (1, "Suspect", "SIGKILL"), (0, "Prepare", "SIGSTOP"), (1, "Promise", "SIGKILL"), (0, "Commit", "SIGKILL"),
    (1, "Ready", "SIGSTOP"), (0, "Go", "SIGKILL"),
]
MORE_MESSAGE_FAULTS = [
    (1, "Suspect", "SIGSTOP"), (0, "Prepare", "SIGKILL"), (3, "Promise", "SIGSTOP"), (0, "Commit", "SIGSTOP"),
    (3, "Ready", "SIGKILL"), (0, "Go", "SIGSTOP"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("victim", "message", "signal_name"),
    [*MESSAGE_FAULTS[2:4],
     *(pytest.param(*case, marks=pytest.mark.skipif(not scale(0, 1), reason="--stress"))
       for case in [*MESSAGE_FAULTS[:2], *MESSAGE_FAULTS[4:], *MORE_MESSAGE_FAULTS])],
)  # fmt: skip
@pytest.mark.slow
def test_nodes_agree_on_a_generation_although_a_second_node_dies_or_freezes_meanwhile(
    tmp_path: Path, victim: int, message: str, signal_name: str
) -> None:
    """Over gloo: node 2 dies, and another one dies or freezes after it has sent `message`; three of five continue."""
    keys = {"victim": f"{victim} {message} {signal_name}", "received_marker": str(tmp_path / "received")}
    communication = {"name": "collective", "timeout_seconds": 8, **FREEZES}
    outcome, recorder = run_with_failure(tmp_path, "FaultOnMessage", communication=communication, keys=keys)
    assert outcome.exit_code == 0, recorder.failures
    members = sorted({0, 1, 3, 4} - {victim})
    if message != "Suspect":  # that the process of node 2 died is known at once from the supervisor
        assert outcome.summary["members"] == members, recorder.notices
    assert outcome.summary["rounds"] == 40
    for uid in members:
        assert generations(outcome, uid)[-1]["members"] == generations(outcome, members[0])[-1]["members"]


STAR = {"graph": {"name": "star", "nodes": 5}, "sharing": {"name": "fedavg", "clients": 2}}


@pytest.mark.slow
def test_clients_wait_for_a_server_that_is_killed_and_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "ServerDiesOnce", rounds=12, node={"restarts": 1, "checkpoint": {"every": 2}, "evaluate_every": 4},
        keys={"pid_file": str(tmp_path / "pid")}, **STAR,
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["rounds"] == 12 and outcome.summary["restarts"] == {"0": 1}
    records = generations(outcome, 1)
    assert records and all(0 in record["members"] for record in records), "a client continued without the server"
    assert outcome.run_dir is not None
    text = (outcome.run_dir / "nodes" / "000" / "log.txt").read_text()
    assert re.search(r"continues from its own checkpoint after round [24]\b", text)
    assert outcome.summary["nodes"]["0"]["accuracy"] == outcome.summary["accuracy_merged"]


@pytest.mark.slow
def test_clients_give_up_a_dead_server_after_the_start_timeout_and_name_it(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "ServerDiesOnce", rounds=12, keys={"pid_file": str(tmp_path / "pid")},
        communication={"timeout_seconds": 3, "start_timeout_seconds": 12}, **STAR,
    )  # fmt: skip
    assert outcome.exit_code != 0
    assert [failure.uid for failure in recorder.failures if not failure.follower] == [0], recorder.failures
    assert outcome.run_dir is not None
    log = (outcome.run_dir / "nodes" / "001" / "log.txt").read_text()
    assert "no round can begin without the server node 0" in log, log
