"""The contract of `Model`: checks that every implementation must pass."""

from __future__ import annotations

import torch
from torch import nn

from decentnode.models.base import Model
from decentnode.samples import DataSpec
from decentnode.tensors import FlatModel


def check_model(model: Model, data: DataSpec) -> None:
    """Checks seeded initialization, the output's shape, independence of the samples of a batch, and gradients."""
    torch.manual_seed(1)
    module = model.make(data)
    torch.manual_seed(1)
    again = model.make(data)
    other = model.make(data)
    values = [FlatModel(m).parameters for m in (module, again, other)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    assert all(p.is_contiguous() for p in module.parameters())  # the flat order is the same on every device
    inputs = torch.randn(3, *data.input_shape)
    if data.inputs == "ids":
        most = torch.tensor([data.users, data.items] if data.users is not None else data.vocabulary)
        inputs = (torch.rand(3, *data.input_shape) * most).long()
    kept = inputs.clone()
    outputs = module(inputs)
    classes = data.num_classes or data.vocabulary
    shape = (3,) if classes is None else (3, *data.target_shape, classes)
    assert outputs.shape == shape and outputs.dtype == torch.float32
    assert torch.equal(inputs, kept)
    if any(isinstance(part, nn.BatchNorm2d | nn.Dropout) for part in module.modules()):
        module.eval()  # in training mode, outputs depend on the other samples or on random numbers
    together, alone = module(inputs), torch.cat([module(one[None]) for one in inputs])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)
    module.train()
    outputs.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
