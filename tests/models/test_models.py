from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from decentnode.config.component import load_class
from decentnode.errors import UsageError
from decentnode.models import MODELS
from decentnode.models.base import Model

from .contract import check_model

CIFAR = (3, 32, 32)


def make(name: str, **keys: Any) -> Model:
    chosen = load_class(name, MODELS, "model")
    found: Model = chosen(chosen.Config.model_validate({"name": name, **keys}))
    return found


@pytest.mark.parametrize("shape", [CIFAR, (1, 28, 28), (1, 17, 30)])
@pytest.mark.parametrize("name", MODELS)
def test_contract(name: str, shape: tuple[int, ...]) -> None:
    check_model(make(name), shape, 7)


@pytest.mark.parametrize("name, keys, parameters", [
    ("gn_lenet", {}, 89_834),
    ("cnn", {}, 62_006),
    ("logistic", {}, 30_730),
    ("mlp", {"hidden": [325]}, 1_001_985),
    ("mlp", {"hidden": [4096, 3000]}, 24_908_018),
    ("mlp", {"hidden": []}, 30_730),
])
def test_parameters_on_cifar10(name: str, keys: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        module = make(name, **keys).make(CIFAR, 10)
    assert sum(p.numel() for p in module.parameters()) == parameters


def test_logistic_on_femnist_is_that_of_decentralizepy() -> None:
    assert sum(p.numel() for p in make("logistic").make((1, 28, 28), 62).parameters()) == 48_670


class _Reference(nn.Module):
    """GN-LeNet as decentralizepy writes it: ReLU before pooling, contiguous images."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.of = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in "123":
            x = getattr(self.of, "norm" + n)(getattr(self.of, "conv" + n)(x))
            x = functional.max_pool2d(functional.relu(x), 2)
        return self.of.output(torch.flatten(x, 1))


def test_gn_lenet_computes_what_the_reference_does() -> None:
    torch.manual_seed(0)
    module = make("gn_lenet").make(CIFAR, 10).double()
    inputs, targets = torch.randn(4, *CIFAR, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    gradients = []
    for one in (module, _Reference(module)):
        module.zero_grad()
        loss = functional.cross_entropy(one(inputs), targets)
        loss.backward()
        gradients.append([loss.detach(), *[p.grad for p in module.parameters()]])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name, shape", [("gn_lenet", (1, 7, 8)), ("gn_lenet", (64,)), ("cnn", (3, 15, 32))])
def test_inputs_that_a_model_cannot_take(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=rf"model {name} needs images .* got samples of shape \["):
        make(name).make(shape, 10)


@pytest.mark.parametrize("name, shape", [("gn_lenet", (1, 8, 8)), ("cnn", (3, 16, 16))])
def test_the_smallest_images(name: str, shape: tuple[int, ...]) -> None:
    assert make(name).make(shape, 10)(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_mlp_layers(activation: str) -> None:
    module = make("mlp", hidden=[5, 4], activation=activation).make((2, 3), 2)
    assert [type(layer).__name__.lower() for layer in module.children()] == [
        "flatten", "linear", activation, "linear", activation, "linear"]
