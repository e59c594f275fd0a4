"""`decentnode evaluate`: the metrics of a run, computed again from its folder alone, and its metrics on other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import decentnode
from decentnode.cli import main
from decentnode.errors import UsageError
from decentnode.launch.evaluate import evaluate
from tests.launch import faults


def train(folder: Path, **sections: Any) -> decentnode.Run:
    given = faults.experiment(communication={"name": "inproc"}, node={"rounds": 3}, run={"dir": str(folder / "runs")})
    return decentnode.run({**given, **sections}, progress=False, processes=False)


def run_evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    code = main.main(["evaluate", *words], prog_name="decentnode", standalone_mode=False)
    return code, *capsys.readouterr()


DATA = {
    "global": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.5}},
    "own": {"name": "digits", "test": "own", "partition": {"name": "dirichlet", "alpha": 0.5}},
    "both": {"name": "digits", "test": "both"},
    "sharded": {"name": "digits", "shard_test": True},
    "sampled": {"name": "digits", "sample_test": 90},
}


@pytest.mark.sampled(one=["kind"])
@pytest.mark.parametrize("kind", DATA)
def test_evaluating_a_run_again_gives_the_metrics_of_its_summary(kind: str, tmp_path: Path) -> None:
    run = train(tmp_path, data=DATA[kind], training={**faults.experiment()["training"], "label_smoothing": 0.1,
                                                   "validation": {"fraction": 0.1}})  # fmt: skip
    found = evaluate(run.path).summary
    compared = [key for key in run.summary if key.partition("_")[0] in ("accuracy", "top5", "own") and key in found]
    assert {"accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_merged", "top5_accuracy_mean"} <= {*compared}
    assert kind != "both" or "own_accuracy_mean" in compared
    for key in compared:
        assert found[key] == pytest.approx(run.summary[key], abs=1e-9), key
    assert found["nodes"]["2"]["accuracy"] == pytest.approx(run.summary["nodes"]["2"]["accuracy"])
    assert found["nodes"]["2"]["loss"] == pytest.approx(run.summary["nodes"]["2"]["loss"], rel=1e-5)


@pytest.mark.parametrize("kind", ["global", "own"])
def test_attackers_are_excluded_as_in_the_run(kind: str, tmp_path: Path) -> None:
    """They are excluded from the merged model, too, which is evaluated with each node's private layers."""
    run = train(tmp_path, data=DATA[kind], attack={"name": "label_flip", "nodes": [0]}, parameters={"share": ["1.*"]})
    found = evaluate(run.path)
    assert 0 not in found.nodes and not found.missing
    for key in ("accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_merged"):
        assert found.summary[key] == pytest.approx(run.summary[key], abs=1e-9), key


def test_sampling_more_test_samples_than_there_are_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert evaluate(run.path, overrides=["data.sample_test=90"]).samples[0] == 90
    with pytest.raises(UsageError, match="sample_test must be at most the 360 test samples, got 361"):
        evaluate(run.path, overrides=["data.sample_test=361"])


def test_the_merged_model_is_evaluated_with_the_parameters_that_nodes_keep(tmp_path: Path) -> None:
    run = train(tmp_path, model={"name": "mlp", "hidden": [8]}, parameters={"keep": ["3.*"]})
    found = evaluate(run.path).summary
    assert found["accuracy_merged"] == pytest.approx(run.summary["accuracy_merged"])


def test_the_output_is_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path)
    _, out, _ = run_evaluate(capsys, str(run.path))
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["model", "samples", "accuracy"] and [line.split()[0] for line in lines[1:]] == [
        "node", "node", "node", "node", "mean", "merged"]  # fmt: skip
    assert f"{run.summary['accuracy_merged']:.4f}" in lines[-1]
    _, out, _ = run_evaluate(capsys, str(run.path.parent), "--json")
    found = json.loads(out)
    assert found["accuracy_mean"] == pytest.approx(run.summary["accuracy_mean"]) and found["missing"] == []


