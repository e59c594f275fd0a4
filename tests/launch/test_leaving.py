"""Nodes leave a run on request: the answer to the user, what the other nodes do, and the summary."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from decentnode import clock
from decentnode.cli import main
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.children.messages import Finished, LeaveAnswer
from decentnode.launch.files import supervisor_file
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.reporting.outcome import Durations, Ledger, summary
from decentnode.launch.supervising.leaving import LeaveHandler, Watch, ask
from decentnode.metrics.reader import read_kind
from decentnode.report.closing import closing
from tests.conftest import wait_until
from tests.launch.facts import FACTS, FINISHED
from tests.launch.test_generations import NoticeRecorder, run_with_failure


class RunsLeaveCommand(NoticeRecorder):
    """Once node 2 waits for a file in round 3, runs `decentnode leave` with an unknown node, with none and with `uid`;
    then makes the file."""

    def __init__(self, folder: Path, uid: int) -> None:
        super().__init__(folder / "pid")
        self.results: list[Result] = []
        self._uid, self._go_file, self._thread = uid, folder / "go", threading.Thread(target=self._ask)

    def joined(self, seconds: float) -> None:
        super().joined(seconds)
        self._thread.start()

    def _ask(self) -> None:
        # Before round 3 the answer was sometimes so quick that the node left after round 2
        wait_until(self._go_file.with_name("go.waiting").exists)
        for words in (["--node", "7"], [], ["--node", str(self._uid), "--timeout", "60"]):
            self.results.append(CliRunner().invoke(main, ["leave", str(self.run_dir), *words]))
        self._go_file.touch()

    def wait_for_results(self) -> list[Result]:
        self._thread.join(60)
        return self.results


@pytest.mark.slow
def test_a_node_of_the_mapping_leaves_and_the_others_finish(tmp_path: Path) -> None:
    recorder = RunsLeaveCommand(tmp_path, 2)
    keys = {"pid_file": str(tmp_path / "go")}
    mapping = {"device": "cpu"}  # on the CPU, a run with `missing: regroup` is recorded even if run.record is not set
    outcome, _ = run_with_failure(
        tmp_path, "WaitsForFile", nodes=4, rounds=20, keys=keys, recorder=recorder, mapping=mapping
    )
    unknown_node, no_node, left = recorder.wait_for_results()
    assert unknown_node.exit_code == 2 and "has no node 7 on this machine" in unknown_node.output
    assert no_node.exit_code == 2 and "has 4 nodes on this machine: choose with --node which" in no_node.output
    assert (left.exit_code, left.output) == (0, "node 2 leaves after its round\n")
    assert outcome.exit_code == 0, (recorder.failures, recorder.notices)
    summary_of_run, path = outcome.summary, outcome.run_dir
    assert path is not None
    assert (summary_of_run["lost"], summary_of_run["members"], summary_of_run["rounds"]) == ({}, [0, 1, 3], 20)
    assert sorted(summary_of_run["nodes"]) == ["0", "1", "3"]
    assert summary_of_run["left"].keys() == {"2"} and 3 < summary_of_run["left"]["2"] < 20
    assert any(line.startswith("left     node 2 after round") for line in closing(summary_of_run))
    (end,) = read_kind(node_dir(path, 2) / "events.jsonl", "left_run")
    assert "rounds" in end["detail"] and (path / "models" / "002.safetensors").exists()
    (over,) = read_kind(node_dir(path, 0) / "events.jsonl", "generation_over")
    assert "left before the last round" in over["detail"]
    assert not list(read_kind(node_dir(path, 0) / "events.jsonl", "suspected"))
    assert not list(path.glob("leave-*"))
    replayed = CliRunner().invoke(main, ["replay", str(path)])
    assert replayed.exit_code == 0, replayed.output
    assert "the models at the end of 4 nodes, all the same" in replayed.output
    late = CliRunner().invoke(main, ["leave", str(path), "--node", "1"])
    assert late.exit_code == 2 and "the run is over" in late.output


def make_run_folder(folder: Path, uid: int) -> Path:
    """Makes the folder of a run with one node, whose supervisor is this process. Returns `folder`."""
    node_dir(folder, uid).mkdir(parents=True)
    supervisor_file.write(node_dir(folder, uid))
    return folder


def test_a_node_in_the_foreground_answers_requests_to_leave(tmp_path: Path) -> None:
    run, answers = make_run_folder(tmp_path, 5), ["", "too few would be left"]
    watch = Watch(run, 5, lambda: answers.pop(0))
    try:
        result = CliRunner().invoke(main, ["leave", str(run)])
        assert (result.exit_code, result.output) == (0, "node 5 leaves after its round\n")
        with pytest.raises(UsageError, match="node 5 stays: too few would be left"):
            ask(run, 5, 20.0)
    finally:
        watch.close()
    supervisor_file.remove(node_dir(run, 5))
    with pytest.raises(UsageError, match="the run is over"):
        ask(run, 5, 20.0)
    assert not list(run.glob("leave-*"))


def test_a_request_to_leave_without_an_answer_fails_after_its_timeout(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"no answer from node 5 within 0\.1 s$"):
        ask(make_run_folder(tmp_path, 5), 5, 0.1)
    assert not list(tmp_path.glob("leave-*"))


class FakeRun:
    """The part of a run on this machine, without processes."""

    def __init__(self, phase: str) -> None:
        self.phase, self.notices = phase, list[str]()

    def worker_of(self, uid: int) -> Any:
        return None

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.mark.parametrize(("uid", "regroup", "phase", "why"), [
    (2, True, "running", "not on this machine, which has node 0-1"),
    (1, False, "running", "node.missing is not regroup"),
    (1, True, "joining", "has not begun"),
    (1, True, "running", "has already ended"),
])  # fmt: skip
def test_a_refusal_says_why_a_node_cannot_leave(
    tmp_path: Path, uid: int, regroup: bool, phase: str, why: str
) -> None:
    run = FakeRun(phase)
    handler = LeaveHandler(dataclasses.replace(FACTS, regroup=regroup), tmp_path)
    (tmp_path / f"leave-{uid}.request").write_text("{}")
    handler.tick(clock.now(), run)
    assert why in (tmp_path / f"leave-{uid}.answer").read_text()
    handler.answered(LeaveAnswer(1), run)
    assert run.notices == ["node 1 leaves after its round, on request"]


def test_a_run_all_of_whose_local_nodes_left_counts_as_finished() -> None:
    ledger = Ledger()
    ledger.left[0] = Finished(0, {**FINISHED.figures, "rounds": 4}, False, left=True)
    result = summary(FACTS, ledger, 0, None, Durations(1.0, 2.0))
    assert (result["status"], result["left"], result["lost"]) == ("finished", {"0": 4}, {})
    assert result["members"] == [1, 2, 3, 4]
