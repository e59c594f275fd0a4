"""The small convolutional net of decentralizepy for CIFAR-10 (from PyTorch's tutorial); 62,006 parameters."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.samples import DataSpec


class CnnConfig(ModelConfig):
    name: str = "cnn"


class Cnn(Model):
    """Images of any size from 16x16 on; the count of parameters is that of 3x32x32 and 10 classes."""

    Config: ClassVar[type[Config]] = CnnConfig

    def __init__(self, config: CnnConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, height, width = image_shape("cnn", data, 16)
        pixels = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * pixels, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs_of("cnn", data)),
        )
