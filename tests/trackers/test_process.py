"""A tracker in a process of its own: whatever it does, the run goes on, and nothing that it was to be told is lost."""

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

NAME = "tests.trackers.faulty:Faulty"


def recorded(run: Path, nodes: int = 2, rounds: int = 4) -> Path:
    """A run directory as far as trackers read it."""
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


def followed(run: Path, monkeypatch: pytest.MonkeyPatch, **section: Any) -> tuple[int, list[str]]:
    """(exit code, what it says to the launcher) of a tracker's process whose run is over, in this one."""
    read, write = os.pipe()
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        code = process.main([str(run), json.dumps({"name": NAME, **section}), "--status", str(write)])
    os.close(write)
    with open(read) as said:
        return code, said.read().splitlines()


def taken(run: Path) -> list[str]:
    return (run / "trackers" / "taken.txt").read_text().splitlines()


def test_a_tracker_is_told_all_rounds_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path)
    assert followed(run, monkeypatch) == (0, [])
    told = taken(run)
    assert [line.split()[0] for line in told] == ["1", "2", "3", "4", "4", "closed"] and told[-1] == "closed finished"
    assert "train/loss" in told[0] and "test/accuracy_merged" in told[4]
    assert followed(run, monkeypatch, every=2) == (0, [])
    assert [line.split()[0] for line in taken(run)] == ["2", "4", "4", "closed"], "every evaluation is told"


@pytest.mark.parametrize(("at", "code", "said"), [
    ("start", 1, ["! RuntimeError: nothing is right at start"]),
    ("close", 1, ["! RuntimeError: nothing is right at close"]),
    ("third", 0, ["does not accept the figures (RuntimeError: nothing is right at third)",
                  "! did not accept 1 of 5 points"]),
])  # fmt: skip
def test_what_raises_is_said_in_one_line(
    at: str, code: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert followed(recorded(tmp_path), monkeypatch, at=at) == (code, said)
    assert "Traceback" in capsys.readouterr().err, "the log has the rest"


def test_one_that_refuses_everything_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = followed(recorded(tmp_path, rounds=30), monkeypatch, at="write")
    assert code == 1 and len(said) == 2 and "refused 10 points in a row" in said[1]


def test_who_is_missing_is_said_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    code, said = followed(recorded(tmp_path), monkeypatch, name="wandb")
    assert code == 1 and "pip install 'decentnode[wandb]'" in said[0]


TINY = {
    "name": "tiny", "graph": {"name": "ring", "nodes": 2}, "data": {"name": "digits"}, "model": "logistic",
    "training": {"name": "supervised", "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
    "sharing": "full", "node": {"rounds": 3, "evaluate_every": 1},
}  # fmt: skip


class Notices(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def notice(self, text: str) -> None:
        self.heard.append(text)


@pytest.mark.slow
def test_a_run_ends_as_ever_whatever_its_trackers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hangs at its start, one ends its process, one is well; all are gone afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    started: list[Any] = []
    closes = Trackers.close

    def closed(self: Trackers, impatient: object) -> None:
        """Without the wait for the one that hangs."""
        started.extend(each.process for each in self._trackers)
        closes(self, lambda: all(each.poll() is not None for each in started[1:]))

    monkeypatch.setattr(Trackers, "close", closed)
    monkeypatch.setattr("decentnode.launch.reporting.trackers.CLOSE_SECONDS", 60.0)
    heard = Notices()
    run = decentnode.run(
        TINY, processes=False, run_dir=tmp_path, progress=heard,
        run={"trackers": [{"name": NAME, "at": "start", "how": "hang"}, "csv",
                                {"name": "tests.trackers.faulty:Second", "at": "write", "how": "exit"}]},
    )  # fmt: skip
    assert run.status == "finished" and run.summary["rounds"] == 3
    assert any("Faulty did not end" in each and "was killed" in each for each in heard.heard), heard.heard
    assert any("Second ended with exit code 7" in each for each in heard.heard), heard.heard
    rows = (run.path / "trackers" / "points.csv").read_text().splitlines()
    assert rows[0] == "round,time,figure,value" and sum(",test/accuracy," in row for row in rows) == 4
    assert sum(",train/loss," in row for row in rows) == 3
    assert len(started) == 3 and all(each.poll() is not None for each in started)


def test_a_section_that_is_wrong_is_found_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"csv is listed already"):
        decentnode.Experiment.from_config({**TINY, "run": {"trackers": ["csv", "csv"]}}).check()
    with pytest.raises(ConfigError, match="must be one of csv, tensorboard"):
        decentnode.Experiment.from_config({**TINY, "run": {"trackers": ["tensorbord"]}}).check()


def test_what_a_tracker_missed_is_told_later(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    found = CliRunner().invoke(main, ["track", str(run), "--to", "csv"])
    assert found.exit_code == 0 and found.output.splitlines()[-1] == "5 points sent", found.output
    assert "4,9.000,test/accuracy_merged,0.75" in (run / "trackers" / "points.csv").read_text()
    for wrong in ("{name: wandb, mode: ofline}", "nothing", "[csv]", "{"):
        found = CliRunner().invoke(main, ["track", str(run), "--to", wrong])
        assert found.exit_code == 2 and "Traceback" not in found.output, (wrong, found.output)
    found = CliRunner().invoke(main, ["track", str(run), "--to", f"{{name: '{NAME}', at: third}}"])
    assert found.exit_code == 3 and "1 of 5 points are missing" in found.output
