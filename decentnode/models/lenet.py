"""The LeNets of LeCun et al., for MNIST and similar datasets."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.samples import DataSpec


class LenetConfig(ModelConfig):
    name: str = "lenet"
    variant: Literal["lenet5", "caffe"] = "lenet5"
    """lenet5: convolutions of 6 and 16 channels, linear layers of 120 and 84 units, 61,706 parameters on 1x28x28 and
    10 classes. caffe: 20 and 50 channels, 500 units, 431,080 parameters."""


class Lenet(Model):
    """Images of any size from 12x12 on. ReLU and max pooling instead of the first version's sigmoids and averages
    (LeCun et al. 1998, Proc. IEEE 86)."""

    Config: ClassVar[type[Config]] = LenetConfig

    def __init__(self, config: LenetConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        channels, height, width = image_shape("lenet", data, 16 if self.config.variant == "caffe" else 12)
        # lenet5 was made for 32x32 images: two pixels of padding have the same effect on 28x28.
        first, second, padding = (6, 16, 2) if self.config.variant == "lenet5" else (20, 50, 0)
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        pixels = second * rows * columns
        outputs = outputs_of("lenet", data)
        hidden = [nn.Linear(pixels, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)]
        if self.config.variant == "caffe":
            hidden = [nn.Linear(pixels, 500), nn.ReLU(), nn.Linear(500, outputs)]
        return nn.Sequential(
            nn.Conv2d(channels, first, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), *hidden,
        )
