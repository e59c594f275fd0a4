"""Rules that change how strongly, or with whom, nodes average: adaptive consensus, grids, elastic ties, leaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode import component
from decentnode.component import Config
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.full import Full
from decentnode.sharing.infrequent import LocalSGD, LocalSGDConfig
from decentnode.sharing.state import Tensors


class ACConfig(Config):
    factor: float = Field(1.0, ge=0, le=1)
    """Strength of mixing in the first round."""
    final: float = Field(0.1, ge=0, le=1)
    """Strength that it comes to."""
    rounds: int = Field(100, ge=1)
    """Rounds on the way, in even steps."""


class AdaptiveConsensus(Full):
    """x <- x + a_t (W x - x) with a_t going from `factor` to `final` (DSGD-AC, arXiv 2602.02899)."""

    Config: ClassVar[type[component.Config]] = ACConfig

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, ACConfig)
        self._config = config

    def plan(self, view: RoundView) -> RoundView:
        config = self._config
        a = config.factor + (config.final - config.factor) * min(1.0, view.round / config.rounds)
        weights = {uid: a * w for uid, w in view.weights.items()}
        weights[view.uid] += 1.0 - a
        return replace(view, weights=weights)


class MoshpitConfig(Config):
    dimensions: int = Field(2, ge=1, le=16)
    """Dimensions of the grid; n nodes on a full grid of M^d agree exactly after d rounds."""


class Moshpit(Full):
    """Averages along one dimension of a virtual grid per round (Moshpit SGD, arXiv 2103.03239).

    Node u stands at the digits of u in base M, M the smallest with M^d >= n; in round r all nodes that differ in digit
    r mod d alone average. The graph's edges are not used.
    """

    Config: ClassVar[type[component.Config]] = MoshpitConfig
    makes_own_edges: ClassVar[bool] = True

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, MoshpitConfig)
        self.dimensions = config.dimensions

    def plan(self, view: RoundView) -> RoundView:
        members = sorted(view.members)
        side = 1
        while side**self.dimensions < len(members):
            side += 1
        step = side ** (view.round % self.dimensions)
        at = members.index(view.uid)
        first = at - at // step % side * step
        group = [members[first + k * step] for k in range(side) if first + k * step < len(members)]
        peers = tuple(uid for uid in group if uid != view.uid)
        weights = dict.fromkeys(group, 1.0 / len(group))
        return replace(view, neighbors=peers, sources=peers, weights=weights, out_weights=weights)


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
        if not self.meets(view):
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


class LeaderConfig(LocalSGDConfig):
    every: int = Field(1, ge=1)
    """Rounds from one exchange to the next."""
    pull: float = Field(0.1, gt=0, le=1)
    """How far a node moves toward the leader of its neighborhood at an exchange."""


class Leader(LocalSGD):
    """Nodes move toward the neighbor with the lowest training loss since the last exchange (LSGD, arXiv 1905.10395).

    The leader of a neighborhood does not move. The mean is not kept. Made for nodes with alike data: with unequal data
    the lowest loss is that of the easiest share.
    """

    Config: ClassVar[type[component.Config]] = LeaderConfig
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    needs_sequential: ClassVar[bool] = True

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, LeaderConfig)
        self.pull = config.pull
        self._losses: list[float] = []

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        self._losses = [*self._losses[-self.every + 1 :], loss] if self.every > 1 else [loss]

    @property
    def loss(self) -> float:
        return sum(self._losses) / len(self._losses) if self._losses else 0.0

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return dict.fromkeys(view.neighbors, Payload({"x": model}, {"loss": self.loss}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        best, leader = (self.loss, view.uid), None
        for uid, payload in received.items():
            if (float(payload.scalars["loss"]), uid) < best:
                best, leader = (float(payload.scalars["loss"]), uid), payload
        if leader is not None:
            model.lerp_(leader.tensors["x"], self.pull)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix(out.copy_(model), received, view)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements)}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = [float(loss) for loss in state["losses"]]
