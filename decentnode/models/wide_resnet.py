"""Wide residual nets: few layers of many channels."""

from __future__ import annotations

from typing import ClassVar

import pydantic
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.models.norms import Norm, he_normal, make_norm
from decentnode.samples import DataSpec


class WideResnetConfig(ModelConfig):
    name: str = "wide_resnet"
    depth: int = Field(28, ge=10)
    """Number of layers with weights: 6 n + 4."""
    widen: int = Field(10, ge=1)
    """Factor on the 16, 32 and 64 channels of the narrow net. WRN-28-10 has 36,479,194 parameters on 3x32x32 and 10
    classes, WRN-16-4 has 2,748,890."""
    norm: Norm = "batch"
    """Normalization before every convolution."""
    groups: int = Field(2, ge=1)
    """Groups of norm: group."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which a value between the two convolutions of a block is left out in training."""

    @pydantic.field_validator("depth")
    @classmethod
    def _whole_blocks(cls, depth: int) -> int:
        if depth % 6 != 4:
            raise ValueError(f"must be 6 n + 4 (10, 16, 22, 28, 34, 40), got {depth}")
        return depth


class WideResnet(Model):
    """Images of any size from 4x4 on (Zagoruyko and Komodakis 2016, arXiv 1605.07146)."""

    Config: ClassVar[type[Config]] = WideResnetConfig

    def __init__(self, config: WideResnetConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, _, _ = image_shape("wide_resnet", data, 4)
        config = self.config
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
        inputs = 16
        for stage, width in enumerate((16, 32, 64)):
            for block in range((config.depth - 4) // 6):
                layers.append(WideBlock(inputs, width * config.widen, 2 if stage and not block else 1, config))
                inputs = width * config.widen
        layers += [make_norm(config.norm, inputs, config.groups), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs_of("wide_resnet", data))]
        return he_normal(nn.Sequential(*layers))


class WideBlock(nn.Module):
    """Norm and ReLU before each of two 3x3 convolutions; a 1x1 convolution as the shortcut if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, config: WideResnetConfig) -> None:
        super().__init__()
        self.norm1 = make_norm(config.norm, inputs, config.groups)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = make_norm(config.norm, outputs, config.groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = functional.relu(self.norm1(x))
        inner = self.conv2(self.dropout(functional.relu(self.norm2(self.conv1(ready)))))
        # If the shape changes, the shortcut starts after the norm, too.
        return inner + (x if self.shortcut is None else self.shortcut(ready))