@pytest.mark.slow
def test_a_run_is_evaluated_on_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data may be changed as a section or by its keys. No training sample is read, so that a test set suffices."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(1)
    inputs, targets = draw.normal(size=(50, 8, 8)).astype(np.float32), np.arange(50) % 10
    np.savez("other.npz", train_inputs=inputs[:1], train_targets=targets[:1], test_inputs=inputs, test_targets=targets)
    run = train(tmp_path)
    _, out, _ = run_evaluate(capsys, str(run.path), "--json", "--data", "{name: npz, file: other.npz, num_classes: 10}")
    found = json.loads(out)
    assert found["nodes"]["0"]["samples"] == 50
    state = run.models().state_dict("merged")
    weight, bias = state["1.weight"], state["1.bias"]
    guessed = (torch.from_numpy(inputs).flatten(1) @ weight.T + bias).argmax(1).numpy()
    assert found["accuracy_merged"] == pytest.approx((guessed == targets).mean())
    _, out, _ = run_evaluate(capsys, str(run.path), "--json", "--set", "data.shard_test=true")
    assert json.loads(out)["nodes"]["0"]["samples"] == 90
    two = "task={name: classification, top_k: 2}"
    _, out, _ = run_evaluate(capsys, str(run.path), "--json", "--data", "{test: own}", "--set", two)
    assert json.loads(out)["nodes"]["0"]["samples"] < 360 and "top2_accuracy_mean" in json.loads(out)


def test_runs_and_changes_that_cannot_be_evaluated_are_refused(tmp_path: Path) -> None:
    run = train(tmp_path)
    with pytest.raises(UsageError, match="only data and task can be changed for an evaluation, got model"):
        evaluate(run.path, overrides=["model.init=x"])
    with pytest.raises(UsageError, match="does not fit the model for this data"):
        evaluate(run.path, {"data": {"name": "synthetic", "input_shape": [5, 5, 1], "test_samples": 20}})
    (run.path / "models" / "003.safetensors").unlink()
    found = evaluate(run.path)
    assert found.missing == (3,) and len(found.nodes) == 3 and found.merged is not None
    (run.path / "models" / "001.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UsageError, match=r"001.safetensors cannot be read as a model"):
        evaluate(run.path)
    for file in (run.path / "models").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match=r"has no models: nodes write them when a run ends normally; with node.check"):
        evaluate(run.path)
    (run.path / "config.resolved.yaml").unlink()
    with pytest.raises(UsageError, match="which describes its models"):
        evaluate(run.path)


@pytest.mark.slow
def test_a_run_with_only_the_merged_model_is_evaluated(tmp_path: Path) -> None:
    run = train(tmp_path)
    for uid in range(4):
        (run.path / "models" / f"{uid:03d}.safetensors").unlink()
    found = evaluate(run.path)
    assert not found.nodes and found.summary["accuracy_merged"] == pytest.approx(run.summary["accuracy_merged"])


@pytest.mark.slow
def test_a_model_file_with_other_tensor_names_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path)
    path = run.path / "models" / "000.safetensors"
    save_file({f"layer.{name}": value for name, value in load_file(path).items()}, path)
    with pytest.raises(UsageError, match=r"000.safetensors does not fit"):
        evaluate(run.path)


@pytest.mark.slow
def test_a_regression_run_is_evaluated_with_its_own_metric(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(120, 3)).astype(np.float32)
    y = (x @ [1.0, 2.0, 3.0]).astype(np.float32)[:, None]
    np.savez(tmp_path / "line.npz", train_inputs=x[:100], train_targets=y[:100], test_inputs=x[100:],
             test_targets=y[100:])  # fmt: skip
    data = {"name": "npz", "file": str(tmp_path / "line.npz")}
    run = train(tmp_path, data=data, model={"name": "mlp", "hidden": [4]})
    found = evaluate(run.path).summary
    assert yaml.safe_load((run.path / "config.resolved.yaml").read_text())["task"]["name"] == "regression"
    assert found["mse_merged"] == pytest.approx(run.summary["mse_merged"])
