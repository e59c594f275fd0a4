"""Elastic averaging: every node is pulled toward a center of its own, and the centers are mixed by gossip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.forces import elastic_pull_, toward
from decentnode.sharing.hooks import Mixing
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.state import Tensors


class ElasticConfig(LocalSGDConfig):
    every: int = Field(1, ge=1)
    """Number of rounds per exchange; nodes exchange in the last of these rounds."""
    pull: float = Field(0.5, gt=0, lt=1)
    """How far a node moves toward its center at an exchange (alpha)."""
    center_pull: float | None = Field(None, gt=0, le=1)
    """How far a center moves toward the models of its neighborhood (beta). Default: the value of `pull`. The paper has
    n times `pull`, 0.9 in all."""
    force: Literal["before", "after"] = "before"
    """The model that both elastic forces use: before, the model x(t) from which the round's local steps start, as in
    the paper; after, the model after the local steps."""


class Elastic(Tensors, LocalSGD):
    """x_i <- x_i - u_i - a (x_i - c_i),  c_i <- sum_j W_ij (c_j + b (x_j - c_j)) in rounds with an exchange.

    u_i is the update that the round's local steps made from x_i; every x and c on the right is that of the round's
    start. There is no center node: on a complete graph with equal centers this is EASGD (arXiv 1412.6651, equations 5
    and 6). With b = a and without local steps, sum_i (x_i + c_i) is preserved. The distance between the mean model and
    the mean center contracts for a + b < 2.
    """

    Config: ClassVar[type[component.Config]] = ElasticConfig
    requirements = Requirements(sequential=True, doubly_stochastic=True)
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("center", "x")

    def __init__(self, config: ElasticConfig) -> None:
        super().__init__(config)
        self.pull = config.pull
        self.center_pull = config.pull if config.center_pull is None else config.center_pull
        self.force = config.force
        self.center: Tensor | None = None
        self.x: Tensor | None = None
        """x(t) [P] in a round with an exchange, with `force: before`."""

    def begin(self, model: Tensor, view: RoundView) -> None:
        if self.center is None:
            self.center = model.clone()
        if self.force == "before" and self.meets(view.round):
            self.x = model.clone()

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return dict.fromkeys(view.neighbors, Payload({"x": self._pulled_center(model)}))

    def _pulled_center(self, model: Tensor) -> Tensor:
        """Returns c + b (x - c) [P] as a new tensor."""
        self.center = model.clone() if self.center is None else self.center
        return toward(self.center, model if self.x is None else self.x, self.center_pull)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if not self.meets(view.round):
            return
        center = self._pulled_center(model).mul_(view.weights[view.uid])
        for uid, payload in received.items():
            center.add_(payload.tensors["x"], alpha=view.weights[uid])
        assert self.center is not None
        elastic_pull_(model, (model if self.x is None else self.x) - self.center, self.pull)
        self.center, self.x = center, None

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:
        if not self.meets(view.round):
            return models
        center = mixing(self._pulled_center(models))
        assert self.center is not None
        elastic_pull_(models, (models if self.x is None else self.x) - self.center, self.pull)
        self.center, self.x = center, None
        return models

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix(out.copy_(model), received, view)
