"""Means over ranks of models of float16, whose sums are larger than the largest float16, 65,504."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentnode.parallel.averages import GlobalAverage, consensus_distance

LARGE = 57_344.0
"""A number of float16 and of bfloat16."""


def mean_of_equals(tensor: Tensor) -> Tensor:
    """Replaces a tensor by the mean over three ranks with equal tensors, summed in its dtype, as collectives do."""
    return tensor.copy_(tensor + tensor + tensor).div_(3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_models_are_their_mean(dtype: torch.dtype) -> None:
    module = nn.BatchNorm1d(4).to(dtype)
    with torch.no_grad():
        module.weight.fill_(LARGE)
        module.running_var.fill_(LARGE)  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    average = GlobalAverage(module, list(module.parameters()), buffers=True)
    assert average.replace_by_mean(keep=False, measure=True, mean_of=mean_of_equals) == 0
    assert all(tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
               for name, tensor in module.state_dict().items())  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_models_have_no_distance(dtype: torch.dtype) -> None:
    bucket: Any = SimpleNamespace(flat=torch.full((7,), LARGE, dtype=dtype), gather=lambda: None)
    assert consensus_distance([bucket], mean_of_equals) < 1e-7
    assert bucket.flat.dtype == dtype and bool((bucket.flat == LARGE).all())
