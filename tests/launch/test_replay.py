"""Runs of processes with failures, repeated by `decentnode replay` from what their nodes recorded."""

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
from tests.launch.test_generations import generations, go_on
from tests.launch.test_supervisor import Witness, faulty, run

RECORD = {"record": True}
ON_THE_CPU = {"device": "cpu"}
"""Where runs whose rounds go on without a node are recorded by themselves."""
MORE = pytest.mark.skipif(not scale(0, 1), reason="under --stress")


def replay(run_dir: Path | None, *options: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(run_dir), *options])


def repeated(outcome: Outcome) -> dict[str, Any]:
    found = replay(outcome.run_dir, "--json")
    assert found.exit_code == 0, found.output
    told: dict[str, Any] = json.loads(found.stdout)
    assert told["compared"] > 0 and told["payloads"] > 0
    return told


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without faults, all of whose nodes are in one process."""
    outcome = run(tmp_path_factory.mktemp("calm"), run=RECORD, mapping={"nodes_per_machine": 4, "nodes_per_process": 4})
    assert outcome.exit_code == 0
    return outcome


@pytest.mark.slow
def test_a_run_without_faults(calm: Outcome) -> None:
    told = repeated(calm)
    assert told["rounds"] == 8 and told["payloads"] == 4 * 8 * 2 and told["generations"] == 0 and told["models"] == 4


@pytest.mark.slow
def test_a_run_that_went_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = run(tmp_path, run=RECORD, communication={"name": "inproc"}, node={"rounds": 4, "checkpoint": {"every": 2}})
    assert first.run_dir is not None
    assert repeated(first)["rounds"] == 4
    overrides = [f"run.dir={tmp_path / 'runs'}", "node.rounds=9"]
    request = Request(str(tmp_path / "tiny.yaml"), overrides, resume=str(first.run_dir))
    outcome = supervise(request, Witness(), command="decentnode run tiny.yaml")
    told = repeated(outcome)
    assert told["rounds"] == 9 and told["payloads"] == 4 * 5 * 2 and told["models"] == 4
    assert outcome.run_dir is not None
    for folder in first.run_dir, outcome.run_dir:
        shutil.rmtree(folder / "checkpoints")
    found = replay(outcome.run_dir)
    assert found.exit_code == 2 and "neither in" in " ".join(found.output.split())


@pytest.mark.slow
def test_a_run_whose_node_is_killed_and_comes_back(tmp_path: Path) -> None:
    outcome, listener = go_on(tmp_path, "DiesOnceInTheOriginal", rounds=30,
                              node={"restarts": 1, "checkpoint": {"every": 1}}, mapping=ON_THE_CPU,
                              keys={"pid_file": str(tmp_path / "pid")})  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    told = repeated(outcome)
    assert told["processes"] == 6 and not told["skipped"] and told["generations"] >= 2 and told["rounds"] == 30
    assert told["models"] == 5
    assert len(generations(outcome, 0)) == told["generations"]
    assert outcome.run_dir is not None
    records = [json.loads(line) for line in (outcome.run_dir / "nodes" / f"{FAULTY_UID:03d}" / "events.jsonl").open()]
    (restored,) = [record for record in records if record["kind"] == "restored"]
    assert 0 < restored["round"] <= FAULT_ROUND


@MORE
@pytest.mark.parametrize("way", ["zeromq", "shared_memory"])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("each", [1, 2])
def test_runs_whose_processes_are_killed_and_come_back(tmp_path: Path, way: str, schedule: str, each: int) -> None:
    outcome, listener = go_on(
        tmp_path, "DiesOnceInTheOriginal", rounds=40, communication={"name": way},
        node={"restarts": 1, "schedule": schedule, **({"checkpoint": {"every": 1}} if each == 1 else {})},
        keys={"pid_file": str(tmp_path / "pid")}, mapping={"nodes_per_machine": 5, "nodes_per_process": each},
        sharing={"name": "topk"} if schedule == "sequential" else {"name": "full"},
    )  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert repeated(outcome)["generations"] >= 2


class LetsGo(Witness):
    """Writes a file once both neighbors of the node that waits for it went on without it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._without = file, set[int]()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if FAULTY_UID in record.get("missing", ()):
            self._without.add(uid)
        if len(self._without) == 2:
            self._file.touch()


@pytest.mark.parametrize("rule", ["full", pytest.param("push_sum", marks=MORE)])
@pytest.mark.slow
def test_a_run_that_goes_on_without_a_late_neighbor(tmp_path: Path, rule: str) -> None:
    witness = LetsGo(tmp_path / "file")
    outcome = run(
        tmp_path, witness, sharing={"name": rule}, communication={"name": "zeromq", "timeout_seconds": 2},
        training={**experiment()["training"], "name": "tests.launch.faults:WaitsForFile",
                  "pid_file": str(tmp_path / "file")},
        node={"rounds": 12, "evaluate_every": 0, "missing": "return_weight"}, mapping=ON_THE_CPU,
    )  # fmt: skip
    assert outcome.exit_code == 0, witness.failures
    assert outcome.run_dir is not None
    assert any(record.get("round") == FAULT_ROUND and FAULTY_UID in record.get("missing", ())
               for _, record in witness.records)  # fmt: skip
    told = repeated(outcome)
    assert told["payloads"] < 4 * 12 * 2 and told["models"] == 4


