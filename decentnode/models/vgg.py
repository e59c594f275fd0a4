"""VGG for CIFAR: stages of 3x3 convolutions and pooling, then linear layers of 512 units."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.models.norms import Norm, he_normal, make_norm
from decentnode.samples import DataSpec

STAGES: dict[int, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4),
}
"""By depth, the number of convolutions before each of the five poolings."""
WIDTHS = (64, 128, 256, 512, 512)


class VggConfig(ModelConfig):
    name: str = "vgg"
    depth: Literal[11, 13, 16, 19] = 16
    """Layers with weights: 9,756,426 parameters at 11 and 15,253,578 at 16, with norm: batch or group, 3x32x32 and 10
    classes."""
    norm: Norm = "batch"
    """Normalization after every convolution; none is the first version's."""
    groups: int = Field(2, ge=1)
    """Groups of norm: group."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """Probability with which an input of the two hidden linear layers is left out in training."""


class Vgg(Model):
    """Images of any size from 32x32 on (Simonyan and Zisserman 2015, arXiv 1409.1556, with linear layers of 512 units
    as is usual for CIFAR)."""

    Config: ClassVar[type[Config]] = VggConfig

    def __init__(self, config: VggConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, height, width = image_shape("vgg", data, 32)
        layers: list[nn.Module] = []
        for outputs, count in zip(WIDTHS, STAGES[self.config.depth], strict=True):
            for _ in range(count):
                norm = make_norm(self.config.norm, outputs, self.config.groups)
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), norm, nn.ReLU()]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        pixels = (height // 32) * (width // 32)
        layers.append(nn.Flatten())
        for inputs in (512 * pixels, 512):
            layers += [nn.Dropout(self.config.dropout), nn.Linear(inputs, 512), nn.ReLU()]
        return he_normal(nn.Sequential(*layers, nn.Linear(512, outputs_of("vgg", data))))
