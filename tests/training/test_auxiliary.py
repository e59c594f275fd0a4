"""Modules with auxiliary outputs, whose weighted losses are added in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.training import statistics
from tests.training import small

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MODULE = f"model={{name: '{__name__}:TwoHeads', count: 64, classes: 10"


class TwoHeads(nn.Module):
    """A net with an auxiliary output, behind batch normalization, in training mode only."""

    def __init__(self, count: int = 6, classes: int = 4, beside: int = 0, weight: float = 0.0) -> None:
        super().__init__()
        self.one, self.norm, self.other = nn.Linear(count, classes), nn.BatchNorm1d(count), nn.Linear(count, classes)
        if beside:
            self.other = nn.Linear(count, beside)
        if weight:
            self.auxiliary_weight = weight

    def forward(self, x: Tensor) -> Any:
        x = x.flatten(1)
        return (self.one(x), None, self.other(self.norm(x))) if self.training else self.one(x)


def test_the_gradient_with_auxiliary_outputs_is_that_of_the_weighted_sum() -> None:
    samples = small.make_samples(8)
    made = small.make(module=lambda: TwoHeads(weight=0.3), train=samples, batch_size=8, local_steps=1,
                      optimizer={"name": "sgd", "lr": 1.0}, drop_last=False)  # fmt: skip
    module: Any = made.model.module
    inputs, targets = torch.from_numpy(samples.inputs), torch.from_numpy(samples.targets)  # type: ignore[arg-type]
    module.train()
    one, _, other = module(inputs)
    loss = nn.functional.cross_entropy
    expected = loss(one, targets) + 0.3 * loss(other, targets)
    gradients = torch.cat([each.flatten() for each in torch.autograd.grad(expected, list(module.parameters()))])
    before = made.model.parameters.clone()
    made.local_update(0)
    assert torch.allclose(before - made.model.parameters, gradients, atol=1e-6)
    assert made.evaluate("test").sums["count"] == 31, "the module has one output in evaluation"


def test_batch_norms_that_evaluation_does_not_reach_keep_their_statistics() -> None:
    module = TwoHeads(weight=0.3)
    module.norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    moments = statistics.measure(module, [torch.randn(5, 6)])
    assert np.count_nonzero(moments) == 0
    statistics.load(module, moments)
    assert (module.norm.running_mean == 2).all() and (module.norm.running_var == 1).all()  # type: ignore[union-attr, operator]


def test_the_config_check_accepts_tuples_only_from_modules_with_an_auxiliary_weight() -> None:
    load(QUICKSTART, [f"{MODULE}, weight: 0.5}}"])
    with pytest.raises(ConfigError, match="forward gives a tuple for a batch"):
        load(QUICKSTART, [f"{MODULE}}}"])
    with pytest.raises(ConfigError, match=r"needs outputs \[batch, 10\] and .*; the model gives \[2, 3\]"):
        load(QUICKSTART, [f"{MODULE}, weight: 0.5, beside: 3}}"])
