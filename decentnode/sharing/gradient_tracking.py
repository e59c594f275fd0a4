"""Gradient tracking: every node descends along an estimate of the mean gradient of all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.hooks import Mixing
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.state import Tensors


class TrackingConfig(SharingConfig):
    form: Literal["semi_atc", "dsgt", "atc"] = "semi_atc"
    """What is mixed before the step and what after it. semi_atc: x <- W (x - lr y), y <- W y + g' - g (Pu and Nedic
    2021). dsgt: x <- W x - lr y, y <- W y + g' - g (Nedic et al. 2017), stable for smaller steps only. atc:
    x <- W (x - lr y), y <- W (y + g' - g) (Xu et al. 2015), with two exchanges per round, as x needs the mixed y."""


class GradientTracking(Tensors, Sharing):
    """y tracks the mean gradient, and x descends along y (Pu and Nedic 2021, arXiv 1805.11454; others by `form`).

    g_t = u_t / lr_t, where u_t is the total update of the local steps of round t (d2.py) and lr_t their learning rate;
    with one step of plain SGD it is the gradient. y_0 = g_0, and the mean of y over the nodes equals the mean of g in
    every round. A lost payload breaks this equality permanently, so that runs that continue without a payload are
    refused.

    Works with any sequence of doubly stochastic matrices. Payloads contain x and y. In a round with learning rate 0
    nodes only mix.
    """

    Config: ClassVar[type[component.Config]] = TrackingConfig
    requirements = Requirements(sequential=True, tolerates_missing=False, doubly_stochastic=True)
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("tracked", "old_gradient", "x", "momentum")

    def __init__(self, config: TrackingConfig) -> None:
        super().__init__(config)
        self.form = config.form
        self.requirements = replace(self.requirements, phases=2 if config.form == "atc" else 1)
        self.tracked: Tensor | None = None
        self.old_gradient: Tensor | None = None
        self.x: Tensor | None = None
        self.momentum: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.x = model.clone()

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        assert self.x is not None
        if view.lr > 0:
            gradient = self.smoothed((self.x - model).div_(view.lr))
            if self.tracked is None or self.old_gradient is None:
                self.tracked = gradient.clone()
            else:
                self.tracked.add_(gradient).sub_(self.old_gradient)
            self.old_gradient = gradient
        if self.form == "semi_atc" and self.tracked is not None:
            torch.sub(self.x, self.tracked, alpha=view.lr, out=model)
        else:
            model.copy_(self.x)
        self.x = None

    def smoothed(self, gradient: Tensor) -> Tensor:
        """Returns the gradient to be tracked, as a tensor that `adjust` may keep."""
        return gradient

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        tracked = torch.zeros_like(model) if self.tracked is None else self.tracked
        if self.form == "atc":
            payload = Payload({"x": model if view.phase else tracked})
        else:
            payload = Payload({"x": model, "y": tracked})
        return dict.fromkeys(view.neighbors, payload)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        tracked = torch.zeros_like(model) if self.tracked is None else self.tracked
        if self.form == "atc":
            mix_named(model if view.phase else tracked, "x", received, view)
            if not view.phase:
                model.sub_(tracked, alpha=view.lr)
            return
        mix_named(model, "x", received, view)
        if self.form == "dsgt":  # x - lr y takes y before it is mixed
            model.sub_(tracked, alpha=view.lr)
        mix_named(tracked, "y", received, view)

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:
        tracked = torch.zeros_like(models) if self.tracked is None else self.tracked
        if self.form == "atc" and view.phase == 0:
            if self.tracked is not None:
                self.tracked = tracked = mixing(tracked)
            return models.sub_(tracked, alpha=view.lr)
        models = mixing(models)
        if self.form == "dsgt":
            models.sub_(tracked, alpha=view.lr)
        if self.form != "atc" and self.tracked is not None:
            self.tracked = mixing(tracked)
        return models

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        names = ("x",) if self.form == "atc" else ("x", "y")
        return dict.fromkeys(names, TensorSpec(dtype, elements))


def mix_named(own: Tensor, name: str, received: Mapping[int, Payload], view: RoundView) -> None:
    """Computes own <- w_ii own + sum_j w_ij t_j, in place, where t_j is the tensor `name` of source j."""
    own.mul_(view.weights[view.uid])
    for uid, payload in received.items():
        own.add_(payload.tensors[name], alpha=view.weights[uid])
