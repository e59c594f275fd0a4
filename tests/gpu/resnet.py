"""ResNet-18 for images of 32 x 32 (He et al. 2016; a 3 x 3 first convolution and no pooling before the blocks)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from decentnode.tensors import FlatModel


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut past them."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out) for _ in range(2)])
        self.shortcut = nn.Sequential()
        if stride > 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet18(device: torch.device) -> tuple[nn.Module, Tensor]:
    """Returns (model, its parameters as one flat tensor)."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
              (512, 512, 1)]  # fmt: skip
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *(Block(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    ).to(device)  # fmt: skip
    return model, FlatModel(model).parameters
