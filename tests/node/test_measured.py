"""Whole runs of other tasks than classification and with sharded, sampled or private test sets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.data.opened import OpenedData
from decentnode.data.text import speeches
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.metrics import summary
from decentnode.node.node import Node
from tests.data.files import write_pairs

CONFIGS = Path(__file__).parents[2] / "configs"


def run_config(config: Path, *overrides: str) -> tuple[Experiment, list[Node], dict[str, Any]]:
    """Returns the experiment, its nodes after the run, and the figures of summary.json."""
    torch.set_num_threads(1)
    experiment = load(config, ["communication=inproc", *overrides])
    nodes = build_in_process(experiment)
    step_all(nodes)
    return experiment, nodes, summary.combine({node.uid: node.figures() for node in nodes}, experiment.measured())


@pytest.mark.slow
def test_a_regression_is_learned_and_reported_with_its_own_metrics() -> None:
    experiment, nodes, found = run_config(CONFIGS / "own" / "waves.yaml")
    assert experiment.measured().task == "regression" and experiment.resolved()["task"] == {"name": "regression"}
    assert found["r2_mean"] > 0.9 and found["mse_min"] <= found["mse_mean"] <= found["mse_max"]
    assert found["own_mse_mean"] == pytest.approx(found["mse_mean"], rel=0.5) and "accuracy_mean" not in found
    assert found["loss_mean"] == pytest.approx(found["mse_mean"], rel=1e-5)
    # The nodes' own parts are together the whole test set, and the sums over them add up exactly
    assert found["own_mse_merged"] == pytest.approx(found["mse_merged"], rel=1e-6)
    assert found["own_r2_merged"] == pytest.approx(found["r2_merged"], abs=1e-6)
    model, data = nodes[0].training.model, experiment.open_data()
    assert nodes[0].merged is not None
    model.parameters.copy_(nodes[0].merged[: model.num_parameters])
    whole = nodes[0].training.evaluate("test")
    assert whole.metrics["mse"] == pytest.approx(found["mse_merged"], rel=1e-6)
    assert isinstance(data, OpenedData) and whole.samples == 100


@pytest.mark.slow
def test_a_sharded_test_set_gives_the_figures_of_the_whole_one() -> None:
    quick = ["node.rounds=3", "node.evaluate_every=0"]
    _, _, whole = run_config(CONFIGS / "quickstart.yaml", *quick)
    _, nodes, parts = run_config(CONFIGS / "quickstart.yaml", *quick, "data.shard_test=true")
    assert parts["accuracy_merged"] == pytest.approx(whole["accuracy_merged"], abs=1e-12)
    assert parts["loss_merged"] == pytest.approx(whole["loss_merged"], rel=1e-6)
    results = [node.training.evaluate("test") for node in nodes]
    assert sum(result.samples for result in results) == 360 and {result.samples for result in results} == {22, 23}
    correct = sum(result.sums["correct"] for result in results)
    assert parts["accuracy_mean"] == pytest.approx(correct / 360, abs=1e-12)
    assert parts["bytes_data_total"] == whole["bytes_data_total"]


@pytest.mark.slow
def test_a_sharded_sample_of_the_test_set_gives_the_figures_of_the_sample() -> None:
    quick = ["node.rounds=3", "node.evaluate_every=0", "data.sample_test=100"]
    _, nodes, whole = run_config(CONFIGS / "quickstart.yaml", *quick)
    _, sharded, parts = run_config(CONFIGS / "quickstart.yaml", *quick, "data.shard_test=true")
    assert {node.training.evaluate("test").samples for node in nodes} == {100}
    assert sum(node.training.evaluate("test").samples for node in sharded) == 100
    assert parts["accuracy_merged"] == pytest.approx(whole["accuracy_merged"], abs=1e-12)
    assert whole["accuracy_merged"] * 100 == pytest.approx(round(whole["accuracy_merged"] * 100), abs=1e-9)


def test_honest_nodes_test_the_parts_of_attackers_too() -> None:
    quick = ["node.rounds=2", "node.evaluate_every=0", "attack={name: sign_flip, nodes: [0, 5]}",
             "data.sample_test=101"]  # fmt: skip
    _, _, whole = run_config(CONFIGS / "quickstart.yaml", *quick)
    _, nodes, parts = run_config(CONFIGS / "quickstart.yaml", *quick, "data.shard_test=true")
    assert parts["accuracy_merged"] == pytest.approx(whole["accuracy_merged"], abs=1e-12)
    honest = [node.training.evaluate("test") for node in nodes if node.uid not in (0, 5)]
    assert sum(result.samples for result in honest) == 101 and {result.samples for result in honest} == {7, 8}
    correct = sum(result.sums["correct"] for result in honest)
    assert parts["accuracy_mean"] == pytest.approx(correct / 101, abs=1e-12)


def test_nodes_without_test_samples_are_left_out_of_means(tmp_path: Path) -> None:
    """Of five nodes two have no test sample of their own classes."""
    draw = np.random.default_rng(1)
    targets = np.repeat(np.arange(5), 20)
    inputs = (np.eye(5)[targets] + 0.1 * draw.normal(size=(100, 5))).astype(np.float32)
    few = targets < 3
    np.savez(tmp_path / "d.npz", train_inputs=inputs, train_targets=targets, test_inputs=inputs[few],
             test_targets=targets[few])  # fmt: skip
    (tmp_path / "a.yaml").write_text(
        "graph: {name: complete, nodes: 5}\ndata: {name: npz, file: d.npz, test: own, partition: {name: k_classes, "
        "classes: 1}}\nmodel: logistic\ntraining: {local_steps: 3}\nnode: {rounds: 5}\n"
    )
    _, nodes, found = run_config(tmp_path / "a.yaml")
    accuracies = [node.figures()["accuracy"] for node in nodes if "accuracy" in node.figures()]
    assert len(accuracies) == 3 and found["accuracy_mean"] == pytest.approx(np.mean(accuracies))  # type: ignore[arg-type]
    assert all(math.isfinite(float(node.figures()["accuracy_mean"])) for node in nodes)


def test_means_leave_out_nodes_whose_samples_do_not_define_a_metric(tmp_path: Path) -> None:
    """One node has a single test sample, without variance. R2 had no mean then."""
    draw = np.random.default_rng(1)
    inputs, keys = draw.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 4
    of_test = np.where(np.arange(60) == 7, 3, np.arange(60) % 3)
    np.savez(tmp_path / "data.npz", train_inputs=inputs, train_targets=inputs.sum(1), train_keys=keys,
             test_inputs=inputs, test_targets=inputs.sum(1), test_keys=of_test)  # fmt: skip
    (tmp_path / "run.yaml").write_text(
        "name: single\ngraph: {name: ring, nodes: 4}\nmodel: {name: mlp, hidden: [4]}\nnode: {rounds: 2}\n"
        "data: {name: npz, file: data.npz, train_keys: train_keys, test_keys: test_keys, test: own, "
        "partition: by_key}\n"
        "training: {batch_size: 5, local_steps: 2, optimizer: {name: sgd, lr: 0.1}}\n"
    )
    _, nodes, found = run_config(tmp_path / "run.yaml")
    known = [node.evaluation["r2"] for node in nodes if "r2" in node.evaluation]
    assert len(known) == 3 and found["r2_mean"] == pytest.approx(np.mean(known))
    assert all(node.evaluation["r2_mean"] == found["r2_mean"] for node in nodes)
    assert found["mse_mean"] == pytest.approx(np.mean([node.evaluation["mse"] for node in nodes]))
    assert found["r2_deviation"] == pytest.approx(np.std(known))


def test_nodes_with_private_files_train_one_model(tmp_path: Path) -> None:
    for uid in range(3):
        draw = np.random.default_rng(uid)
        targets = draw.integers(0, 3, 40)
        inputs = (3 * np.eye(3)[targets] + draw.normal(size=(40, 3))).astype(np.float32)
        np.savez(tmp_path / f"private{uid}.npz", train_inputs=inputs[:30], train_targets=targets[:30],
                 test_inputs=inputs[30:], test_targets=targets[30:])  # fmt: skip
    text = ("graph: {name: ring, nodes: 3}\ndata: {name: npz, file: 'private{uid}.npz'%s}\nmodel: logistic\n"
            "training: {local_steps: 5}\nnode: {rounds: 10}\n")  # fmt: skip
    (tmp_path / "a.yaml").write_text(text % ", num_classes: 3")
    _, nodes, found = run_config(tmp_path / "a.yaml")
    assert found["accuracy_merged"] > 0.7 and [node.training.num_samples for node in nodes] == [30] * 3
    (tmp_path / "b.yaml").write_text(text % "")
    with pytest.raises(ConfigError, match=r"data\.num_classes must be given where each node has private files"):
        load(tmp_path / "b.yaml")


def test_a_model_whose_outputs_do_not_suit_the_task_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        "from torch import nn\nfrom decentnode.models.base import Model\n\n\nclass Wide(Model):\n"
        "    def __init__(self, config):\n        pass\n\n    def make(self, data):\n"
        "        return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n"
    )
    (tmp_path / "a.yaml").write_text(
        "graph: {name: ring, nodes: 3}\ndata: digits\nmodel: 'wide:Wide'\ntraining: {}\nnode: {rounds: 1}\n"
    )
    with pytest.raises(ConfigError, match=r"model: task classification needs outputs \[batch, 10\] .* gives \[2, 7\]"):
        load(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(
        "graph: {name: ring, nodes: 3}\ndata: digits\ntask: rating\nmodel: mlp\ntraining: {}\nnode: {rounds: 1}\n"
    )
    with pytest.raises(ConfigError, match="task rating needs one output"):
        load(tmp_path / "b.yaml")


@pytest.mark.slow
def test_a_text_is_learned_character_by_character(tmp_path: Path) -> None:
    """The model needs far fewer bits than the entropy of single characters, the least without knowing earlier ones."""
    draw = np.random.default_rng(1)
    words = ["the king ", "my lord ", "and so ", "it was ", "farewell "]
    play = "".join(f"Speaker {number % 4}:\n{''.join(draw.choice(words, 60))}\n\n" for number in range(8))
    (tmp_path / "play.txt").write_text(play)
    (tmp_path / "a.yaml").write_text(
        "graph: {name: ring, nodes: 4}\ndata: {name: text, file: play.txt, window: 20, test: both, partition: by_key}\n"
        "model: {name: lstm, hidden: 32, layers: 1}\ntraining: {local_steps: 5, optimizer: {name: adam, lr: 0.02}}\n"
        "node: {rounds: 16, evaluate_every: 0}\n"
    )
    experiment, _, found = run_config(tmp_path / "a.yaml")
    characters = "".join("".join(parts) for parts in speeches(play).values())
    shares = np.array([characters.count(character) for character in set(characters)]) / len(characters)
    entropy = float(-(shares * np.log2(shares)).sum())
    assert experiment.measured().main.name == "perplexity"
    assert found["bits_per_character_merged"] < 0.6 * entropy and found["own_accuracy_mean"] > 0.4
    assert found["perplexity_merged"] == pytest.approx(2 ** found["bits_per_character_merged"], rel=1e-6)


NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "sechs": "six", "sieben": "seven"}


@pytest.mark.slow
def test_a_translation_is_learned_from_pairs_of_texts(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    german = [[*draw.choice([*NUMBERS], draw.integers(4, 8))] for _ in range(600)]
    english = [" ".join(NUMBERS[word] for word in text) for text in german]
    lines = [" ".join(text) for text in german]
    write_pairs(tmp_path, lines[60:], english[60:], (lines[:60], english[:60]))
    (tmp_path / "a.yaml").write_text(
        "graph: {name: ring, nodes: 2}\nmodel: {name: transformer, layers: 1, width: 32, dropout: 0}\n"
        "data: {name: parallel_text, source: train.de, target: train.en, test_source: test.de.gz, "
        "test_target: test.en.gz, length: 8}\n"
        "training: {batch_size: 32, local_steps: 10, optimizer: {name: adam, lr: 0.01}}\n"
        "node: {rounds: 20, evaluate_every: 0}\n"
    )
    experiment, nodes, found = run_config(tmp_path / "a.yaml")
    assert experiment.measured().main.name == "bleu"
    assert found["bleu_mean"] > 80 and found["bleu_merged"] > 80 and found["perplexity_merged"] < 2
    # Each node evaluates the merged model on a part; BLEU must be that of all texts together
    assert nodes[0].merged is not None
    model = nodes[0].training.model
    model.parameters.copy_(nodes[0].merged[: model.num_parameters])
    assert nodes[0].training.evaluate("test").metrics["bleu"] == pytest.approx(found["bleu_merged"])


def test_a_test_loss_that_overflows_is_an_event_of_its_node_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One test sample is far beyond what float32 can multiply; only node 1 is tested on it."""
    draw = np.random.default_rng(0)
    targets = np.arange(40) % 3
    inputs = draw.normal(size=(40, 3)).astype(np.float32)
    for uid in range(3):
        tests = inputs[30:].copy()
        if uid == 1:
            tests[4] = [3e38, 3e38, -3e38]
        np.savez(tmp_path / f"private{uid}.npz", train_inputs=10 * inputs[:30], train_targets=targets[:30],
                 test_inputs=tests, test_targets=targets[30:])  # fmt: skip
    (tmp_path / "a.yaml").write_text(
        "graph: {name: ring, nodes: 3}\ndata: {name: npz, file: 'private{uid}.npz', num_classes: 3}\nmodel: logistic\n"
        "training: {local_steps: 5, optimizer: {name: sgd, lr: 10}}\nnode: {rounds: 3, evaluate_every: 2}\n"
    )
    events: list[tuple[int, str, str]] = []
    nodes = build_in_process(load(tmp_path / "a.yaml", ["communication=inproc"]))
    for node in nodes:
        node.communication.counters.on_event = lambda kind, _, text, uid=node.uid: events.append((uid, kind, text))
    step_all(nodes)
    assert [node.round for node in nodes] == [3] * 3 and math.isfinite(nodes[0].figures()["loss"])  # type: ignore[arg-type]
    last = [event for event in events if "after round 3: " in event[2]]
    assert [event[:2] for event in last] == [(0, "loss_overflowed"), (1, "loss_overflowed")]
    assert "loss_merged is" in last[0][2] and "loss is" in last[1][2]
    assert "evaluation after round 3: loss is" in caplog.text
