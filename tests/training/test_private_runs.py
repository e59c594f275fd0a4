"""Whole runs with differentially private training, experiments that are refused, and the membership attack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from decentnode.cli import main
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.experiment.crosschecks import privacy as crosschecks
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.launch.reporting.notices import privacy_notice
from decentnode.metrics.figures import TaskMetrics
from decentnode.node.node import Node
from decentnode.simulate.engines.batched import unsupported_feature
from decentnode.training.membership import membership_auc
from decentnode.training.privacy import epsilon_of

from .small import make, make_samples
from .test_privacy import needs_opacus

CONFIGS = Path(__file__).parents[2] / "configs"
FOUR_NODES = ["graph={name: ring, nodes: 4}", "mapping={machines: 1, nodes_per_machine: 4}", "communication=inproc"]
CLIPPED = ["training.privacy={noise: 0}", "node.rounds=2"]


def run_nodes(*sets: str) -> list[Node]:
    return run_in_process(load(CONFIGS / "quickstart.yaml", [*FOUR_NODES, *sets]))


def stack_parameters(nodes: list[Node]) -> torch.Tensor:
    return torch.stack([node.training.model.parameters for node in nodes])


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sets", "text"), [
    (["sharing=leader"], "sharing: nodes send their training losses"),
    (["node={missing: return_weight, quorum: {weights: samples}}"], "node.quorum.weights: nodes send the samples"),
    (["node={missing: regroup, on_partition: both}"], "node.merge_weights: nodes send the number of samples"),
    (["node={missing: regroup, orphans: adopted}"], "node.orphans must be lost with privacy"),
    (["node={schedule: epidemic, sampler: {name: knn}}"], "node.sampler: nodes send the shares of their labels"),
    (["model={name: resnet}"], r"layer 1 \(BatchNorm2d\) lets a sample change more"),
    (["training.privacy={delta: 0.1}"], "privacy.delta must be below 1 / "),
    (["training.evaluate_membership=5"], "needs test samples that are distributed as"),
])  # fmt: skip
def test_options_that_send_unprotected_data_are_refused_with_privacy(
    sets: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crosschecks, "is_installed", lambda: True)
    given = ["communication=inproc", "training.privacy={}", *sets]
    with pytest.raises(ConfigError, match=text):
        load(CONFIGS / "quickstart.yaml", given)


class Centered(nn.Module):
    """Subtracts a mean of samples that it keeps in a buffer, as layers do that are no batch normalization of torch."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.last, self.in_place = nn.Linear(64, 10), in_place
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.flatten(1)
        if float(images.sum()) > 1e9:  # torch.vmap cannot compute this
            return self.last(images)  # type: ignore[no-any-return]
        if self.training and self.in_place:
            self.mean.lerp_(images.detach().mean(0), 0.1)
        elif self.training:
            self.mean = self.mean.lerp(images.detach().mean(0), 0.1)
        return self.last(images - self.mean)  # type: ignore[no-any-return]


class Replaced(Centered):
    def __init__(self) -> None:
        super().__init__(in_place=False)


class InPlace(Centered):
    def __init__(self) -> None:
        super().__init__(in_place=True)


@pytest.mark.parametrize("module", [Replaced, InPlace])
def test_statistics_of_samples_in_buffers_of_own_layers_are_refused(module: type[nn.Module]) -> None:
    sets = [f"model={__name__}:{module.__name__}", "training.privacy={noise: 0}"]
    with pytest.raises(ConfigError, match="model: forward changes the buffer mean in training"):
        load(CONFIGS / "quickstart.yaml", sets)


