"""Training on a quadratic: fast and exact, with a different optimum on every node. For simulations that do not depend
on what is learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decentnode.samples import DataSpec
from decentnode.tasks.classification import Classification, ClassificationConfig
from decentnode.tensors import FlatModel
from decentnode.training.base import Direction, Evaluation, Training, Update


class Vector(nn.Module):
    """A model that is a vector of zeros, optionally with float buffers."""

    def __init__(self, elements: int, buffers: int = 0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(elements))
        if buffers:
            self.register_buffer("statistics", torch.zeros(buffers))


class Quadratic(Training):
    """Makes one gradient step of |x - target|^2 / 2 per round; in round `poison` it writes a NaN into the model."""

    def __init__(self, uid: int, elements: int, lr: float = 0.1, poison: int = -1, buffers: int = 0) -> None:
        self.model = FlatModel(Vector(elements, buffers))
        generator = torch.Generator().manual_seed(uid)
        self.target = torch.randn(elements, generator=generator)
        self.model.parameters.copy_(torch.randn(elements, generator=generator))
        self.model.buffers.fill_(float(uid))
        self.uid, self.lr, self.poison = uid, lr, poison
        self.num_samples = 1
        self.task = Classification(ClassificationConfig.model_validate({}), DataSpec((elements,), num_classes=2))
        self.initial = self.model.parameters.clone()
        self.made: list[int] = []
        """The rounds whose local steps were made, in order."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        self.made.append(round)
        gradient = self.model.parameters - self.target
        self.model.parameters.sub_(gradient if direction is None else direction(gradient), alpha=self.lr)
        if round == self.poison:
            self.model.parameters[0] = float("nan")
        return Update(1, 1, float(gradient.square().mean()))

    def evaluate(self, split: str = "test", part: tuple[int, int] = (0, 1)) -> Evaluation:  # noqa: ARG002
        loss = float((self.model.parameters - self.target).square().mean())
        sums = {"loss": loss, "count": 1.0, "correct": 0.5}
        return Evaluation(1, sums, self.task.evaluated(sums))

    @property
    def has_validation(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state
