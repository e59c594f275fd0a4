"""Rules whose nodes work alone for some rounds and meet every `every`-th: local SGD, SlowMo, DiLoCo, NoLoCo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode import component, rng
from decentnode.component import Config
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.full import Full
from decentnode.sharing.state import Tensors


def alone(view: RoundView) -> RoundView:
    """The same round without neighbors."""
    return replace(view, neighbors=(), sources=(), weights={view.uid: 1.0}, out_weights={view.uid: 1.0})


class LocalSGDConfig(Config):
    every: int = Field(2, ge=1)
    """Rounds from one exchange to the next."""


class LocalSGD(Full):
    """Local work for `every` rounds, then x_i <- sum_j W_ij x_j (Stich 2019, arXiv 1805.09767)."""

    Config: ClassVar[type[component.Config]] = LocalSGDConfig

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, LocalSGDConfig)
        self.every = config.every

    def meets(self, view: RoundView) -> bool:
        return (view.round + 1) % self.every == 0

    def plan(self, view: RoundView) -> RoundView:
        return view if self.meets(view) else alone(view)


class OuterConfig(LocalSGDConfig):
    outer_lr: float = Field(1.0, gt=0)
    """Step of the outer optimizer."""
    outer_momentum: float = Field(0.5, ge=0, lt=1)
    """Momentum of the outer optimizer."""


class SlowMo(Tensors, LocalSGD):
    """u <- b u + (x0 - x'),  x0 <- x0 - a u at every exchange, x' the mixed model (arXiv 1910.00643, algorithm 1).

    The learning rate is folded into u. With momentum 0 and outer_lr 1 it is local SGD.
    """

    Config: ClassVar[type[component.Config]] = OuterConfig
    needs_sequential: ClassVar[bool] = True
    nesterov: ClassVar[bool] = False
    TENSORS: ClassVar[tuple[str, ...]] = ("start", "momentum")

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, OuterConfig)
        self.lr, self.beta = config.outer_lr, config.outer_momentum
        self.start: Tensor | None = None
        self.momentum: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.start is None:
            self.start, self.momentum = model.clone(), torch.zeros_like(model)

    def finish(self, model: Tensor, view: RoundView) -> None:
        if not self.meets(view) or self.start is None or self.momentum is None:
            return
        change = self.start - model
        self.momentum.mul_(self.beta).add_(change)
        step = change.add_(self.momentum, alpha=self.beta) if self.nesterov else self.momentum
        self.start.sub_(step, alpha=self.lr)
        model.copy_(self.start)


class DiLoCoConfig(OuterConfig):
    every: int = Field(10, ge=1)
    """Rounds from one exchange to the next."""
    outer_lr: float = Field(0.7, gt=0)
    """Step of the outer optimizer."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer."""


class DiLoCo(SlowMo):
    """SlowMo with an outer Nesterov step (arXiv 2311.08105, algorithm 1); the inner optimizer keeps its state."""

    Config: ClassVar[type[component.Config]] = DiLoCoConfig
    nesterov: ClassVar[bool] = True


class NoLoCoConfig(LocalSGDConfig):
    every: int = Field(3, ge=1)
    """Rounds from one exchange to the next."""
    momentum: float = Field(0.5, ge=0, lt=1)
    """How much of the last outer step is kept."""
    pull: float = Field(0.7, gt=0, le=1)
    """Weight of the pair's mean change, and of the way to the pair's mean slow model."""


class NoLoCo(Tensors, LocalSGD):
    """Random pairs at every exchange: m <- b m + a mean(D) + g (mean(p) - p), p <- p + m (arXiv 2506.10911).

    D = x - p is the change since the last exchange, p the slow model; both are sent to one random peer. Pairs come from
    the run's seed and the round, so the graph's edges are not used.
    """

    Config: ClassVar[type[component.Config]] = NoLoCoConfig
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    needs_sequential: ClassVar[bool] = True
    makes_own_edges: ClassVar[bool] = True
    TENSORS: ClassVar[tuple[str, ...]] = ("slow", "momentum")

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, NoLoCoConfig)
        self.beta, self.pull = config.momentum, config.pull
        self.slow: Tensor | None = None
        self.momentum: Tensor | None = None

    def plan(self, view: RoundView) -> RoundView:
        if not self.meets(view):
            return alone(view)
        members = sorted(view.members)
        order = rng.stream(view.seed, rng.GLOBAL, "noloco pairs", view.round).permutation(len(members))
        at = [members[int(i)] for i in order].index(view.uid) ^ 1
        if at >= len(members):
            return alone(view)
        peer = members[int(order[at])]
        weights = dict(sorted({view.uid: 0.5, peer: 0.5}.items()))
        return replace(view, neighbors=(peer,), sources=(peer,), weights=weights, out_weights=weights)

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.slow is None:
            self.slow, self.momentum = model.clone(), torch.zeros_like(model)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        slow = model if self.slow is None else self.slow
        return dict.fromkeys(view.neighbors, Payload({"x": model, "slow": slow}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if not self.meets(view):
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

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix(out.copy_(model), received, view)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements), "slow": TensorSpec(dtype, elements)}
