"""Models of float16 whose sums, or whose buffers, are larger than the largest float16, in a new generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig
from decentnode.node.checkpoints.handover import give_models
from decentnode.node.generations.merging import merge_models
from decentnode.tensors import FlatModel

NODES = 3
LARGE = 60_000.0
"""Below the largest float16, 65,504; the sum of two is not."""
VARIANCE = 123_456.0
"""Of a float32 buffer; larger than the largest float16, and not one of bfloat16's numbers."""


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
