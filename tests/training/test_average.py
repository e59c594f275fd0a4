"""The moving average of a node's models, and metrics on training samples, beside those on test samples."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.errors import CheckpointError
from decentnode.experiment import load
from decentnode.launch.files.node_files import save_node
from decentnode.metrics import summary
from decentnode.models.weights import load_weights
from decentnode.node.node import Node

from .contract import check_training
from .small import batch_norm_net, make, make_samples

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS: dict[str, Any] = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize("every", ["round", "step"])
def test_the_moving_average_equals_the_weighted_mean_in_float64(every: str) -> None:
    training = make(module=batch_norm_net, **{**STEPS, "local_steps": 1}, ema={"decay": 0.8, "every": every})
    seen: list[torch.Tensor] = []
    first = training.average()
    assert first is not None and torch.equal(first[: training.model.num_parameters], training.model.parameters)
    for round in range(6):
        training.local_update(round)
        if every == "round":  # stands for mixing, after which the average is updated
            training.model.parameters.mul_(0.99)
        seen.append(torch.cat([training.model.parameters, training.model.buffers]).double())
        training.finish_round()
        weights = torch.tensor([0.8**age for age in reversed(range(len(seen)))], dtype=torch.float64)
        expected = (torch.stack(seen) * weights[:, None]).sum(0) / weights.sum()
        found = training.average()
        assert found is not None and torch.allclose(found.double(), expected, atol=1e-6)


@pytest.mark.parametrize("keys", [
    {"ema": {"decay": 0.7, "every": "step"}}, {"ema": 0.9, "amp": "fp16", "accumulate": 2, "clip_norm": 0.2},
    {"evaluate_train": 7},
], ids=str)  # fmt: skip
def test_contract(keys: dict[str, Any]) -> None:
    check_training(lambda uid: make(uid, batch_norm_net, make_samples(24, uid), **{**STEPS, **keys}))


def test_the_average_changes_nothing_that_is_trained() -> None:
    plain = make(module=batch_norm_net, **STEPS)
    averaged = make(module=batch_norm_net, **STEPS, ema={"decay": 0.9, "every": "step"})
    for round in range(4):
        for training in (plain, averaged):
            training.local_update(round)
            training.finish_round()
    assert torch.equal(plain.model.parameters, averaged.model.parameters)
    assert torch.equal(plain.model.buffers, averaged.model.buffers) and plain.average() is None


def test_the_average_resumes_and_a_state_of_another_model_is_refused() -> None:
    first, second = make(**STEPS, ema=0.9), make(**STEPS, ema=0.9)
    for round in range(3):
        first.local_update(round)
        first.finish_round()
    state = copy.deepcopy(first.state_dict())
    second.model.parameters.copy_(first.model.parameters)
    second.load_state_dict(state)
    for training in (first, second):
        training.local_update(3)
        training.finish_round()
    one, other = first.average(), second.average()
    assert one is not None and other is not None and torch.equal(one, other)
    with pytest.raises(CheckpointError, match="ema"):
        make(**STEPS, ema=0.9).load_state_dict(make(**STEPS).state_dict())
    with pytest.raises(CheckpointError, match="average of a model with 28 values does not fit"):
        made = make(module=batch_norm_net, **STEPS, ema=0.9)
        made.load_state_dict({**made.state_dict(), "ema": state["ema"]})


# -- in a run -------------------------------------------------------------------------------------------------------


def run_stepped(*sets: str, rounds: int = 4) -> tuple[list[Node], list[dict[str, Any]], dict[str, Any]]:
    """Runs four nodes in steps. Returns them, the records of their evaluations, and the figures of the summary."""
    records: list[dict[str, Any]] = []
    experiment = load(QUICKSTART, [
        "graph={name: ring, nodes: 4}", "mapping={nodes_per_machine: 4}", f"node.rounds={rounds}",
        "node.evaluate_every=2", *sets], {})  # fmt: skip
    nodes = build_in_process(experiment, lambda uid, record: records.append({"uid": uid, **record}))
    step_all(nodes)
    figures = summary.combine({node.uid: node.figures() for node in nodes}, experiment.measured())
    return nodes, [each for each in records if each["kind"] == "evaluation"], figures


VARIANTS = [
    [], ["node.schedule=overlapped"], ["sharing={name: topk, fraction: 0.2}"],
    ["parameters={keep: ['*.bias']}"],
]  # fmt: skip


@pytest.mark.sampled(one=["sets"])
@pytest.mark.parametrize("sets", VARIANTS, ids=str)
def test_averages_are_measured_of_every_node_and_merged(sets: list[str]) -> None:
    nodes, records, figures = run_stepped("training.ema=0.6", *sets)
    plain, _, before = run_stepped(*sets)
    for one, other in zip(nodes, plain, strict=True):
        assert torch.equal(one.training.model.parameters, other.training.model.parameters)
    assert before["accuracy_mean"] == figures["accuracy_mean"] and "ema_accuracy_mean" not in before
    assert {"ema_accuracy_mean", "ema_accuracy_min", "ema_accuracy_max", "ema_accuracy_merged", "ema_loss_merged"} <= {
        *figures}  # fmt: skip
    last = [record for record in records if record["round"] == 4]
    assert figures["ema_loss_mean"] == pytest.approx(sum(record["ema_loss"] for record in last) / 4)
    assert len({record["ema_loss"] for record in last}) == 4
    assert len({record["ema_loss_merged"] for record in last}) == 1
    shared = nodes[0].shared
    averages = [node.averages[0] for node in nodes if node.averages is not None]
    merged = [node.averages[1] for node in nodes if node.averages is not None]
    assert len(averages) == 4 and merged[0] is not None
    assert torch.allclose(torch.stack(averages).mean(0)[:shared], merged[0][:shared], atol=1e-6)
    assert torch.equal(merged[0][shared:], averages[0][shared:]), "parameters that a node does not share are not merged"


def test_averages_with_recomputed_batch_norm_statistics() -> None:
    nodes, records, _ = run_stepped(
        "training.ema=0.6", "node.buffers=recompute", "data={name: synthetic, input_shape: [6], num_classes: 3, "
        "train_samples: 60, test_samples: 30, partition: {name: iid}}", "model='tests.node.test_product:Normed'")
    averages = [node.averages for node in nodes]
    sizes = nodes[0].training.model.num_parameters
    assert all(pair is not None and pair[1] is not None for pair in averages)
    one, other = averages[0], averages[1]
    assert one is not None and other is not None and one[1] is not None and other[1] is not None
    assert torch.equal(one[1], other[1]) and not torch.equal(one[0][sizes:], other[0][sizes:])
    assert all(record["ema_loss_merged"] == records[-1]["ema_loss_merged"] for record in records[-4:])


def test_saved_averages_are_the_measured_models(tmp_path: Path) -> None:
    nodes, records, _ = run_stepped("training.ema=0.6", "model={name: mlp, hidden: [8]}")
    (tmp_path / "models").mkdir()
    for node in reversed(nodes):
        save_node(node, tmp_path)
    files = sorted(path.relative_to(tmp_path / "models").as_posix() for path in tmp_path.rglob("*.safetensors"))
    every = ["000", "001", "002", "003", "merged"]
    assert files == [f"{name}.safetensors" for name in every[:4]] + [f"ema/{name}.safetensors" for name in every] + [
        "merged.safetensors"]  # fmt: skip
    training = nodes[2].training
    load_weights(training.model.module, tmp_path / "models" / "ema" / "merged.safetensors")
    assert training.evaluate("test").metrics["loss"] == pytest.approx(records[-1]["ema_loss_merged"], rel=1e-5)
    load_weights(training.model.module, tmp_path / "models" / "ema" / "002.safetensors")
    own = next(each for each in reversed(records) if each["uid"] == 2)
    assert training.evaluate("test").metrics["loss"] == pytest.approx(own["ema_loss"], rel=1e-5)


@pytest.mark.parametrize("most", ["all", 10])
def test_metrics_on_training_samples_are_measured(most: int | str) -> None:
    nodes, records, figures = run_stepped(f"training.evaluate_train={most}", "model={name: mlp, hidden: [8]}")
    for node in nodes:
        own = next(each for each in reversed(records) if each["uid"] == node.uid)
        found = node.training.evaluate("train")
        assert found.samples == (node.training.num_samples if most == "all" else 10)
        assert own["train_loss"] == pytest.approx(found.metrics["loss"])
    assert figures["train_loss_mean"] == pytest.approx(sum(f["train_loss"] for f in figures["nodes"].values()) / 4)
    assert figures["train_accuracy_min"] <= figures["train_accuracy_mean"] <= figures["train_accuracy_max"]
    assert figures["train_accuracy_merged"] is not None
    assert figures["train_accuracy_merged"] != figures["accuracy_merged"]


def test_curves_of_averages_and_training_samples_are_labelled() -> None:
    experiment = load(QUICKSTART, ["training.ema=0.9", "training.evaluate_train=50"], {})
    curves = experiment.measured().curves
    assert curves["ema_accuracy"].label == "test EMA accuracy (%)"
    assert curves["train_accuracy"].label == "training accuracy (%)" and curves["train_loss"].label == "training loss"
    assert curves["accuracy"].label == "test accuracy (%)"
    assert curves["ema_accuracy"].merged == "ema_accuracy_merged"
