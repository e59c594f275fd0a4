"""Models of float16 whose sums, or whose buffers, are larger than the largest float16: generations, evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig
from decentnode.experiment import load
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.node.checkpoints.handover import give_models
from decentnode.node.generations.merging import merge_models
from decentnode.tensors import FlatModel
from decentnode.training.supervised import Supervised
from tests.simulate.test_batched import compare_engines

NODES = 3
LARGE = 60_000.0
"""Below the largest float16, 65,504; the sum of two is not."""
VARIANCE = 123_456.0
"""Of a float32 buffer; larger than the largest float16, and not one of bfloat16's numbers."""


CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
HALF = ["model={name: 'tests.node.test_half_precision:HalfNet'}", "graph={name: complete, nodes: 4}",
        "mapping.nodes_per_machine=4", "communication=inproc", "node.rounds=2",
        "training.optimizer={name: sgd, lr: 0.1}"]  # fmt: skip


def make_nodes(dtype: torch.dtype) -> list[Any]:
    """Returns what handovers and merges use of three nodes. The last one is fresh: its model and buffers are zero."""
    hub, found = Hub(NODES), []
    for uid in range(NODES):
        module = nn.Linear(2, 1, bias=False).to(dtype)
        module.register_buffer("variance", torch.tensor([VARIANCE if uid < 2 else 0.0]))
        model = FlatModel(module)
        with torch.no_grad():
            model.parameters.fill_(LARGE if uid < 2 else 0.0)
        communication = Inproc(CommunicationConfig(name="inproc"), uid=uid, hub=hub, schemas=())
        found.append(SimpleNamespace(
            uid=uid, training=SimpleNamespace(model=model), shared=model.num_parameters, communication=communication,
            sharing=SimpleNamespace(requirements=SimpleNamespace(phases=1)), config=SimpleNamespace(buffers="average"),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["give", "merge"])
def test_a_fresh_member_gets_the_model_and_the_buffers_of_the_others(how: str, dtype: torch.dtype) -> None:
    nodes, fresh = make_nodes(dtype), frozenset({NODES - 1})
    steps = [give_models(each, fresh, "given") if how == "give" else merge_models(each, fresh, 1.0, "merged")
             for each in nodes]  # fmt: skip
    for _ in range(4):
        for each in steps:
            next(each, None)
    for each in nodes:
        model = each.training.model
        assert model.dtype == dtype and torch.equal(model.parameters, torch.full((2,), LARGE, dtype=dtype))
        assert float(model.buffers[0]) == pytest.approx(VARIANCE, rel=1e-6)


class HalfNet(nn.Module):
    """A linear layer of float16, of which one parameter and the buffer are large and never change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10).half()
        self.large = nn.Parameter(torch.full((2,), LARGE, dtype=torch.float16))
        self.register_buffer("variance", torch.tensor([VARIANCE]))

    def forward(self, x: Tensor) -> Tensor:
        logits = functional.linear(x.flatten(1), self.layer.weight.float(), self.layer.bias.float())
        return logits + 0 * self.large.float().sum()


class HalfText(nn.Sequential):
    """A model of texts whose outputs are of float16, and so large that the losses of the test tokens add up to more
    than the largest float16."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))
        for p in self.parameters():
            nn.init.normal_(p, std=5.0)
        self.half()


def test_figures_of_float16_outputs_are_exact_sums() -> None:
    """They were summed in float16, in which these losses are infinite, and others have three digits."""
    training = run_in_process(load(CONFIGS / "tasks" / "next_character.yaml", [
        "model={name: 'tests.node.test_half_precision:HalfText'}", "communication=inproc", "node.rounds=1",
        "training.optimizer={name: sgd, lr: 0.001}", "training.batch_size=2"]))[0].training  # fmt: skip
    found = training.evaluate()
    assert isinstance(training, Supervised)
    source, members = training.samples_of("test")
    inputs, targets = source.take(members)
    with torch.inference_mode():
        outputs = training.model.module(inputs)
    assert outputs.dtype == torch.float16
    wanted = float(functional.cross_entropy(outputs.double().flatten(0, 1), targets.flatten()))
    assert wanted * found.sums["count"] > torch.finfo(torch.float16).max
    assert found.metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    assert math.log(found.metrics["perplexity"]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("training", [[], ["training.ema=0.9"]])
def test_evaluations_compute_the_mean_without_overflow(training: list[str]) -> None:
    """When it was summed in float16, the merged model had infinite entries and its loss was NaN. The check for models
    that diverge summed their entries in float16, too, and stopped the run."""
    nodes = run_in_process(load(QUICKSTART, [*HALF, *training]))
    assert nodes[0].training.model.dtype == torch.float16
    for node in nodes:
        assert node.merged is not None and bool(node.merged.isfinite().all())
        assert node.merged[:2].tolist() == pytest.approx([LARGE] * 2, rel=1e-3)
        assert float(node.merged[-1]) == pytest.approx(VARIANCE, rel=1e-6)
        if training:
            average = node.averages[1] if node.averages else None
            assert average is not None and float(average[-1]) == pytest.approx(VARIANCE, rel=1e-6)
        assert 0 <= node.evaluation["consensus_distance"] < 1e-3


def test_pairs_average_buffers_in_their_own_precision() -> None:
    """ad_psgd cast the buffers of a float16 model to float16, in which this one is infinite."""
    changes = ["node.schedule=ad_psgd", "node.rounds=6"]
    for node in run_in_process(load(QUICKSTART, [*HALF, *changes])):
        assert node.training.model.dtype == torch.float16 and node.schedule.report()["averaged_pairs"] > 0
        assert node.training.model.buffers.tolist() == [VARIANCE]


def test_the_batched_engine_computes_the_same_mean() -> None:
    compare_engines(load(QUICKSTART, HALF), "rows", atol=1e-3)
