"""The convolutional net of LEAF for FEMNIST, as decentralizepy has it; 1,690,046 parameters."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.samples import DataSpec


class FemnistCnnConfig(ModelConfig):
    name: str = "femnist_cnn"


class FemnistCnn(Model):
    """Images of any size from 4x4 on; the count of parameters is that of 1x28x28 and 62 classes (Caldas et al. 2018,
    arXiv 1812.01097)."""

    Config: ClassVar[type[Config]] = FemnistCnnConfig

    def __init__(self, config: FemnistCnnConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, height, width = image_shape("femnist_cnn", data, 4)
        pixels = (height // 4) * (width // 4)
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * pixels, 512), nn.ReLU(), nn.Linear(512, outputs_of("femnist_cnn", data)),
        )
