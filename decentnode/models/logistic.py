"""Multinomial logistic regression."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, outputs_of
from decentnode.samples import DataSpec


class LogisticConfig(ModelConfig):
    name: str = "logistic"


class Logistic(Model):
    Config: ClassVar[type[Config]] = LogisticConfig

    def __init__(self, config: LogisticConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.input_shape), outputs_of("logistic", data)))
