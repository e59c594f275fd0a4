"""Leader SGD: nodes are pulled toward the best model of their neighborhood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing.forces import leader_of, toward_
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig
from decentnode.sharing.requirements import Requirements


class LeaderConfig(LocalSGDConfig):
    every: int = Field(1, ge=1)
    """Number of rounds per exchange; nodes exchange in the last of these rounds."""
    pull: float = Field(0.1, gt=0, le=1)
    """How far a node moves toward the leader of its neighborhood at an exchange."""
    average: float = Field(0.5, ge=0, le=1)
    """How far a node first moves toward the weighted mean of its neighborhood; 0 is LSGD, for nodes with similar
    data."""


class Leader(LocalSGD):
    """Nodes move toward the neighbor with the lowest training loss since the last exchange (LSGD, arXiv 1905.10395).

    Before that they move toward the mean of their neighborhood, which LSGD does not (`average: 0`): with unequal data
    the lowest loss belongs to the node with the easiest samples, and pulls only toward leaders do not lead to
    consensus. A node that leads its own neighborhood is not pulled. The mean of the models is not preserved.
    """

    Config: ClassVar[type[component.Config]] = LeaderConfig
    requirements = Requirements(sequential=True, scalars={"loss": ScalarSpec(float, finite=False)})

    def __init__(self, config: LeaderConfig) -> None:
        super().__init__(config)
        self.pull, self.average = config.pull, config.average
        self._losses: list[float] = []

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        self._losses = [*self._losses[-self.every + 1 :], loss] if self.every > 1 else [loss]

    @property
    def loss(self) -> float:
        return sum(self._losses) / len(self._losses) if self._losses else 0.0

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return dict.fromkeys(view.neighbors, Payload({"x": model}, {"loss": self.loss}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        losses = {uid: float(payload.scalars["loss"]) for uid, payload in received.items()}
        leader = leader_of({view.uid: self.loss, **losses})
        if self.average:
            rest = 1.0 - self.average * sum(view.weights[uid] for uid in received)
            model.mul_(rest)
            for uid, payload in received.items():
                model.add_(payload.tensors["x"], alpha=self.average * view.weights[uid])
        if leader != view.uid:
            toward_(model, received[leader].tensors["x"], self.pull)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix(out.copy_(model), received, view)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements)}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = [float(loss) for loss in state["losses"]]
