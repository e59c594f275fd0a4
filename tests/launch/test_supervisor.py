"""Runs end to end, with real processes and sockets; one fork server serves the whole file."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from decentnode.errors import ConfigError, UsageError
from decentnode.formatting import size
from decentnode.launch.children.messages import Facts, Failed, Request
from decentnode.launch.files.run_dir import has_checkpoint
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise
from decentnode.metrics.reader import read_kind
from decentnode.report.closing import closing
from decentnode.report.reading.runs import lines
from tests.conftest import scale
from tests.launch.faults import experiment


class RunRecorder(Observer):
    """Records what the supervisor reports. Once the nodes are connected, it sends this process `signals_at_join`."""

    def __init__(self, signals_at_join: tuple[int, ...] = ()) -> None:
        self.signals_at_join = signals_at_join
        self.run_dir: Path | None = None
        self.header_lines: list[list[str]] = []
        self.failures: list[Failed] = []
        self.logs: list[Path | None] = []
        self.records: list[tuple[int, dict[str, Any]]] = []

    def facts(self, facts: Facts, run_dir: Path | None) -> None:
        self.run_dir = run_dir

    def header(self, lines: list[list[str]]) -> None:
        self.header_lines = lines

    def joined(self, seconds: float) -> None:
        for number in self.signals_at_join:
            os.kill(os.getpid(), number)

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        self.records.append((uid, record))

    def failed(self, failure: Failed, log: Path | None) -> None:
        self.failures.append(failure)
        self.logs.append(log)


class SignalsAfterFirstRound(RunRecorder):
    """Sends this process a signal with the first record of a node after all have joined: the first round may take any
    time. Before all have joined, a signal kills the run; a quick node may report a round by then."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self._have_joined = self._is_sent = False

    def joined(self, seconds: float) -> None:
        super().joined(seconds)
        self._have_joined = True

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if self._have_joined and not self._is_sent:
            self._is_sent = True
            os.kill(os.getpid(), self.number)


