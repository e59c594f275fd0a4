"""Orders to a run reach the supervisor as files in the run folder, and all nodes through the supervisor."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.experiment import load
from decentnode.launch.children.messages import OrderRun
from decentnode.launch.files import supervisor_file
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.launch.supervising.controlling import ACTIONS, OrderHandler, ask


class FakeRun:
    """The part of a supervisor that executes orders. `stop_after_round` succeeds the first time."""

    def __init__(self, phase: str = "running", workers: int = 1) -> None:
        self.phase, self.notices, self.sent, self.can_stop = phase, list[str](), list[Any](), True
        self.present = [self] * workers

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def stop_after_round(self) -> bool:
        could_stop, self.can_stop = self.can_stop, False
        return could_stop

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose supervisor is this process."""
    folder = tmp_path / "runs" / "exp" / "now"
    (folder / "nodes" / "000").mkdir(parents=True)
    supervisor_file.write(folder)
    return folder


def ask_and_answer(run: Path, fake_run: FakeRun, action: str) -> str:
    """Returns or raises what `ask` does while a thread handles orders as the supervisor does."""
    handler, is_over = OrderHandler(run), threading.Event()

    def handle_orders() -> None:
        now = 0.0
        while not is_over.wait(0.01):
            handler.tick(now := now + 1.0, fake_run)  # type: ignore[arg-type]

    thread = threading.Thread(target=handle_orders)
    thread.start()
    try:
        return ask(run, action, 30)
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("action", ACTIONS)
def test_orders_are_passed_on_and_answered(run: Path, action: str) -> None:
    fake_run = FakeRun()
    assert ask_and_answer(run, fake_run, action)
    assert fake_run.sent == ([] if action == "stop" else [OrderRun(action)])
    assert fake_run.can_stop is (action != "stop")
    assert not [*run.glob("control-*")], "the files of an answered order are left"


def test_an_order_that_cannot_be_executed_is_refused_with_the_reason(run: Path) -> None:
    with pytest.raises(UsageError, match="the run has not begun"):
        ask_and_answer(run, FakeRun("joining"), "pause")
    with pytest.raises(UsageError, match="no node of this machine"):
        ask_and_answer(run, FakeRun(workers=0), "pause")
    fake_run = FakeRun()
    ask_and_answer(run, fake_run, "stop")
    with pytest.raises(UsageError, match="it is already ending"):
        ask_and_answer(run, fake_run, "stop")
    with pytest.raises(UsageError, match="did you mean 'pause'"):
        ask(run, "puase")
    with pytest.raises(EnvironmentFault, match="no answer from the supervisor"):
        ask(run, "pause", 0.05)
    assert not [*run.glob("control-*")]


def test_a_run_that_is_over_refuses_orders(run: Path) -> None:
    (run / "control-0123456789abcdef.request").write_text('{"action": "pause"}')
    OrderHandler(run).close()
    assert json.loads((run / "control-0123456789abcdef.answer").read_text()) == {"refusal": "the run is over"}
    supervisor_file.remove(run)
    with pytest.raises(UsageError, match="the run is over"):
        ask(run, "pause")
    supervisor_file.write(run / "nodes" / "000")
    with pytest.raises(UsageError, match="no supervisor"):
        ask(run, "pause")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"action": 5}', '{"action": "rm -rf"}', "x" * 9000])
def test_malformed_request_files_are_refused_and_change_nothing(run: Path, text: str) -> None:
    (run / "control-0123456789abcdef.request").write_text(text)
    (run / "control-..%2f.request").write_text("{}")
    fake_run = FakeRun()
    OrderHandler(run).tick(1.0, fake_run)  # type: ignore[arg-type]
    assert fake_run.sent == [] and fake_run.can_stop
    assert "none of pause" in json.loads((run / "control-0123456789abcdef.answer").read_text())["refusal"]


def test_each_executed_order_is_reported_once(run: Path) -> None:
    handler, fake_run = OrderHandler(run), FakeRun()
    for uid in range(3):
        handler.report_executed({"kind": "control", "what": "paused", "round": 7, "uid": uid}, fake_run)  # type: ignore[arg-type]
    handler.report_executed({"kind": "control", "what": "resumed", "round": 7}, fake_run)  # type: ignore[arg-type]
    assert fake_run.notices == ["paused after round 7", "resumed after round 7"]


def test_the_control_command_asks_and_prints_the_answer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, str]] = []

    def record_question(path: Path, action: str, timeout_seconds: float) -> str:
        asked.append((path, action))
        return "all nodes hold"

    monkeypatch.setattr("decentnode.launch.supervising.controlling.ask", record_question)
    done = CliRunner().invoke(main, ["control", str(run), "pause"])
    assert (done.exit_code, done.output) == (0, "all nodes hold\n")
    assert asked == [(run.resolve(), "pause")]


@pytest.mark.slow
def test_nodes_of_one_process_pause_evaluate_and_resume_all_after_the_same_round() -> None:
    records: list[tuple[int, dict[str, Any]]] = []
    experiment = load(Path(__file__).parents[2] / "configs" / "quickstart.yaml", [
        "graph={name: regular, nodes: 4, degree: 2}", "mapping={name: linear, nodes_per_machine: 4}",
        "node={rounds: 8, evaluate_every: 0}", "communication=inproc"])  # fmt: skip
    nodes: list[Any] = []

    def record(uid: int, found: dict[str, Any]) -> None:
        records.append((uid, found))
        if uid == 1 and found["kind"] == "round" and found["round"] == 2:
            nodes[0].order("pause")
            nodes[0].order("evaluate")
        if uid == nodes[-1].uid and found["kind"] == "control" and found["what"] == "paused":
            nodes[2].order("resume")

    run_in_process(experiment, record, ready=nodes.extend)
    executed = [(uid, found["what"], found["round"]) for uid, found in records if found["kind"] == "control"]
    rounds = {round for _, _, round in executed}
    assert len(rounds) == 1 and {what for _, what, _ in executed} == {"paused", "resumed", "evaluated"}
    assert len(executed) == 3 * len(nodes)
    evaluated = [found["round"] for _, found in records if found["kind"] == "evaluation"]
    assert evaluated == [*rounds] * len(nodes) + [8] * len(nodes)
    assert all(node.round == 8 for node in nodes)
