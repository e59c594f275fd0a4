"""Orders to a run: from its folder to the supervisor, from there to all nodes."""

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


class Share:
    """What a supervisor does of orders."""

    def __init__(self, phase: str = "running", workers: int = 1) -> None:
        self.phase, self.report_executed, self.sent, self.stops = phase, list[str](), list[Any](), True
        self.present = [self] * workers

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def stop_after_round(self) -> bool:
        stops, self.stops = self.stops, False
        return stops

    def notice(self, text: str) -> None:
        self.report_executed.append(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "exp" / "now"
    (folder / "nodes" / "000").mkdir(parents=True)
    supervisor_file.write(folder)
    return folder


def answered(run: Path, share: Share, action: str) -> str:
    """What `ask` returns or raises, while a supervisor looks into the folder."""
    controlling, over = OrderHandler(run), threading.Event()

    def look() -> None:
        now = 0.0
        while not over.wait(0.01):
            controlling.tick(now := now + 1.0, share)  # type: ignore[arg-type]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        return ask(run, action, 30)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("action", ACTIONS)
def test_orders_are_passed_on_and_answered(run: Path, action: str) -> None:
    share = Share()
    assert answered(run, share, action)
    assert share.sent == ([] if action == "stop" else [OrderRun(action)])
    assert share.stops is (action != "stop")
    assert not [*run.glob("control-*")], "no file is left"


def test_what_cannot_be_obeyed_is_said(run: Path) -> None:
    with pytest.raises(UsageError, match="the run has not begun"):
        answered(run, Share("joining"), "pause")
    with pytest.raises(UsageError, match="no node of this machine"):
        answered(run, Share(workers=0), "pause")
    share = Share()
    answered(run, share, "stop")
    with pytest.raises(UsageError, match="it is already ending"):
        answered(run, share, "stop")
    with pytest.raises(UsageError, match="did you mean 'pause'"):
        ask(run, "puase")
    with pytest.raises(EnvironmentFault, match="no answer from the supervisor"):
        ask(run, "pause", 0.05)
    assert not [*run.glob("control-*")]


def test_a_run_that_is_over_takes_no_orders(run: Path) -> None:
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
def test_files_that_are_no_requests_do_no_harm(run: Path, text: str) -> None:
    (run / "control-0123456789abcdef.request").write_text(text)
    (run / "control-..%2f.request").write_text("{}")
    share = Share()
    OrderHandler(run).tick(1.0, share)  # type: ignore[arg-type]
    assert share.sent == [] and share.stops
    assert "none of pause" in json.loads((run / "control-0123456789abcdef.answer").read_text())["refusal"]


def test_the_user_hears_of_each_order_once(run: Path) -> None:
    controlling, share = OrderHandler(run), Share()
    for uid in range(3):
        controlling.report_executed({"kind": "control", "what": "paused", "round": 7, "uid": uid}, share)  # type: ignore[arg-type]
    controlling.report_executed({"kind": "control", "what": "resumed", "round": 7}, share)  # type: ignore[arg-type]
    assert share.report_executed == ["paused after round 7", "resumed after round 7"]


def test_the_command_asks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, str]] = []

    def note(path: Path, action: str, timeout_seconds: float) -> str:
        asked.append((path, action))
        return "all nodes hold"

    monkeypatch.setattr("decentnode.launch.supervising.controlling.ask", note)
    done = CliRunner().invoke(main, ["control", str(run), "pause"])
    assert (done.exit_code, done.output) == (0, "all nodes hold\n")
    assert asked == [(run.resolve(), "pause")]


@pytest.mark.slow
def test_nodes_of_one_process_pause_go_on_and_evaluate() -> None:
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
    told = [(uid, found["what"], found["round"]) for uid, found in records if found["kind"] == "control"]
    rounds = {round for _, _, round in told}
    assert len(rounds) == 1 and {what for _, what, _ in told} == {"paused", "resumed", "evaluated"}
    assert len(told) == 3 * len(nodes)
    evaluated = [found["round"] for _, found in records if found["kind"] == "evaluation"]
    assert evaluated == [*rounds] * len(nodes) + [8] * len(nodes)
    assert all(node.round == 8 for node in nodes)
