"""The run folder of the engine `batched`, compared with that of the engine `stepped`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from decentnode.cli import main
from decentnode.cli.start import suggested_arguments
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise
from decentnode.metrics import reader

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
COMMON = [
    "graph={name: regular, nodes: 4, degree: 2}", "mapping={name: linear, nodes_per_machine: 4, threads: 1}",
    "node={rounds: 5, evaluate_every: 2}",
]  # fmt: skip
BATCHED = "simulate={engine: batched, steps: layers}"


class Notices(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def run_simulation(folder: Path, *overrides: str) -> tuple[Outcome, Path, list[str]]:
    observer = Notices()
    request = Request(QUICKSTART, [f"run.dir={folder}", *COMMON, *overrides], in_process=True, simulate=True)
    outcome = supervise(request, observer)
    assert outcome.run_dir is not None
    return outcome, outcome.run_dir, observer.texts


def read_records(folder: Path, name: str) -> list[list[dict[str, Any]]]:
    nodes = sorted((folder / "nodes").iterdir())
    return [list(reader.read(node / name)) for node in nodes]


def structure(value: Any) -> Any:
    """Returns the same nested keys with the types of the values."""
    if isinstance(value, dict):
        return {key: structure(each) for key, each in value.items()}
    return "number" if isinstance(value, float | int) else type(value).__name__


@pytest.mark.slow
def test_files_and_figures_of_both_engines_are_the_same(tmp_path: Path) -> None:
    stepped, wanted, _ = run_simulation(tmp_path / "stepped", "simulate.engine=stepped")
    batched, found, notices = run_simulation(tmp_path / "batched", BATCHED)
    assert (stepped.exit_code, batched.exit_code) == (0, 0)
    assert batched.summary["engine"]["name"] == "batched" and "layers" in batched.summary["engine"]["reason"]
    assert any(text.startswith("simulated, batched") for text in notices)
    kinds = [[record["kind"] for record in each] for each in read_records(wanted, "metrics.jsonl")]
    assert kinds == [[record["kind"] for record in each] for each in read_records(found, "metrics.jsonl")]
    for theirs, own in zip(read_records(wanted, "metrics.jsonl"), read_records(found, "metrics.jsonl"), strict=True):
        for record, other in zip(theirs, own, strict=True):
            assert structure(other) == structure(record)
            for key in ("round", "loss", "data_bytes_sent", "evaluation_bytes_sent", "edges", "accuracy_merged"):
                assert other.get(key) == (pytest.approx(record[key], rel=1e-4) if isinstance(record.get(key), float)
                                          else record.get(key)), key  # fmt: skip
    events = [[(event["kind"], event["peer"], event["detail"]) for event in each]
              for folder in (wanted, found) for each in read_records(folder, "events.jsonl")]  # fmt: skip
    assert events[:4] == events[4:]
    for folder in (wanted, found):
        status = json.loads((folder / "nodes" / "003" / "status.json").read_text())
        assert (status["round"], status["doing"], status["uid"]) == (5, "finished", 3)
    assert structure(batched.summary["nodes"]) == structure(stepped.summary["nodes"])
    assert batched.summary.keys() == stepped.summary.keys() and batched.summary["digest"] == stepped.summary["digest"]
    names = [path.name for path in sorted((wanted / "models").iterdir())]
    assert names == [path.name for path in sorted((found / "models").iterdir())]
    for name in names:
        theirs, own = load_file(wanted / "models" / name), load_file(found / "models" / name)
        assert all((own[key] - value).abs().max() < 1e-5 for key, value in theirs.items()), name


@pytest.mark.slow
def test_a_batched_run_that_diverges_fails_with_the_events_of_a_run_with_processes(tmp_path: Path) -> None:
    outcome, folder, _ = run_simulation(tmp_path, BATCHED, "training.optimizer.lr=1e30")
    assert outcome.exit_code == 6 and outcome.failure is not None
    last = [each[-1]["kind"] for each in read_records(folder, "events.jsonl")]
    assert last.count("diverged") == 1 and last.count("peer_lost") == 3
    assert json.loads((folder / "nodes" / "000" / "status.json").read_text())["doing"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulate.engine=stepped", BATCHED], ids=["stepped", "batched"])
def test_an_evaluation_loss_that_overflows_is_recorded_as_an_event(engine: str, tmp_path: Path) -> None:
    draw, targets = np.random.default_rng(0), np.arange(40) % 3
    inputs = draw.normal(size=(40, 3)).astype(np.float32)
    tests = inputs.copy()
    tests[4] = [3e38, 3e38, -3e38]
    np.savez(tmp_path / "d.npz", train_inputs=10 * inputs, train_targets=targets, test_inputs=tests,
             test_targets=targets)  # fmt: skip
    data = f"data={{name: npz, file: {tmp_path}/d.npz}}"
    training = "training={local_steps: 5, optimizer: {name: sgd, lr: 10}}"
    outcome, folder, _ = run_simulation(tmp_path, engine, data, "model=logistic", training)
    assert outcome.exit_code == 0
    for uid, events in enumerate(read_records(folder, "events.jsonl")):
        found = [each["detail"] for each in events if each["kind"] == "loss_overflowed"]
        assert found and found[-1].startswith("after round 5: loss is")
        assert ("loss_merged is" in found[-1]) == (uid == 0)


@pytest.mark.slow
def test_simulate_with_the_batched_engine_prints_progress_and_the_summary(tmp_path: Path) -> None:
    words = ["simulate", QUICKSTART, "--run-dir", str(tmp_path), "--plain", "--engine", "batched", "--json"]
    for override in [*COMMON, "simulate.steps=layers"]:
        words += ["--set", override]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["engine"]["name"] == "batched"
    last = next(line for line in result.stderr.splitlines() if "round=5/5" in line)
    assert "loss=" in last and "sent=769.6kB" in last  # of all four nodes: 5 rounds, 2 neighbors, 19.2 kB


def test_after_a_simulation_the_suggested_command_is_a_simulation() -> None:
    outcome = Outcome(0, None, {"rounds_planned": 5})
    assert suggested_arguments(Request("a.yaml", simulate=True), outcome)[0] == "simulate"
    assert suggested_arguments(Request("a.yaml"), outcome)[0] == "run"
