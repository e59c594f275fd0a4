"""The convolutional net of LEAF for CelebA, as decentralizepy has it; 30,242 parameters."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.samples import DataSpec


class CelebaCnnConfig(ModelConfig):
    name: str = "celeba_cnn"


class CelebaCnn(Model):
    """Images of any size from 16x16 on; the count of parameters is that of 3x84x84 and 2 classes (Caldas et al. 2018,
    arXiv 1812.01097)."""

    Config: ClassVar[type[Config]] = CelebaCnnConfig

    def __init__(self, config: CelebaCnnConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, height, width = image_shape("celeba_cnn", data, 16)
        layers: list[nn.Module] = []
        for inputs in (channels, 32, 32, 32):
            layers += [nn.Conv2d(inputs, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        pixels = (height // 16) * (width // 16)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * pixels, outputs_of("celeba_cnn", data)))