def run_tiny(folder: Path, recorder: RunRecorder | None = None, dry_run: bool = False, **sections: Any) -> Outcome:
    """Runs `experiment(**sections)` in `folder`; no process is left behind."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(experiment(**sections)))
    overrides = ["run.dir=" + str(folder / "runs")]
    request = Request(str(path), overrides, in_process=dry_run)
    outcome = supervise(request, recorder or RunRecorder(), command="decentnode run tiny.yaml", dry_run=dry_run)
    assert not multiprocessing.active_children()
    return outcome


def faulty_training(name: str) -> dict[str, Any]:
    """Returns the sections of an experiment with a training of tests/launch/faults.py."""
    return {"training": {**experiment()["training"], "name": f"tests.launch.faults:{name}"}}


def test_a_run_writes_all_its_files_and_the_mean_model(tmp_path: Path) -> None:
    recorder = RunRecorder()
    outcome = run_tiny(tmp_path, recorder)
    assert outcome.exit_code == 0, recorder.failures
    directory = outcome.run_dir
    assert directory is not None and (tmp_path / "runs" / "tiny" / "latest").resolve() == directory
    for name in ("config.yaml", "config.resolved.yaml", "command.txt", "graph.edges", "mapping.yaml", "env.json",
                 "pip-freeze.txt", "summary.json"):  # fmt: skip
        assert (directory / name).stat().st_size, name
    for uid in range(4):
        node = directory / "nodes" / f"{uid:03d}"
        assert [record["round"] for record in read_kind(node / "metrics.jsonl", "round")] == list(range(8))
        assert [record["round"] for record in read_kind(node / "metrics.jsonl", "evaluation")] == [0, 4, 8]
        assert f"node {uid:03d}" in (node / "log.txt").read_text()
        assert (node / "stderr.txt").read_text() == ""
    models = [load_file(directory / "models" / f"{uid:03d}.safetensors") for uid in range(4)]
    merged = load_file(directory / "models" / "merged.safetensors")
    for name, tensor in merged.items():
        assert tensor == pytest.approx(sum(model[name] for model in models) / 4, abs=1e-6)
    assert [label for label, _ in recorder.header_lines] == ["versions", "graph", "data", "task", "model", "sharing"]
    assert {uid for uid, _ in recorder.records} == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_summary_has_accuracies_times_and_bytes_by_purpose(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path)
    assert outcome.run_dir is not None
    found = json.loads((outcome.run_dir / "summary.json").read_text())
    for key in ("accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_merged", "consensus_distance", "rounds",
                "round_seconds_median", "bytes_sent_total", "bytes_data_total", "bytes_metadata_total",
                "start_seconds", "wall_seconds"):  # fmt: skip
        assert isinstance(found[key], int | float), key
    assert found["status"] == "finished" and sorted(found["nodes"]) == ["0", "1", "2", "3"]
    assert found["accuracy_min"] <= found["accuracy_mean"] <= found["accuracy_max"]
    assert found["bytes_sent_total"] == found["bytes_data_total"] + found["bytes_metadata_total"]
    assert found["bytes_data_total"] == 4 * 8 * 2 * 650 * 4 and found["bytes_metadata_total"] == 0
    assert all(found[f"bytes_{purpose}_total"] > 0 for purpose in ("protocol", "evaluation", "control"))


def test_separate_processes_and_one_process_train_the_same_bits(tmp_path: Path) -> None:
    separate = run_tiny(tmp_path)
    one_process = run_tiny(tmp_path, communication={"name": "inproc"})
    assert separate.run_dir is not None and one_process.run_dir is not None
    assert one_process.exit_code == 0
    for uid in range(4):
        name = Path("models") / f"{uid:03d}.safetensors"
        assert (separate.run_dir / name).read_bytes() == (one_process.run_dir / name).read_bytes()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path, dry_run=True)
    assert outcome.exit_code == 0 and outcome.run_dir is None
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.slow
def test_a_node_that_raises_stops_the_run_and_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes do not wait for it: with their time-out of 1000 s the test would fail."""
    monkeypatch.setattr("decentnode.launch.supervising.early_end.GRACE_SECONDS", 60.0)
    recorder = RunRecorder()
    communication = {"name": "zeromq", "timeout_seconds": 1000}
    outcome = run_tiny(tmp_path, recorder, **faulty_training("Raises"), communication=communication)
    assert outcome.exit_code == 8 and outcome.failure is not None
    assert (outcome.failure.uid, outcome.followers) == (2, (0, 1, 3))
    assert "in inject_fault" in outcome.failure.text and "RuntimeError: a bug in my model" in outcome.failure.text
    assert len(recorder.failures) == 1 and recorder.logs[0] is not None
    assert "a bug in my model" in (recorder.logs[0] / "stderr.txt").read_text()
    assert outcome.run_dir is not None
    assert json.loads((outcome.run_dir / "summary.json").read_text())["failure"]["node"] == 2


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_is_named_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path, data={"name": "tests.launch.faults:BrokenSample"}, training={"local_epochs": 1})
    assert outcome.exit_code == 8 and outcome.failure is not None and outcome.run_dir is not None
    assert "BrokenSample[1234] raised OSError: image 1234 is cut short (" in outcome.failure.title
    assert "Traceback" not in outcome.failure.text
    log = (outcome.run_dir / "nodes" / f"{outcome.failure.uid:03d}" / "log.txt").read_text()
    assert "in read_image" in log and "OSError: image 1234 is cut short" in log


@pytest.mark.sampled(one=["fault"])
@pytest.mark.parametrize("fault", ["Raises", "Dies"])
def test_the_summary_of_a_failed_run_counts_the_rounds_in_the_files_of_its_nodes(tmp_path: Path, fault: str) -> None:
    """The rounds of a quick run do not all reach the supervisor: a node reports one in a while."""
    outcome = run_tiny(tmp_path, **faulty_training(fault), node={"rounds": 8, "evaluate_every": 0})
    found, bytes_per_node = outcome.summary, 3 * 2 * 650 * 4  # rounds, neighbors, parameters, bytes of a float
    rounds = found["rounds"]
    assert rounds in (2, 3)  # a neighbor may have sent a model that node 2 mixed, and not yet have mixed itself
    assert (found["status"], found["nodes"]["2"]["rounds"]) == ("failed", 3)
    assert found["nodes"]["2"]["bytes_data"] == bytes_per_node
    assert found["bytes_sent_total"] >= (1 + rounds) * bytes_per_node
    first, traffic, *_ = closing(found)
    assert f"failed after round {rounds} of 8" in first and size(found["bytes_sent_total"]) in traffic
    assert outcome.run_dir is not None
    assert json.loads((outcome.run_dir / "summary.json").read_text())["rounds"] == rounds
    assert [line.label for line in lines([outcome.run_dir])[0]] == [f"tiny (failed after round {rounds} of 8)"]


@pytest.mark.slow
def test_a_node_killed_by_a_signal_is_named(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path, **faulty_training("Dies"))
    assert outcome.exit_code == 8 and outcome.failure is not None
    assert "node 2 was killed by SIGKILL" in outcome.failure.title


