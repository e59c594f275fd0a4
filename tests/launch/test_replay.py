"""`decentnode replay` repeats runs, also those with failures, from the records of their nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from decentnode.cli import main
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise
from tests.conftest import scale
from tests.launch.faults import FAULT_ROUND, FAULTY_UID, experiment
from tests.launch.test_generations import generations, run_with_failure
from tests.launch.test_supervisor import RunRecorder, faulty_training, run_tiny

RECORD = {"record": True}
ON_THE_CPU = {"device": "cpu"}
"""Runs on the CPU whose rounds continue without a node are recorded even if run.record is not set."""
STRESS_ONLY = pytest.mark.skipif(not scale(0, 1), reason="under --stress")


def replay(run_dir: Path | None, *options: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(run_dir), *options])


def replay_successfully(outcome: Outcome) -> dict[str, Any]:
    """Returns what `decentnode replay --json` counts."""
    result = replay(outcome.run_dir, "--json")
    assert result.exit_code == 0, result.output
    counts: dict[str, Any] = json.loads(result.stdout)
    assert counts["compared"] > 0 and counts["payloads"] > 0
    return counts


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without faults, all of whose nodes are in one process."""
    outcome = run_tiny(tmp_path_factory.mktemp("plain"), run=RECORD,
                       mapping={"nodes_per_machine": 4, "nodes_per_process": 4})  # fmt: skip
    assert outcome.exit_code == 0
    return outcome


@pytest.mark.slow
def test_a_run_without_faults_is_repeated(plain_run: Outcome) -> None:
    counts = replay_successfully(plain_run)
    assert counts["rounds"] == 8 and counts["payloads"] == 4 * 8 * 2
    assert counts["generations"] == 0 and counts["models"] == 4


@pytest.mark.slow
def test_a_resumed_run_is_repeated_from_its_checkpoints_and_refused_without_them(tmp_path: Path) -> None:
    node = {"rounds": 4, "checkpoint": {"every": 2}}
    first = run_tiny(tmp_path, run=RECORD, communication={"name": "inproc"}, node=node)
    assert first.run_dir is not None
    assert replay_successfully(first)["rounds"] == 4
    overrides = [f"run.dir={tmp_path / 'runs'}", "node.rounds=9"]
    request = Request(str(tmp_path / "tiny.yaml"), overrides, resume=str(first.run_dir))
    outcome = supervise(request, RunRecorder(), command="decentnode run tiny.yaml")
    counts = replay_successfully(outcome)
    assert counts["rounds"] == 9 and counts["payloads"] == 4 * 5 * 2 and counts["models"] == 4
    assert outcome.run_dir is not None
    for folder in first.run_dir, outcome.run_dir:
        shutil.rmtree(folder / "checkpoints")
    result = replay(outcome.run_dir)
    assert result.exit_code == 2 and "neither in" in " ".join(result.output.split())


