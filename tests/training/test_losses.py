"""Losses by name, and the weight of tokens in steps whose batches have unequal numbers of them."""

from __future__ import annotations

import numpy as np
import pydantic
import pytest
import torch
from torch import nn
from torch.nn import functional

from decentnode.data.base import Samples
from decentnode.errors import UsageError
from decentnode.objects import bound, make_loss
from decentnode.samples import PADDING, DataSpec, NodeSamples
from decentnode.tasks.next_token import NextToken, NextTokenConfig
from decentnode.tensors import FlatModel
from decentnode.training.losses import LOSSES, Loss, LossConfig
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig


@pytest.mark.parametrize("name", LOSSES)
def test_the_evaluated_sum_is_the_mean_training_loss_times_the_units(name: str) -> None:
    loss = Loss(LossConfig(name=name))
    outputs, targets = torch.randn(6, 4).log_softmax(1), torch.tensor([0, 1, 2, 3, 0, 1])
    wanted = targets if name in ("cross_entropy", "nll") else torch.randn(6, 4)
    units = len(targets) if wanted is targets else wanted.numel()
    summed, mean = float(loss.summed(outputs, wanted, units)), float(loss.mean(outputs, wanted))
    assert float(loss.quick_mean(outputs, wanted)) == mean
    assert summed == pytest.approx(units * mean, rel=1e-5)


def test_arguments_of_a_loss_are_those_of_the_torch_class() -> None:
    config = SupervisedConfig.model_validate({"loss": {"name": "huber", "delta": 0.5}})
    assert config.loss is not None and Loss(config.loss).mean.delta == 0.5
    for wrong, text in (({"name": "huber", "dleta": 1}, "did you mean 'delta'"), ({"name": "hubre"}, "'huber'"),
                        ({"name": "mse", "reduction": "sum"}, "must be an argument of mse")):  # fmt: skip
        with pytest.raises(pydantic.ValidationError, match=text):
            SupervisedConfig.model_validate({"loss": wrong})


def test_label_smoothing_needs_the_cross_entropy_of_the_task_too() -> None:
    config = SupervisedConfig.model_validate({"label_smoothing": 0.1})
    assert config.loss_for("cross_entropy").name == "cross_entropy"
    with pytest.raises(UsageError, match="label_smoothing must be 0 with loss mse"):
        config.loss_for("mse")


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(tokens)
        return logits


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_token_of_a_step_counts_alike(accumulate: int) -> None:
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 5, (6, 4))
    targets = np.where(np.arange(4) < np.array([1, 4, 2, 4, 1, 3])[:, None], draw.integers(0, 5, (6, 4)), PADDING)
    torch.manual_seed(2)
    module = Bigram()
    task = NextToken(NextTokenConfig(), DataSpec((4,), "ids", "next_token", vocabulary=5, target_shape=(4,)))
    config = SupervisedConfig.model_validate({
        "batch_size": 6 // accumulate, "accumulate": accumulate, "optimizer": {"name": "sgd", "lr": 1.0}})
    outputs = module(torch.from_numpy(tokens)).reshape(-1, 5)
    expected = functional.cross_entropy(outputs, torch.from_numpy(targets).reshape(-1))
    (gradient,) = torch.autograd.grad(expected, [module.table.weight])
    before = module.table.weight.detach().clone()
    samples = Samples(tokens, targets, ids=True)
    training = Supervised(config, FlatModel(module), task, NodeSamples(samples, samples), seed=1, uid=0)
    loss = training.evaluate("test").metrics["loss"]
    update = training.local_update(0)
    assert update.loss == pytest.approx(float(expected.detach()), rel=1e-6) == loss
    assert torch.allclose(module.table.weight, before - gradient, atol=1e-6)


@pytest.mark.parametrize("given", [False, True])
def test_tensors_of_a_loss_are_on_the_device_of_the_model(given: bool) -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    made, _ = make_loss(weighted)
    with bound({"loss": made if given else Weighted}):
        config = LossConfig.model_validate({"name": "decentnode.objects:loss"})
        found = Loss(config, device=torch.device("meta"))
    assert found.mean(torch.ones(2, 3, device="meta"), torch.ones(2, dtype=torch.int64, device="meta")).is_meta
    assert weighted.weight is not None and weighted.weight.is_cpu


class Weighted(nn.CrossEntropyLoss):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(weight=torch.ones(3), reduction=reduction)