@pytest.mark.slow
def test_a_run_with_nan_in_a_model_ends_with_the_exit_code_of_divergence(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path, **faulty_training("SetsNaN"))
    assert outcome.exit_code == 6 and outcome.failure is not None
    assert "node 2" in outcome.failure.text and "round 3" in outcome.failure.text


@pytest.mark.slow
def test_a_node_that_hangs_is_listed_as_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentnode.launch.supervising.early_end.GRACE_SECONDS", 3.0)
    sections = faulty_training("Hangs") | {"communication": {"name": "zeromq", "timeout_seconds": 3}}
    outcome = run_tiny(tmp_path, **sections)
    assert outcome.exit_code == 5 and outcome.failure is not None
    assert "nothing from node" in outcome.failure.text
    assert 2 in outcome.silent


@pytest.mark.slow
def test_a_process_that_does_not_exit_after_its_last_message_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentnode.launch.supervising.deadlines.EXIT_SECONDS", 4.0)
    outcome = run_tiny(tmp_path, **faulty_training("Lingers"))
    assert outcome.exit_code == 8 and outcome.failure is not None
    assert outcome.failure.title.startswith("node 2 finished, then was killed by SIGKILL")
    assert sorted(outcome.summary["nodes"]) == ["0", "1", "2", "3"]


def test_a_component_of_the_users_that_cannot_be_constructed_is_named_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: making tests.launch.faults:Raises raised TypeError") as caught:
        run_tiny(tmp_path, model={"name": "tests.launch.faults:Raises"})
    assert caught.value.exit_code == 2


def test_all_problems_of_a_config_are_raised_at_once_and_no_run_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_tiny(tmp_path, graph={"name": "rng", "nodes": 4}, node={"rounds": "ten"})
    assert caught.value.exit_code == 2
    assert "2 problems" in str(caught.value) and "did you mean 'ring'" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_mapping_with_several_machines_needs_the_machine_option(tmp_path: Path) -> None:
    mapping = {"machines": 2, "nodes_per_machine": 2, "addresses": ["127.0.0.1", "127.0.0.2"]}
    with pytest.raises(Exception, match="--machine") as caught:
        run_tiny(tmp_path, mapping=mapping)
    assert getattr(caught.value, "exit_code", None) == UsageError.exit_code


@pytest.mark.sampled(one=["number", "code"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_a_first_signal_nodes_finish_their_round_and_results_are_written(
    tmp_path: Path, number: int, code: int
) -> None:
    node = {"rounds": 2000, "evaluate_every": 0}
    outcome = run_tiny(tmp_path, SignalsAfterFirstRound(number), **faulty_training("Slow"), node=node)
    assert outcome.exit_code == code and outcome.failure is None
    assert outcome.summary["status"] == "interrupted" and 0 < outcome.summary["rounds"] < 2000
    assert outcome.summary["accuracy_merged"] is not None
    assert outcome.run_dir is not None and (outcome.run_dir / "models" / "merged.safetensors").exists()
    rounds = {len(read_kind(file, "round")) for file in outcome.run_dir.glob("nodes/*/metrics.jsonl")}
    assert max(rounds) - min(rounds) <= 3


def test_a_run_with_checkpoints_stops_after_one_round_on_all_nodes(tmp_path: Path) -> None:
    node = {"rounds": 200_000, "evaluate_every": 0, "checkpoint": {"every": 150_000}}
    outcome = run_tiny(tmp_path, SignalsAfterFirstRound(signal.SIGINT), **faulty_training("Slow"), node=node)
    assert outcome.exit_code == 130 and outcome.run_dir is not None
    assert len({figures["rounds"] for figures in outcome.summary["nodes"].values()}) == 1
    assert has_checkpoint(outcome.run_dir, outcome.summary["num_nodes"])
    assert 0 < outcome.summary["rounds"] < 150_000, "without the stop, the first checkpoint comes much later"


@pytest.mark.slow
def test_a_second_signal_kills_the_run(tmp_path: Path) -> None:
    sections = faulty_training("Hangs") | {"node": {"rounds": 2000, "evaluate_every": 0}}
    sections["communication"] = {"name": "zeromq", "timeout_seconds": 1000}
    outcome = run_tiny(tmp_path, RunRecorder((signal.SIGINT, signal.SIGINT)), **sections)
    assert outcome.exit_code == 130


@pytest.mark.slow
def test_runs_in_a_row_leak_no_file_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(scale(2, 10)):
        assert run_tiny(tmp_path, node={"rounds": 2}).exit_code == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 4
