"""Residual nets whose blocks each have a few more channels than the one before."""

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

STAGES, FIRST, EXPANSION = 3, 16, 4
"""The number of stages, the channels of the first convolution, and the factor from a bottleneck's channels to its
outputs."""


class PyramidnetConfig(ModelConfig):
    name: str = "pyramidnet"
    depth: int = Field(110, ge=8)
    """Number of layers with weights: 6 n + 2, or 9 n + 2 with bottlenecks."""
    alpha: int = Field(48, ge=0)
    """How many more channels the last block has than the first convolution, which has 16. The channels grow by the same
    amount in every block, rounded to the nearest integer as in the authors' code, not down as in the paper. 48, 84 and
    270 are the paper's; at depth 110 they make 1,772,706, 3,904,446 and 28,485,477 parameters on 3x32x32 and 10
    classes."""
    bottleneck: bool = False
    """Whether blocks consist of a 1x1, a 3x3 and a 1x1 convolution with four times as many outputs, for depths such as
    164, 200 and 272."""
    norm: Norm = "batch"
    """Normalization before and after the convolutions of a block."""
    groups: int = Field(1, ge=1)
    """Groups of norm: group, a divisor of all widths."""

    @pydantic.model_validator(mode="after")
    def _whole_blocks(self) -> PyramidnetConfig:
        step = 9 if self.bottleneck else 6
        if self.depth % step != 2:
            raise ValueError(f"depth must be {step} n + 2{' of bottlenecks' * self.bottleneck}, got {self.depth}")
        return self

    @property
    def blocks(self) -> int:
        """The number of blocks in each stage."""
        return (self.depth - 2) // (9 if self.bottleneck else 6)


class Pyramidnet(Model):
    """Additive PyramidNet for images of any size from 4x4 on; shortcuts have no parameters, new channels are zeros (Han
    et al. 2017, arXiv 1610.02915, section 4)."""

    Config: ClassVar[type[Config]] = PyramidnetConfig

    def __init__(self, config: PyramidnetConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, _, _ = image_shape("pyramidnet", data, 4)
        config = self.config
        layers: list[nn.Module] = [
            nn.Conv2d(channels, FIRST, 3, padding=1, bias=False), make_norm(config.norm, FIRST, config.groups)
        ]
        inputs, count = FIRST, STAGES * config.blocks
        for block in range(count):
            width = FIRST + round(config.alpha * (block + 1) / count)
            layers.append(PyramidBlock(inputs, width, 2 if block and not block % config.blocks else 1, config))
            inputs = width * (EXPANSION if config.bottleneck else 1)
        layers += [make_norm(config.norm, inputs, config.groups), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs_of("pyramidnet", data))]
        return he_normal(nn.Sequential(*layers))


class PyramidBlock(nn.Module):
    """x -> shortcut + convolutions of x, with a norm before each convolution and after the last, and ReLU between them
    (figure 6 d of the paper). The shortcut is x with zeros as new channels."""

    def __init__(self, inputs: int, width: int, stride: int, config: PyramidnetConfig) -> None:
        super().__init__()
        self._stride = stride
        outputs = width * (EXPANSION if config.bottleneck else 1)
        self._new_channels = outputs - inputs
        # The first convolution of basic blocks and the 3x3 one of bottlenecks have the stride.
        shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)] if config.bottleneck else [
            (inputs, width, 3, stride), (width, outputs, 3, 1)]  # fmt: skip
        layers: list[nn.Module] = []
        for number, (into, out, kernel, step) in enumerate(shapes):
            layers += [make_norm(config.norm, into, config.groups), *([nn.ReLU()] if number else []),
                       nn.Conv2d(into, out, kernel, step, kernel // 2, bias=False)]  # fmt: skip
        self.inner = nn.Sequential(*layers, make_norm(config.norm, outputs, config.groups))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self._stride == 1 else functional.avg_pool2d(x, 2, ceil_mode=True)
        found: Tensor = self.inner(x) + functional.pad(shortcut, (0, 0, 0, 0, 0, self._new_channels))
        return found
