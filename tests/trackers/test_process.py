"""A tracker runs in a process of its own: whatever it does, the run continues, and no point is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import decentnode
from decentnode.cli import main
from decentnode.errors import ConfigError
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.trackers import Trackers
from decentnode.trackers import process

FAULTY = "tests.trackers.faulty:Faulty"


def write_recorded_run(run: Path, nodes: int = 2, rounds: int = 4) -> Path:
    """Writes the files of a finished run that trackers read, and returns its directory."""
    for uid in range(nodes):
        folder = run / "nodes" / f"{uid:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "metrics.jsonl", "w") as file:
            for number in range(rounds):
                record = {"kind": "round", "round": number, "time": 1.0 + number, "loss": 0.5 + uid, "seconds": 0.25}
                file.write(json.dumps({**record, "data_bytes_sent": 100 * (number + 1)}) + "\n")
            file.write(json.dumps({"kind": "evaluation", "round": rounds, "time": 9.0, "accuracy": 0.5 + 0.1 * uid,
                                   "accuracy_mean": 0.55, "accuracy_merged": 0.75, "consensus_distance": 0.125}) + "\n")
    (run / "config.resolved.yaml").write_text("name: mine\nseed: 3\ngraph: {name: ring, nodes: 2}\n")
    (run / "summary.json").write_text(json.dumps({"status": "finished", "accuracy_mean": 0.55, "nodes": {}}))
    return run


def run_tracker_process(run: Path, monkeypatch: pytest.MonkeyPatch, **section: Any) -> tuple[int, list[str]]:
    """Runs the main function of a tracker's process in this process, on a run that is over. Returns (exit code, lines
    that it reports to the launcher)."""
    read, write = os.pipe()
    with open(os.devnull) as empty_stdin:
        monkeypatch.setattr("sys.stdin", empty_stdin)
        code = process.main([str(run), json.dumps({"name": FAULTY, **section}), "--status", str(write)])
    os.close(write)
    with open(read) as pipe:
        return code, pipe.read().splitlines()


def read_taken_lines(run: Path) -> list[str]:
    return (run / "trackers" / "taken.txt").read_text().splitlines()


def test_a_tracker_gets_every_round_and_evaluation_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_recorded_run(tmp_path)
    assert run_tracker_process(run, monkeypatch) == (0, [])
    points = read_taken_lines(run)
    assert [line.split()[0] for line in points] == ["1", "2", "3", "4", "4", "closed"]
    assert points[-1] == "closed finished"
    assert "train/loss" in points[0] and "test/accuracy_merged" in points[4]
    assert run_tracker_process(run, monkeypatch, every=2) == (0, [])
    assert [line.split()[0] for line in read_taken_lines(run)] == ["2", "4", "4", "closed"], "no evaluation is omitted"


@pytest.mark.parametrize(("at", "code", "reports"), [
    ("start", 1, ["! RuntimeError: nothing is right at start"]),
    ("close", 1, ["! RuntimeError: nothing is right at close"]),
    ("third", 0, ["does not accept the figures (RuntimeError: nothing is right at third)",
                  "! did not accept 1 of 5 points"]),
])  # fmt: skip
def test_an_exception_of_a_tracker_is_reported_in_one_line(
    at: str, code: int, reports: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_tracker_process(write_recorded_run(tmp_path), monkeypatch, at=at) == (code, reports)
    assert "Traceback" in capsys.readouterr().err, "the traceback goes to the log"


def test_a_tracker_that_refuses_ten_points_in_a_row_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reports = run_tracker_process(write_recorded_run(tmp_path, rounds=30), monkeypatch, at="write")
    assert code == 1 and len(reports) == 2 and "refused 10 points in a row" in reports[1]


def test_a_missing_library_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    code, reports = run_tracker_process(write_recorded_run(tmp_path), monkeypatch, name="wandb")
    assert code == 1 and "pip install 'decentnode[wandb]'" in reports[0]


TINY = {
    "name": "tiny", "graph": {"name": "ring", "nodes": 2}, "data": {"name": "digits"}, "model": "logistic",
    "training": {"name": "supervised", "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
    "sharing": "full", "node": {"rounds": 3, "evaluate_every": 1},
}  # fmt: skip


class RecordsNotices(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.mark.slow
def test_a_run_finishes_although_one_tracker_hangs_and_another_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tracker hangs at its start, the third exits its process, csv works; no process of theirs is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    tracker_processes: list[Any] = []
    original_close = Trackers.close

    def close_without_waiting_for_the_first(self: Trackers, impatient: object) -> None:
        """Closes the trackers as after an impatient interrupt, once all but the first, which hangs, have ended."""
        tracker_processes.extend(each.process for each in self._trackers)
        original_close(self, lambda: all(each.poll() is not None for each in tracker_processes[1:]))

    monkeypatch.setattr(Trackers, "close", close_without_waiting_for_the_first)
    monkeypatch.setattr("decentnode.launch.reporting.trackers.CLOSE_SECONDS", 60.0)
    observer = RecordsNotices()
    run = decentnode.run(
        TINY, processes=False, run_dir=tmp_path, progress=observer,
        run={"trackers": [{"name": FAULTY, "at": "start", "how": "hang"}, "csv",
                                {"name": "tests.trackers.faulty:Second", "at": "write", "how": "exit"}]},
    )  # fmt: skip
    assert run.status == "finished" and run.summary["rounds"] == 3
    assert any("Faulty did not end" in each and "was killed" in each for each in observer.notices), observer.notices
    assert any("Second ended with exit code 7" in each for each in observer.notices), observer.notices
    rows = (run.path / "trackers" / "points.csv").read_text().splitlines()
    assert rows[0] == "round,time,figure,value" and sum(",test/accuracy," in row for row in rows) == 4
    assert sum(",train/loss," in row for row in rows) == 3
    assert len(tracker_processes) == 3 and all(each.poll() is not None for each in tracker_processes)


def test_a_wrong_trackers_section_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"csv is listed already"):
        decentnode.Experiment.from_config({**TINY, "run": {"trackers": ["csv", "csv"]}}).check()
    with pytest.raises(ConfigError, match="must be one of csv, tensorboard"):
        decentnode.Experiment.from_config({**TINY, "run": {"trackers": ["tensorbord"]}}).check()


def test_decentnode_track_sends_all_points_of_a_run_that_is_over(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path)
    found = CliRunner().invoke(main, ["track", str(run), "--to", "csv"])
    assert found.exit_code == 0 and found.output.splitlines()[-1] == "5 points sent", found.output
    assert "4,9.000,test/accuracy_merged,0.75" in (run / "trackers" / "points.csv").read_text()
    for wrong in ("{name: wandb, mode: ofline}", "nothing", "[csv]", "{"):
        found = CliRunner().invoke(main, ["track", str(run), "--to", wrong])
        assert found.exit_code == 2 and "Traceback" not in found.output, (wrong, found.output)
    found = CliRunner().invoke(main, ["track", str(run), "--to", f"{{name: '{FAULTY}', at: third}}"])
    assert found.exit_code == 3 and "1 of 5 points are missing" in found.output
