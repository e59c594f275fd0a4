"""Fully connected layers on the flattened sample."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import PositiveInt
from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, outputs_of
from decentnode.samples import DataSpec

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class MlpConfig(ModelConfig):
    name: str = "mlp"
    hidden: tuple[PositiveInt, ...] = (64,)
    """Widths of the hidden layers. On 3x32x32 inputs and 10 classes, [325] has 1,001,985 parameters and
    [4096, 3000] has 24,908,018."""
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    """Activation function between the layers."""


class Mlp(Model):
    Config: ClassVar[type[Config]] = MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise([math.prod(data.input_shape), *self.config.hidden]):
            layers += [nn.Linear(width_in, width_out), ACTIVATIONS[self.config.activation]()]
        last = self.config.hidden[-1] if self.config.hidden else math.prod(data.input_shape)
        return nn.Sequential(*layers, nn.Linear(last, outputs_of("mlp", data)))