class StopsLater(Witness):
    """Asks the run to stop once some rounds are over."""

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if record.get("round", 0) >= 4 and not self._asked:
            self._asked = True
            os.kill(os.getpid(), signal.SIGINT)

    _asked = False


@MORE
@pytest.mark.parametrize("missing", ["fail", "regroup"])
def test_a_run_that_was_stopped(tmp_path: Path, missing: str) -> None:
    witness = StopsLater()
    outcome = run(tmp_path, witness, **faulty("Slow"), run=RECORD,
                  node={"rounds": 2000, "evaluate_every": 3, "missing": missing})  # fmt: skip
    assert outcome.exit_code == 130, witness.failures
    assert repeated(outcome)["rounds"] < 2000


def changed(calm: Outcome, folder: Path, change: Any) -> Path:
    """A copy of a run of which node 1's records are what `change` makes of them."""
    assert calm.run_dir is not None
    shutil.copytree(calm.run_dir, folder / "copy")
    path = folder / "copy" / "nodes" / "001" / "events.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    return folder / "copy"


def test_a_difference_is_named_with_node_and_round(calm: Outcome, tmp_path: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        records = [json.loads(line) for line in lines]
        for record in records:
            if record["kind"] == "sent" and record["round"] == 5:
                record["to"] = dict.fromkeys(record["to"], "0" * 16)
        return [json.dumps(record) for record in records]

    folder = changed(calm, tmp_path, change)
    found = replay(folder)
    assert found.exit_code == 1
    assert "nodes/001" not in found.stdout
    assert "nodes/000/events.jsonl" in found.output or "nodes/002/events.jsonl" in found.output
    assert "round 5: it mixed" in found.output
    assert "of node 1, which sent it in that round 0000000000000000" in found.output


@pytest.mark.slow
def test_other_models_at_the_end_are_a_difference(calm: Outcome, tmp_path: Path) -> None:
    folder = changed(calm, tmp_path, lambda lines: lines)
    path = folder / "models" / "002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    found = replay(folder)
    assert found.exit_code == 1 and "models/002.safetensors: node 2 ended with another" in found.output
    path.write_bytes(path.read_bytes()[:50])
    found = replay(folder)
    assert found.exit_code == 1 and "models/002.safetensors: cannot be read" in found.output


@pytest.mark.parametrize(("change", "said"), [
    (lambda lines: [line for line in lines if '"joined"' in line], "run.record: true"),
    (lambda lines: [line for line in lines if '"steps","round":0' not in line], "a checkpoint of another run, but"),
    (lambda lines: [line.replace('"from":{', '"total":"0","from":{') for line in lines], "summed the payloads"),
    (lambda lines: [line.replace('"from"', '"form"') for line in lines], "mixed cannot be read"),
    (lambda lines: [line for line in lines if '"recording"' not in line], "before a process began to record"),
], ids=["none", "resumed", "summed", "damaged", "headless"])  # fmt: skip
def test_a_run_that_cannot_be_repeated_says_why(calm: Outcome, tmp_path: Path, change: Any, said: str) -> None:
    found = replay(changed(calm, tmp_path, change))
    assert found.exit_code == 2 and said in " ".join(found.output.split())


def test_a_run_that_is_not_over_or_not_here_is_refused(calm: Outcome, tmp_path: Path) -> None:
    folder = changed(calm, tmp_path, lambda lines: lines)
    (folder / "nodes" / "003" / "events.jsonl").unlink()
    found = replay(folder)
    assert found.exit_code == 2 and "the records of all 4 nodes" in " ".join(found.output.split())
    (folder / "summary.json").unlink()
    found = replay(folder)
    assert found.exit_code == 2 and "is not finished" in " ".join(found.output.split())


def test_another_version_is_a_warning(calm: Outcome, tmp_path: Path) -> None:
    folder = changed(calm, tmp_path, lambda lines: [line.replace('"torch":"', '"torch":"1.') for line in lines])
    found = replay(folder, "--check")
    assert found.exit_code == 0 and "warning: the run was made with torch 1." in found.stderr
    assert "repeated" not in found.stdout and "64 payloads" in found.stdout


def test_sums_are_no_obstacle_to_checks(calm: Outcome, tmp_path: Path) -> None:
    folder = changed(calm, tmp_path, lambda lines: [line.replace('"from":{', '"total":"0","from":{') for line in lines])
    found = replay(folder, "--check")
    assert found.exit_code == 0 and "64 payloads" in found.stdout


def test_a_run_whose_nodes_wait_for_nobody_is_refused(calm: Outcome, tmp_path: Path) -> None:
    folder = changed(calm, tmp_path, lambda lines: lines)
    path = folder / "config.resolved.yaml"
    text = path.read_text()
    assert text.count("schedule: sequential") == 1
    path.write_text(text.replace("schedule: sequential", "schedule: gossip_async"))
    found = replay(folder)
    assert found.exit_code == 2 and "node.schedule was gossip_async" in " ".join(found.output.split())
