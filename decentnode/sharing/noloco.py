"""NoLoCo: an outer optimizer with exchanges between random pairs, and many rounds between exchanges."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decentnode import rng
from decentnode.config import component
from decentnode.graph.base import Graph, RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.hooks import Mixing
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig, stable_momentum
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.state import Tensors


class NoLoCoConfig(LocalSGDConfig):
    every: int = Field(3, ge=1)
    """Number of rounds per exchange; nodes exchange in the last of these rounds."""
    momentum: float = Field(0.5, ge=0, lt=1)
    """Momentum b of the outer optimizer. A large one drives slow models apart: with 0.9 and the default pull, runs of
    three or more nodes are refused."""
    pull: float = Field(0.7, gt=0, le=1)
    """Weight of the pair's mean change (a) and of the pull toward the pair's mean slow model (g)."""


class NoLoCo(Tensors, LocalSGD):
    """Random pairs at every exchange: m <- b m + a mean(D) + g (mean(p) - p), p <- p + m (arXiv 2506.10911).

    p is the slow model and D = x - p the change since the last exchange; x and p are sent to one random peer. Pairs
    follow from the run's seed and the round; the graph's edges are not used.
    """

    Config: ClassVar[type[component.Config]] = NoLoCoConfig
    requirements = Requirements(sequential=True, overrides_topology=True)
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("slow", "momentum")

    def __init__(self, config: NoLoCoConfig) -> None:
        super().__init__(config)
        self.beta, self.pull = config.momentum, config.pull
        self.slow: Tensor | None = None
        self.momentum: Tensor | None = None

    def growth(self, num_nodes: int, momentum: float) -> float:
        """Returns the factor by which the root mean square of differences between slow models grows per exchange
        without local steps, over the draws of pairs.

        With p and m relative to their means, the second moments E|p|^2, E<p, m>, E|m|^2 follow a linear recursion:
        L = I - W is a projection, E<p, L p> = E|L p|^2 = met E|p|^2 and E<m, L p> = met E<p, m>."""
        met = num_nodes // 2 / (num_nodes - 1)
        inner = np.array([-self.pull * met, momentum, 0.0])
        square = np.array([self.pull**2 * met, -2 * momentum * self.pull * met, momentum**2])
        moments = np.stack([np.array([1.0, 0.0, 0.0]) + 2 * inner + square, inner + square, square])
        return float(abs(np.linalg.eigvals(moments)).max() ** 0.5)

    def objection(self, graph: Graph, members: Collection[int] | None = None) -> str:
        n = graph.num_nodes if members is None else len(members)
        if n < 2 or (growth := self.growth(n, self.beta)) <= 1:
            return ""
        stable = stable_momentum(self.beta, lambda momentum: self.growth(n, momentum))
        assert stable is not None  # without momentum differences always shrink
        return (f"drives the models of {n} nodes apart with momentum {self.beta:g} and pull {self.pull:g}: without any "
                f"training, their differences grow by {growth - 1:.1%} per exchange (root mean square); use momentum: "
                f"{stable:g} or less")  # fmt: skip

    def plan(self, view: RoundView) -> RoundView:
        if not self.meets(view.round):
            return view
        members = sorted(view.members)
        order = rng.stream(view.seed, rng.GLOBAL, view.purpose("noloco pairs"), view.round).permutation(len(members))
        at = [members[int(i)] for i in order].index(view.uid) ^ 1
        if at >= len(members):
            return view.alone()
        peer = members[int(order[at])]
        weights = dict(sorted({view.uid: 0.5, peer: 0.5}.items()))
        return replace(view, neighbors=(peer,), sources=(peer,), weights=weights, out_weights=weights)

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.slow is None:
            self.slow = model.clone()
            self.momentum = torch.zeros_like(model) if self.momentum is None else self.momentum

    def succeed(self, former: Self) -> None:
        """Keeps the momentum. The model may be another one, from which the slow model starts anew."""
        self.momentum = former.momentum

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        slow = model if self.slow is None else self.slow
        return dict.fromkeys(view.neighbors, Payload({"x": model, "slow": slow}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if not self.meets(view.round):
            return
        self.begin(model, view)
        assert self.slow is not None and self.momentum is not None
        own = view.weights[view.uid]
        change, slow = (model - self.slow).mul_(own), self.slow * own
        for uid, payload in received.items():
            theirs = payload.tensors["slow"]
            change.add_(payload.tensors["x"] - theirs, alpha=view.weights[uid])
            slow.add_(theirs, alpha=view.weights[uid])
        self.momentum.mul_(self.beta).add_(change, alpha=self.pull).add_(slow.sub_(self.slow), alpha=self.pull)
        self.slow.add_(self.momentum)
        model.copy_(self.slow)

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:
        if not self.meets(view.round):
            return models
        self.begin(models, view)
        assert self.slow is not None and self.momentum is not None
        change, slow = mixing(models - self.slow), mixing(self.slow)
        self.momentum.mul_(self.beta).add_(change, alpha=self.pull).add_(slow - self.slow, alpha=self.pull)
        self.slow.add_(self.momentum)
        return models.copy_(self.slow)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix(out.copy_(model), received, view)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements), "slow": TensorSpec(dtype, elements)}
