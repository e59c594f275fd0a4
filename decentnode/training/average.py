"""Keeps the exponential moving average of a node's models, beside the model that is trained and exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config.component import Settings
from decentnode.errors import CheckpointError
from decentnode.tensors import FlatModel, at_least_float32


class EMAConfig(Settings):
    """Which models the average is made of."""

    decay: float = Field(0.99, gt=0, lt=1)
    """Factor by which a model counts less than the next one; half of the weight is on the last log(.5) / log(decay)
    models, 69 models at .99. Weights are normalized, so that the initial model has no weight after the first
    average."""
    every: Literal["round", "step"] = "round"
    """Which models are averaged. round: the mixed model after every round. step: the local model after every optimizer
    step."""


class ModelAverage:
    """m_t = sum_s d^(t-s) x_s / sum_s d^(t-s) over the models x_1 ... x_t, with their float buffers."""

    def __init__(self, config: EMAConfig, model: FlatModel) -> None:
        self.every = config.every
        self._decay, self._model = config.decay, model
        self._count = 0
        self._parameters = model.parameters.detach().clone()
        self._buffers = model.buffers.clone()

    def add(self) -> None:
        """Add the current model to the average."""
        self._count += 1
        weight = (1.0 - self._decay) / (1.0 - self._decay**self._count)
        with torch.no_grad():
            self._parameters.lerp_(self._model.parameters, weight)
            self._buffers.lerp_(self._model.buffers, weight)

    def value(self) -> Tensor:
        """Returns a copy [P + B] of the average, parameters, then float buffers, at least in float32; the current
        model's values if no model has been added."""
        model = self._model
        if not self._count:
            return model.values()
        parameters = at_least_float32(self._parameters)
        return torch.cat([parameters, self._buffers.to(parameters.dtype)])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; its tensors are not copies."""
        return {"count": self._count, "parameters": self._parameters, "buffers": self._buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises CheckpointError if it is the average of another model."""
        for own, kept in ((self._parameters, state["parameters"]), (self._buffers, state["buffers"])):
            if own.shape != kept.shape:
                raise CheckpointError(f"the average of a model with {kept.numel()} values does not fit {own.numel()}")
            own.copy_(kept)
        self._count = int(state["count"])
