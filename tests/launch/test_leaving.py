"""Nodes that leave in peace because the user asks: what he is told, what the others do, what the summary says."""

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
from tests.launch.facts import FACTS, FINISHED
from tests.launch.test_generations import Listener, go_on


class Asks(Listener):
    """Once the nodes are in their rounds, runs `decentnode leave`, and lets the rounds go on when that is over."""

    def __init__(self, folder: Path, uid: int) -> None:
        super().__init__(folder / "pid")
        self.results: list[Result] = []
        self._uid, self._go, self._thread = uid, folder / "go", threading.Thread(target=self._ask)

    def joined(self, seconds: float) -> None:
        super().joined(seconds)
        self._thread.start()

    def _ask(self) -> None:
        for words in (["--node", "7"], [], ["--node", str(self._uid), "--timeout", "60"]):
            self.results.append(CliRunner().invoke(main, ["leave", str(self.run_dir), *words]))
        self._go.touch()

    def result(self) -> list[Result]:
        self._thread.join(60)
        return self.results


@pytest.mark.slow
def test_a_node_of_the_mapping_leaves_and_the_others_finish(tmp_path: Path) -> None:
    listener = Asks(tmp_path, 2)
    keys = {"pid_file": str(tmp_path / "go")}
    outcome, _ = go_on(tmp_path, "WaitsForFile", nodes=4, rounds=20, keys=keys, listener=listener,
                       mapping={"device": "cpu"})  # fmt: skip  # where such a run is recorded by itself
    wrong, several, right = listener.result()
    assert wrong.exit_code == 2 and "has no node 7 on this machine" in wrong.output
    assert several.exit_code == 2 and "has 4 nodes on this machine: choose with --node which" in several.output
    assert (right.exit_code, right.output) == (0, "node 2 leaves after its round\n")
    assert outcome.exit_code == 0, (listener.failures, listener.notices)
    found, path = outcome.summary, outcome.run_dir
    assert path is not None
    assert (found["lost"], found["members"], found["rounds"]) == ({}, [0, 1, 3], 20)
    assert sorted(found["nodes"]) == ["0", "1", "3"] and found["left"].keys() == {"2"} and 3 < found["left"]["2"] < 20
    assert any(line.startswith("left     node 2 after round") for line in closing(found))
    (end,) = read_kind(node_dir(path, 2) / "events.jsonl", "left_run")
    assert "rounds" in end["detail"] and (path / "models" / "002.safetensors").exists()
    (over,) = read_kind(node_dir(path, 0) / "events.jsonl", "generation_over")
    assert "left before the last round" in over["detail"]
    assert not list(read_kind(node_dir(path, 0) / "events.jsonl", "suspected"))
    assert not list(path.glob("leave-*"))
    again = CliRunner().invoke(main, ["replay", str(path)])
    assert again.exit_code == 0 and "the models at the end of 4 nodes, all the same" in again.output, again.output
    late = CliRunner().invoke(main, ["leave", str(path), "--node", "1"])
    assert late.exit_code == 2 and "the run is over" in late.output


def going(folder: Path, uid: int) -> Path:
    """A run folder with one node, which is in this very process."""
    node_dir(folder, uid).mkdir(parents=True)
    supervisor_file.write(node_dir(folder, uid))
    return folder


def test_a_node_in_the_foreground_is_asked_and_answers(tmp_path: Path) -> None:
    run, answers = going(tmp_path, 5), ["", "too few would be left"]
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


def test_nobody_who_answers_is_named_with_the_time(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"no answer from node 5 within 0\.1 s$"):
        ask(going(tmp_path, 5), 5, 0.1)
    assert not list(tmp_path.glob("leave-*"))


class Told:
    """A machine's share of a run without processes."""

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
def test_why_a_node_stays(tmp_path: Path, uid: int, regroup: bool, phase: str, why: str) -> None:
    run = Told(phase)
    leaving = LeaveHandler(dataclasses.replace(FACTS, regroup=regroup), tmp_path)
    (tmp_path / f"leave-{uid}.request").write_text("{}")
    leaving.tick(clock.now(), run)
    assert why in (tmp_path / f"leave-{uid}.answer").read_text()
    leaving.answered(LeaveAnswer(1), run)
    assert run.notices == ["node 1 leaves after its round, on request"]


def test_a_machine_all_of_whose_nodes_left_has_finished() -> None:
    ledger = Ledger()
    ledger.left[0] = Finished(0, {**FINISHED.figures, "rounds": 4}, False, left=True)
    found = summary(FACTS, ledger, 0, None, Durations(1.0, 2.0))
    assert (found["status"], found["left"], found["lost"], found["members"]) == ("finished", {"0": 4}, {}, [1, 2, 3, 4])