class PullTogether:
    """A loss that has no value for a single sample."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) + outputs.var(0).sum()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_losses_without_a_value_for_a_single_sample_are_refused() -> None:
    sets = [f"training.loss={__name__}:{PullTogether.__name__}", "training.privacy={noise: 0}"]
    assert load(CONFIGS / "quickstart.yaml", sets[:1])
    with pytest.raises(ConfigError, match=r"loss: with privacy, the loss of each single sample must be finite"):
        load(CONFIGS / "quickstart.yaml", sets)


def test_validate_shows_no_warning_of_torch_for_attention(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    sets = ["data={name: text, file: words.txt, window: 8, partition: iid}", "model={name: gpt, width: 8, layers: 1}",
            "training.privacy={noise: 0}"]  # fmt: skip
    (tmp_path / "text.yaml").write_text(f"extends: {CONFIGS / 'quickstart.yaml'}\n")
    done = subprocess.run(
        [sys.executable, "-m", "decentnode", "validate", "text.yaml", *(f"--set={each}" for each in sets)],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == "note: privacy: none without noise: gradients of samples are only clipped\n"


def test_noise_needs_opacus_and_clipping_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crosschecks, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"training.privacy needs opacus, .*decentnode\[privacy\]"):
        load(CONFIGS / "quickstart.yaml", ["training.privacy={noise: 1}"])
    assert load(CONFIGS / "quickstart.yaml", ["training.privacy={noise: 0}"])


def test_the_batched_engine_does_not_support_privacy_and_membership() -> None:
    for sets, key in ((["training.privacy={noise: 0}"], "privacy"),
                      (["training.evaluate_membership=3", "data.test=both"], "evaluate_membership")):  # fmt: skip
        assert unsupported_feature(load(CONFIGS / "quickstart.yaml", sets)) == f"training.{key}"


# -- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [
    ["sharing={name: choco, compression: int8}"], ["sharing=gradient_tracking"], ["node.schedule=overlapped"],
    ["node.schedule=gossip_async"], ["parameters={keep: ['*bias']}"],
    ["graph={name: star, nodes: 4}", "sharing=fedavg"], ["node.missing=regroup"],
    ["graph={name: torus, rows: 2, nodes: 8}", "mapping.nodes_per_machine=8"],
    ["graph={name: ring, nodes: 2}", "mapping.nodes_per_machine=2"],
], ids=str)  # fmt: skip
def test_clipped_runs_with_other_features_repeat_bit_for_bit(sets: list[str]) -> None:
    first, again = run_nodes(*CLIPPED, *sets), run_nodes(*CLIPPED, *sets)
    assert torch.equal(stack_parameters(first), stack_parameters(again)) and stack_parameters(first).isfinite().all()
    assert all("epsilon" not in node.evaluation for node in first)


@needs_opacus
def test_epsilon_of_a_run_is_measured_per_node() -> None:
    nodes = run_nodes("training.privacy={noise: 2, delta: 1e-4}", "training.local_steps=3", "node={rounds: 4}")
    expected = [epsilon_of({(2.0, 16 / node.training.num_samples): 12}, 1e-4) for node in nodes]
    for node, epsilon in zip(nodes, expected, strict=True):
        assert node.figures()["epsilon"] == epsilon
        assert node.evaluation["epsilon_mean"] == pytest.approx(np.mean(expected))
        assert "epsilon_merged" not in node.evaluation
    assert min(expected) < max(expected)


@needs_opacus
@pytest.mark.slow
def test_transports_and_a_resumed_run_give_the_same_bits_and_epsilon(tmp_path: Path) -> None:
    def command(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(main, [*words, "--plain"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        folder = tmp_path / "quickstart" / "latest"
        summary = json.loads((folder / "summary.json").read_text())
        models = b"".join(path.read_bytes() for path in sorted((folder / "models").glob("00*.safetensors")))
        return {"models": models, **{name: summary[f"epsilon_{name}"] for name in ("mean", "max")}}

    def run(*sets: str) -> dict[str, Any]:
        given = [*FOUR_NODES[:2], "training.privacy={noise: 1.5}", "node.rounds=4", *sets]
        return command("run", str(CONFIGS / "quickstart.yaml"), "--run-dir", str(tmp_path),
                       *(word for each in given for word in ("--set", each)))  # fmt: skip

    whole = run("communication=inproc")
    assert run("communication=zeromq") == whole and whole["max"] > 0
    run("communication=inproc", "node.rounds=2", "node.checkpoint={every: 2}")
    folder = str((tmp_path / "quickstart" / "latest").resolve())
    assert command("run", folder, "--resume", "--set", "node.rounds=4") == whole


@needs_opacus
def test_validate_says_which_epsilon_a_run_reaches() -> None:
    done = CliRunner().invoke(main, ["validate", str(CONFIGS / "private.yaml")])
    assert done.exit_code == 0 and "note: privacy: epsilon 3.32 at delta 1e-05 after 60 steps of node" in done.stderr
    assert f"{epsilon_of({(4.0, 32 / 89): 60}, 1e-5):.2f}" == "3.32"


@needs_opacus
def test_the_epsilon_of_validate_is_the_largest_of_all_nodes_also_with_epochs() -> None:
    # 22 nodes with 65 or 66 samples: a batch of 65 is all samples of the former, which make one step per epoch
    sets = ["graph={name: ring, nodes: 22}", "mapping.nodes_per_machine=22", "data.partition=iid",
            "training={privacy: {noise: 4}, batch_size: 65, local_steps: null, local_epochs: 1}"]  # fmt: skip
    one, two = epsilon_of({(4.0, 1.0): 60}, 1e-5), epsilon_of({(4.0, 65 / 66): 120}, 1e-5)
    text = privacy_notice(load(CONFIGS / "quickstart.yaml", sets))
    assert one < two and text.startswith(f"epsilon {two:.2f} at delta 1e-05 after 120 steps of node")
    assert text.endswith("with 66 samples; no node has a larger one")


@needs_opacus
@pytest.mark.parametrize("sharing", ["{name: fedavg, clients: 2}", "{name: scaffold, fraction: 0.3}", "fedavg"])
def test_the_epsilon_of_validate_is_that_of_the_rounds_in_which_clients_take_part(sharing: str) -> None:
    sets = ["graph={name: star, nodes: 7, server: 1}", "mapping.nodes_per_machine=7", "data.partition=iid",
            f"sharing={sharing}", "training.privacy={noise: 4}", "training.local_steps=2",
            "training.optimizer={name: sgd, lr: 0.1}", "node={rounds: 9}"]  # fmt: skip
    nodes = run_nodes(*sets)
    largest = max(float(node.figures()["epsilon"]) for node in nodes if node.uid != 1)
    text = privacy_notice(load(CONFIGS / "quickstart.yaml", sets))
    assert largest > 0 and text.startswith(f"epsilon {largest:.2f} ")


# -- the membership attack ------------------------------------------------------------------------------------


def test_membership_auc_equals_the_count_over_all_pairs() -> None:
    draw = np.random.default_rng(4)
    members, others = draw.integers(0, 6, 30).astype(float), draw.integers(1, 8, 20).astype(float)
    pairs = [(a < b) + 0.5 * (a == b) for a in members for b in others]
    assert membership_auc(members, others) == pytest.approx(np.mean(pairs))
    assert membership_auc(others, members) == pytest.approx(1 - np.mean(pairs))
    assert membership_auc(np.array([np.nan, np.inf]), np.array([np.nan])) == 0.5
    assert membership_auc(np.zeros(3), np.array([np.nan, 1.0])) == 1.0


def test_membership_auc_is_high_for_a_model_that_memorized_random_labels() -> None:
    draw = np.random.default_rng(2)
    share = make_samples(20)
    share.targets[:] = draw.integers(0, 4, 20)

    def wide_net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 4))

    training = make(0, wide_net, share, batch_size=20, local_steps=300, optimizer={"name": "adam", "lr": 0.01},
                    evaluate_membership="all")  # fmt: skip
    before = training.model.parameters.clone()
    (start,) = training.measure_further().values()
    assert torch.equal(before, training.model.parameters) and 0.2 < start < 0.8
    training.local_update(0)
    assert training.measure_further()["membership_auc"] > 0.9


def test_membership_auc_of_a_run_without_overfitting_is_near_one_half() -> None:
    nodes = run_nodes("training.evaluate_membership=20", "data.partition=iid", "node={rounds: 2, evaluate_every: 1}")
    own = [float(node.figures()["membership_auc"]) for node in nodes]
    assert len(set(own)) > 1 and all(0.2 < value < 0.8 for value in own)
    figures = nodes[0].evaluation
    assert figures["membership_auc_mean"] == pytest.approx(np.mean(own))
    assert 0.2 < figures["membership_auc_merged"] < 0.8


def test_nodes_without_training_samples_are_not_in_the_mean_membership_auc() -> None:
    nodes = run_nodes("training.evaluate_membership=20", "data.partition=iid", "graph={name: star, nodes: 4}",
                "sharing=fedavg", "node={rounds: 1}")  # fmt: skip
    own = [node.figures().get("membership_auc") for node in nodes]
    assert own.count(None) == 1
    assert nodes[0].evaluation["membership_auc_mean"] == pytest.approx(np.mean([value for value in own if value]))


def test_metrics_of_the_training_are_described_to_readers() -> None:
    measured = load(CONFIGS / "quickstart.yaml", ["training.evaluate_membership=3", "data.test=both"]).measured()
    assert TaskMetrics.from_plain(json.loads(json.dumps(measured.plain()))).plain() == measured.plain()
    assert measured.metrics[-1].name == "membership_auc" and "membership_auc" in measured.curves
    assert "membership_auc_mean" in measured.compared and "membership_auc_merged" in measured.by_name
    load_private = load(CONFIGS / "private.yaml", check=False).measured()
    assert "epsilon_max" in load_private.compared and "epsilon_merged" not in load_private.by_name
