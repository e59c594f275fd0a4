"""Densely connected nets: every layer gets the outputs of all earlier layers of its stage."""

from __future__ import annotations

from typing import ClassVar

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.models.norms import Norm, he_normal, make_norm
from decentnode.samples import DataSpec

STAGES = 3
SQUEEZE = 4
"""A layer's 1x1 convolution has this many times the channels that the layer adds (section 3)."""


class DensenetConfig(ModelConfig):
    name: str = "densenet"
    depth: int = Field(100, ge=10)
    """6 n + 4: layers with weights, in three stages. DenseNet-BC of depth 100 and growth 12 has 769,162 parameters on
    3x32x32 and 10 classes, of depth 190 and growth 40 25,624,430."""
    growth: int = Field(12, ge=1)
    """Channels that each layer adds."""
    norm: Norm = "batch"
    """Before every convolution but the first."""
    groups: int = Field(1, ge=1)
    """Groups of norm: group."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which a value that a layer adds is left out in training."""

    @pydantic.field_validator("depth")
    @classmethod
    def _whole_layers(cls, depth: int) -> int:
        if depth % 6 != 4:
            raise ValueError(f"must be 6 n + 4 (40, 100, 190, 250), got {depth}")
        return depth


class Densenet(Model):
    """DenseNet-BC for images of any size from 4x4 on: a 1x1 convolution before each 3x3 one, and half of the channels
    from one stage to the next (Huang et al. 2017, arXiv 1608.06993)."""

    Config: ClassVar[type[Config]] = DensenetConfig

    def __init__(self, config: DensenetConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, _, _ = image_shape("densenet", data, 4)
        config = self.config
        width = 2 * config.growth
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for stage in range(STAGES):
            for _ in range((config.depth - 4) // 6):
                layers.append(DenseLayer(width, config))
                width += config.growth
            layers += [make_norm(config.norm, width, config.groups), nn.ReLU()]
            if stage < STAGES - 1:
                layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
                width //= 2
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs_of("densenet", data))]
        return he_normal(nn.Sequential(*layers))


class DenseLayer(nn.Module):
    """x [B, C, H, W] -> [B, C + growth, H, W]: x, followed by the channels that two convolutions compute from it."""

    def __init__(self, inputs: int, config: DensenetConfig) -> None:
        super().__init__()
        inner = SQUEEZE * config.growth
        self.found = nn.Sequential(
            make_norm(config.norm, inputs, config.groups), nn.ReLU(), nn.Conv2d(inputs, inner, 1, bias=False),
            make_norm(config.norm, inner, config.groups), nn.ReLU(),
            nn.Conv2d(inner, config.growth, 3, padding=1, bias=False), nn.Dropout(config.dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.found(x)], 1)
