"""The model. Keys of `model` in config.yaml are the arguments of its constructor; arguments that follow from the data
(input_shape, num_classes, vocabulary, users, items) are filled in automatically."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(math.prod(input_shape), width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))
