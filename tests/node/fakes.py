"""Training on a quadratic: fast, exact, and every node wants something else; and a run of it that is stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decentnode.build import step_all
from decentnode.communication.base import Communication
from decentnode.communication.parts import Schema
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node
from decentnode.samples import DataSpec
from decentnode.tasks.classification import Classification, ClassificationConfig
from decentnode.tensors import FlatModel
from decentnode.training.base import Direction, Evaluation, Training, Update
from tests.communication.contract import nodes, together


class Vector(nn.Module):
    def __init__(self, elements: int, buffers: int = 0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(elements))
        if buffers:
            self.register_buffer("statistics", torch.zeros(buffers))


class Quadratic(Training):
    """One gradient step of |x - target|^2 / 2 per round; `poison` writes NaN in that round."""

    def __init__(self, uid: int, elements: int, lr: float = 0.1, poison: int = -1, buffers: int = 0) -> None:
        self.model = FlatModel(Vector(elements, buffers))
        generator = torch.Generator().manual_seed(uid)
        self.target = torch.randn(elements, generator=generator)
        self.model.parameters.copy_(torch.randn(elements, generator=generator))
        self.model.buffers.fill_(float(uid))
        self.uid, self.lr, self.poison = uid, lr, poison
        self.num_samples = 1
        self.task = Classification(ClassificationConfig(), DataSpec((elements,), num_classes=2))
        self.initial = self.model.parameters.clone()

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        gradient = self.model.parameters - self.target
        self.model.parameters.sub_(gradient if direction is None else direction(gradient), alpha=self.lr)
        if round == self.poison:
            self.model.parameters[0] = float("nan")
        return Update(1, 1, float(gradient.square().mean()))

    def evaluate(self, split: str = "test", part: tuple[int, int] = (0, 1)) -> Evaluation:
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


def stacked(trainings: list[Quadratic], what: str = "parameters") -> Tensor:
    return torch.stack(
        [getattr(t.model, what) if what in ("parameters", "buffers") else getattr(t, what) for t in trainings]
    )


ENDLESS = NodeConfig.model_validate({"rounds": 100_000, "evaluate_every": 0})


def stopped_in_round_7(
    transport: str, schemas: tuple[Schema, ...],
    make: Callable[[Communication, Callable[[dict[str, Any]], None]], Node],
) -> None:
    """Four nodes run until node 3 is asked to stop in round 7: all end between the same two rounds or near, and the
    closing evaluation has all of them. make: a node of `ENDLESS` from its communication and what takes its records."""
    with nodes(transport, 4, schemas) as made:
        built: list[Node] = []

        def record(r: dict[str, Any]) -> None:
            if r["kind"] == "round" and r["round"] == 7:
                built[3].ask_stop()

        built += [make(each, record if each.uid == 3 else lambda _: None) for each in made]
        if transport == "inproc":
            step_all(built)
        else:
            together(made, lambda communication: built[communication.uid].run())
    assert all(8 <= node.round <= 16 for node in built)
    assert all(node.figures()["contributors"] == 4 for node in built)
