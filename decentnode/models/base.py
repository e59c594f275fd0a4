"""The contract of a model: an untrained module for the data at hand."""

from __future__ import annotations

import abc

from torch import nn

from decentnode.config.component import Component, Config
from decentnode.errors import UsageError


class Model(Component, abc.ABC):
    """Makes modules that map [B, *input_shape] float32 to logits [B, num_classes]."""

    @abc.abstractmethod
    def __init__(self, config: Config) -> None: ...

    @abc.abstractmethod
    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """A new module. Initial values come from torch's global generator, which the caller seeds.

        Raises UsageError when the model cannot take inputs of this shape.
        """


def image_shape(model: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """(channels, height, width). Raises UsageError unless inputs are images of at least smallest x smallest."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UsageError(
            f"model {model} needs images [channels, height, width] of at least {smallest}x{smallest}, "
            f"got samples of shape {list(input_shape)}"
        )
    return input_shape[0], input_shape[1], input_shape[2]
