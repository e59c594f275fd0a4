"""Elastic averaging with a center per node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from decentnode import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig
from decentnode.sharing.state import Tensors


class ElasticConfig(LocalSGDConfig):
    every: int = Field(1, ge=1)
    """Rounds from one exchange to the next."""
    pull: float = Field(0.5, gt=0, lt=1)
    """How far a node moves toward its center at an exchange, and the center toward its neighborhood's mean."""


class Elastic(Tensors, LocalSGD):
    """Elastic averaging without a center node: every node has its own center c_i, and the centers gossip.

    At an exchange x_i <- x_i - a (x_i - c_i), and c_i <- sum_j W_ij (c_j + a (x_j - c_j)): with a complete graph and
    equal centers this is EASGD (arXiv 1412.6651, equations 5 and 6) with b = a. sum_i (x_i + c_i) is kept.
    """

    Config: ClassVar[type[component.Config]] = ElasticConfig
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    needs_sequential: ClassVar[bool] = True
    needs_doubly_stochastic: ClassVar[bool] = True
    TENSORS: ClassVar[tuple[str, ...]] = ("center",)

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, ElasticConfig)
        self.pull = config.pull
        self.center: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.center is None:
            self.center = model.clone()

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        self.begin(model, view)
        assert self.center is not None
        return dict.fromkeys(view.neighbors, Payload({"x": self.center.lerp(model, self.pull)}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if not self.meets(view.round):
            return
        self.begin(model, view)
        assert self.center is not None
        center = self.center.lerp(model, self.pull).mul_(view.weights[view.uid])
        for uid, payload in received.items():
            center.add_(payload.tensors["x"], alpha=view.weights[uid])
        model.lerp_(self.center, self.pull)
        self.center = center

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix(out.copy_(model), received, view)
