"""The metrics of nodes that the batched engine computes together: their lines and when these are written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decentnode import clock
from decentnode.launch.children.messages import Request, Task
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.one_process import batched_run
from decentnode.launch.one_process.batched_records import lines_of
from decentnode.launch.one_process.batched_run import BatchedOutput
from decentnode.simulate.engines.batched import PopulationRound
from decentnode.simulate.engines.steps import Local
from decentnode.simulate.virtual import VirtualTime

LOSSES = np.array([0.1234567890123, 12345.678901234, 1e-30])


def make_round(round: int, reports: bool = False, uneven: bool = False) -> PopulationRound:
    """Returns a round of three nodes. reports: with figures of an optimizer. uneven: with unequal batches."""
    steps, samples = np.full(3, 8), np.array([1, 20, 300]) if uneven else np.full(3, 4)
    figures = [{"gradient_norm": 0.5 + uid} for uid in range(3)] if reports else []
    local = Local(LOSSES + round, steps, samples, 0.05, figures)
    edges = [json.dumps({"2": [uid, 7, 0, 0, 0.0]}) for uid in range(3)]
    return PopulationRound(round, 1e9 + round, 0.5, 0.25, 0.125, local, edges, samples * 1000, steps * 0, steps * 3)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("reports", [False, True])
def test_every_node_has_a_line_per_round_with_its_own_figures(reports: bool, uneven: bool) -> None:
    rounds = [make_round(round, reports, uneven) for round in range(4)]
    texts = list(lines_of(rounds))
    assert len(texts) == 3
    for uid, text in enumerate(texts):
        lines = text.decode().splitlines()
        assert text.endswith(b"\n") and len(lines) == 4
        for found, line in zip(rounds, lines, strict=True):
            record = json.loads(line)
            own = int(found.local.samples[uid])
            more = {"gradient_norm": 0.5 + uid} if reports else {}
            assert record.pop("loss") == pytest.approx(found.local.losses[uid], rel=1e-8)
            assert record == {
                "kind": "round", "round": found.round, "time": found.time, "seconds": 0.5, "train_seconds": 0.25,
                "send_seconds": 0.0, "wait_seconds": 0.0, "mix_seconds": 0.125, "overlap": 1.0, "steps": 8,
                "samples": own, "lr": 0.05, **more, "data_bytes_sent": own * 1000, "metadata_bytes_sent": 0,
                "protocol_bytes_sent": 0, "evaluation_bytes_sent": 24, "control_bytes_sent": 0,
                "edges": {"2": [uid, 7, 0, 0, 0.0]},
            }  # fmt: skip


@pytest.mark.parametrize("reports", [False, True])
def test_virtual_times_follow_the_other_figures_of_a_node(reports: bool) -> None:
    ends = iter([np.array([1.5, 2.0, 0.1]), np.array([3.0, np.inf, 4.25])])
    virtual = VirtualTime(SimpleNamespace(step=lambda: (None, None, None, next(ends))))  # type: ignore[arg-type]
    texts = lines_of([make_round(round, reports) for round in range(2)], virtual)
    found = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [[each["virtual_seconds"] for each in lines] for lines in found] == [[1.5, 3.0], [2.0, None], [0.1, 4.25]]
    assert all(("gradient_norm" in each) == reports for lines in found for each in lines)


def test_no_rounds_give_no_lines() -> None:
    assert list(lines_of([])) == []


def make_output(folder: Path, sent: list[Any]) -> BatchedOutput:
    for uid in range(3):
        node_dir(folder, uid).mkdir(parents=True)
    engine: Any = SimpleNamespace(round=0, config=SimpleNamespace(rounds=10**6))
    task = Task(Request(""), [0, 1, 2], 0, str(folder), 1, "00" * 8, True, 2.0, "")
    return BatchedOutput(engine, task, sent.append, lambda: None)


def count_lines(folder: Path) -> list[int]:
    """Returns the number of lines in the metrics of each node."""
    paths = [node_dir(folder, uid) / "metrics.jsonl" for uid in range(3)]
    return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]


def test_files_are_written_once_a_second_and_rounds_are_reported_less_often(tmp_path: Path) -> None:
    sent: list[Any] = []
    with clock.use(clock.VirtualClock()):
        output = make_output(tmp_path, sent)
        for number in range(9):
            output.take_round(make_round(number))
            clock.sleep(0.25)
        assert count_lines(tmp_path) == [9] * 3
        assert len(sent) == 2 * 3 and sent[0].record["round"] == 0
        output.flush("finished")
    assert count_lines(tmp_path) == [9] * 3
    assert json.loads((node_dir(tmp_path, 2) / "status.json").read_text())["doing"] == "finished"


def test_files_are_written_as_often_when_formatting_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def format_slowly(rounds: list[PopulationRound], *_: Any) -> Any:
        clock.sleep(0.2 * len(rounds))
        return lines_of(rounds)

    monkeypatch.setattr(batched_run, "lines_of", format_slowly)
    with clock.use(clock.VirtualClock()):
        output = make_output(tmp_path, [])
        for number in range(40):
            output.take_round(make_round(number))
            clock.sleep(0.8)
    assert min(count_lines(tmp_path)) >= 35


def test_records_are_written_early_when_too_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_run, "KEPT_RECORDS", 12)
    with clock.use(clock.VirtualClock()):  # in which no time passes
        output = make_output(tmp_path, [])
        for number in range(10):
            output.take_round(make_round(number))
    assert count_lines(tmp_path) == [8] * 3