@pytest.mark.slow
def test_a_run_whose_node_is_killed_and_restarted_is_repeated(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "DiesOnceInTheOriginal", rounds=30, node={"restarts": 1, "checkpoint": {"every": 1}},
        mapping=ON_THE_CPU, keys={"pid_file": str(tmp_path / "pid")},
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    counts = replay_successfully(outcome)
    assert counts["processes"] == 6 and not counts["skipped"] and counts["rounds"] == 30
    assert counts["generations"] >= 1, "one, if the node is back before the others agree to continue without it"
    assert counts["models"] == 5
    assert len(generations(outcome, 0)) == counts["generations"]
    assert outcome.run_dir is not None
    records = [json.loads(line) for line in (outcome.run_dir / "nodes" / f"{FAULTY_UID:03d}" / "events.jsonl").open()]
    (restored,) = [record for record in records if record["kind"] == "restored"]
    assert 0 < restored["round"] <= FAULT_ROUND


@STRESS_ONLY
@pytest.mark.parametrize("way", ["zeromq", "shared_memory"])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("nodes_per_process", [1, 2])
def test_runs_whose_processes_are_killed_and_restarted_are_repeated(
    tmp_path: Path, way: str, schedule: str, nodes_per_process: int
) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "DiesOnceInTheOriginal", rounds=40, communication={"name": way},
        node={"restarts": 1, "schedule": schedule, **({"checkpoint": {"every": 1}} if nodes_per_process == 1 else {})},
        keys={"pid_file": str(tmp_path / "pid")},
        mapping={"nodes_per_machine": 5, "nodes_per_process": nodes_per_process},
        sharing={"name": "topk"} if schedule == "sequential" else {"name": "full"},
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert replay_successfully(outcome)["generations"] >= 1


class TouchesFile(RunRecorder):
    """Makes the file for which node 2 waits once both its neighbors have finished a round without it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._without = file, set[int]()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if FAULTY_UID in record.get("missing", ()):
            self._without.add(uid)
        if len(self._without) == 2:
            self._file.touch()


@pytest.mark.parametrize("rule", ["full", pytest.param("push_sum", marks=STRESS_ONLY)])
@pytest.mark.slow
def test_a_run_whose_nodes_continue_without_a_late_neighbor_is_repeated(tmp_path: Path, rule: str) -> None:
    recorder = TouchesFile(tmp_path / "file")
    outcome = run_tiny(
        tmp_path, recorder, sharing={"name": rule}, communication={"name": "zeromq", "timeout_seconds": 2},
        training={**experiment()["training"], "name": "tests.launch.faults:WaitsForFile",
                  "pid_file": str(tmp_path / "file")},
        node={"rounds": 12, "evaluate_every": 0, "missing": "return_weight"}, mapping=ON_THE_CPU,
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.run_dir is not None
    assert any(record.get("round") == FAULT_ROUND and FAULTY_UID in record.get("missing", ())
               for _, record in recorder.records)  # fmt: skip
    counts = replay_successfully(outcome)
    assert counts["payloads"] < 4 * 12 * 2 and counts["models"] == 4


class StopsAfterRound4(RunRecorder):
    """Stops the run by SIGINT when a node reports round 4 or a later one."""

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if record.get("round", 0) >= 4 and not self._asked:
            self._asked = True
            os.kill(os.getpid(), signal.SIGINT)

    _asked = False


@STRESS_ONLY
@pytest.mark.parametrize("missing", ["fail", "regroup"])
def test_a_stopped_run_is_repeated(tmp_path: Path, missing: str) -> None:
    recorder = StopsAfterRound4()
    outcome = run_tiny(tmp_path, recorder, **faulty_training("Slow"), run=RECORD,
                  node={"rounds": 2000, "evaluate_every": 3, "missing": missing})  # fmt: skip
    assert outcome.exit_code == 130, recorder.failures
    assert replay_successfully(outcome)["rounds"] < 2000


def changed_copy(plain_run: Outcome, folder: Path, change: Any) -> Path:
    """Copies the run; `change` maps the lines of node 1's events.jsonl to those of the copy. Returns the copy."""
    assert plain_run.run_dir is not None
    shutil.copytree(plain_run.run_dir, folder / "copy")
    path = folder / "copy" / "nodes" / "001" / "events.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    return folder / "copy"


def test_a_payload_that_differs_from_its_record_is_named_with_node_and_round(
    plain_run: Outcome, tmp_path: Path
) -> None:
    def change(lines: list[str]) -> list[str]:
        records = [json.loads(line) for line in lines]
        for record in records:
            if record["kind"] == "sent" and record["round"] == 5:
                record["to"] = dict.fromkeys(record["to"], "0" * 16)
        return [json.dumps(record) for record in records]

    folder = changed_copy(plain_run, tmp_path, change)
    result = replay(folder)
    assert result.exit_code == 1
    assert "nodes/001" not in result.stdout
    assert "nodes/000/events.jsonl" in result.output or "nodes/002/events.jsonl" in result.output
    assert "round 5: it mixed" in result.output
    assert "of node 1, which sent it in that round 0000000000000000" in result.output


@pytest.mark.slow
def test_a_final_model_that_differs_or_is_damaged_is_named(plain_run: Outcome, tmp_path: Path) -> None:
    folder = changed_copy(plain_run, tmp_path, lambda lines: lines)
    path = folder / "models" / "002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    result = replay(folder)
    assert result.exit_code == 1 and "models/002.safetensors: node 2 ended with another" in result.output
    path.write_bytes(path.read_bytes()[:50])
    result = replay(folder)
    assert result.exit_code == 1 and "models/002.safetensors: cannot be read" in result.output


@pytest.mark.parametrize(("change", "reason"), [
    (lambda lines: [line for line in lines if '"joined"' in line], "run.record: true"),
    (lambda lines: [line for line in lines if '"steps","round":0' not in line], "a checkpoint of another run, but"),
    (lambda lines: [line.replace('"from":{', '"total":"0","from":{') for line in lines], "summed the payloads"),
    (lambda lines: [line.replace('"from"', '"form"') for line in lines], "mixed cannot be read"),
    (lambda lines: [line for line in lines if '"recording"' not in line], "before a process began to record"),
], ids=["none", "resumed", "summed", "damaged", "headless"])  # fmt: skip
def test_a_run_that_cannot_be_repeated_says_why(plain_run: Outcome, tmp_path: Path, change: Any, reason: str) -> None:
    result = replay(changed_copy(plain_run, tmp_path, change))
    assert result.exit_code == 2 and reason in " ".join(result.output.split())


def test_a_run_that_is_not_finished_or_lacks_records_is_refused(plain_run: Outcome, tmp_path: Path) -> None:
    folder = changed_copy(plain_run, tmp_path, lambda lines: lines)
    (folder / "nodes" / "003" / "events.jsonl").unlink()
    result = replay(folder)
    assert result.exit_code == 2 and "the records of all 4 nodes" in " ".join(result.output.split())
    (folder / "summary.json").unlink()
    result = replay(folder)
    assert result.exit_code == 2 and "is not finished" in " ".join(result.output.split())


def test_a_run_made_with_another_torch_version_is_checked_with_a_warning(plain_run: Outcome, tmp_path: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        return [line.replace('"torch":"', '"torch":"1.') for line in lines]

    folder = changed_copy(plain_run, tmp_path, change)
    result = replay(folder, "--check")
    assert result.exit_code == 0 and "warning: the run was made with torch 1." in result.stderr
    assert "repeated" not in result.stdout and "64 payloads" in result.stdout


def test_a_run_that_recorded_sums_of_payloads_can_be_checked(plain_run: Outcome, tmp_path: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        return [line.replace('"from":{', '"total":"0","from":{') for line in lines]

    folder = changed_copy(plain_run, tmp_path, change)
    result = replay(folder, "--check")
    assert result.exit_code == 0 and "64 payloads" in result.stdout


def test_a_run_with_an_asynchronous_schedule_is_refused(plain_run: Outcome, tmp_path: Path) -> None:
    folder = changed_copy(plain_run, tmp_path, lambda lines: lines)
    path = folder / "config.resolved.yaml"
    text = path.read_text()
    assert text.count("schedule: sequential") == 1
    path.write_text(text.replace("schedule: sequential", "schedule: gossip_async"))
    result = replay(folder)
    assert result.exit_code == 2 and "node.schedule was gossip_async" in " ".join(result.output.split())
