"""RNET, decentralizepy's residual net for FEMNIST: a ResNet-18 of half the widths; 2,811,678 parameters."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.models.norms import Norm, he_normal
from decentnode.models.resnet import ResnetConfig, ResnetModule
from decentnode.samples import DataSpec


class RnetConfig(ModelConfig):
    name: str = "rnet"
    norm: Norm = "batch"
    """group has no running statistics; both have the same number of parameters."""
    groups: int = Field(2, ge=1)
    """Groups of norm: group."""


class Rnet(Model):
    """Images of any size from 16x16 on; the count of parameters is that of 1x28x28 and 62 classes. The same as `resnet`
    with depth 18, widths [32, 64, 128, 256] and stem: large."""

    Config: ClassVar[type[Config]] = RnetConfig

    def __init__(self, config: RnetConfig) -> None:
        shape = {"depth": 18, "widths": (32, 64, 128, 256), "stem": "large"}
        self._resnet = ResnetConfig.model_validate({**shape, "norm": config.norm, "groups": config.groups})

    def make(self, data: DataSpec) -> nn.Module:
        channels, _, _ = image_shape("rnet", data, 16)
        return he_normal(ResnetModule(self._resnet, channels, outputs_of("rnet", data)))
