"""The base class of models, which make untrained modules for given data."""

from __future__ import annotations

import abc
import math
from pathlib import Path
from typing import Annotated

from torch import nn

from decentnode.config.component import ADDED, Component, Config
from decentnode.errors import UsageError
from decentnode.models.lora import LoraConfig
from decentnode.samples import DataSpec


class ModelConfig(Config):
    """Base of every model's Config."""

    init: Path | None = None
    """A .safetensors file with the initial weights: the state_dict of such a model, as runs save it in their folder
    models. Default: drawn from the run's seed."""
    lora: Annotated[LoraConfig | None, ADDED] = None
    """Low-rank adapters: the model itself is frozen, and only the adapters are trained and shared. Default: no
    adapters, the whole model is trained."""


class Model(Component, abc.ABC):
    """Makes modules for given data, which map a batch of inputs to what the task needs."""

    @abc.abstractmethod
    def __init__(self, config: Config) -> None: ...

    @abc.abstractmethod
    def make(self, data: DataSpec) -> nn.Module:
        """Returns a new module. Initial values come from torch's global generator, which the caller seeds.

        Raises UsageError if the model does not support such data.
        """


def outputs_of(model: str, data: DataSpec) -> int:
    """Returns the number of outputs of a model: one per class, or one per number in a target.

    Raises UsageError unless inputs are numbers.
    """
    if data.inputs != "values":
        raise UsageError(f"model {model} needs inputs of numbers, got ids of things ({data.task})")
    return data.num_classes or math.prod(data.target_shape)


def image_shape(model: str, data: DataSpec, smallest: int) -> tuple[int, int, int]:
    """Returns (channels, height, width). Raises UsageError unless inputs are images of at least smallest x smallest."""
    input_shape = data.input_shape
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UsageError(
            f"model {model} needs images [channels, height, width] of at least {smallest}x{smallest}, "
            f"got samples of shape {list(input_shape)}"
        )
    return input_shape[0], input_shape[1], input_shape[2]


def vocabulary_of(model: str, data: DataSpec) -> int:
    """Returns the number of different tokens. Raises UsageError unless inputs are sequences of tokens."""
    if data.vocabulary is None or data.inputs != "ids" or len(data.input_shape) != 1:
        raise UsageError(
            f"model {model} needs sequences of tokens, got {data.task} of samples of shape {list(data.input_shape)}"
        )
    return data.vocabulary


def tokens_of(model: str, data: DataSpec) -> tuple[int, int]:
    """Returns (length, vocabulary). Raises UsageError unless inputs are sequences of tokens and the target is one
    token."""
    if data.vocabulary is None or data.inputs != "ids" or len(data.input_shape) != 1 or data.target_shape != ():
        raise UsageError(
            f"model {model} needs sequences of tokens with one token as target, got {data.task} of samples of shape "
            f"{list(data.input_shape)} with targets of shape {list(data.target_shape)}"
        )
    return data.input_shape[0], data.vocabulary
