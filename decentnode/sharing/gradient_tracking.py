"""Gradient tracking: every node follows the mean of all gradients."""

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
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.state import Tensors


class TrackingConfig(SharingConfig):
    form: Literal["semi_atc", "dsgt", "atc"] = "semi_atc"
    """What is mixed before and what after the step. semi_atc: x <- W (x - lr y), y <- W y + g' - g (Pu and Nedic 2021).
    dsgt: x <- W x - lr y, y <- W y + g' - g (Nedic et al. 2017), which bears smaller steps only. atc:
    x <- W (x - lr y), y <- W (y + g' - g) (Xu et al. 2015), in two exchanges per round, for x needs the mixed y."""


class GradientTracking(Tensors, Sharing):
    """y tracks the mean gradient, and x follows y (Pu and Nedic 2021, arXiv 1805.11454; others by `form`).

    g_t = u_t / lr_t, where u_t is what the local steps of round t did and lr_t their learning rate: with plain SGD the
    gradient, with several steps or another optimizer what it made of them. y_0 = g_0, and the mean of y is the mean of
    g in every round; what one lost payload took from that would be missing for ever, so that runs which go on without
    one are refused. Works on any doubly stochastic sequence; sends x and y. In a round with rate 0 nodes only mix.
    """

    Config: ClassVar[type[component.Config]] = TrackingConfig
    requirements = Requirements(sequential=True, tolerates_missing=False, doubly_stochastic=True)
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
        """What is tracked; a tensor of its own."""
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
        if self.form == "dsgt":  # of y as it was before it is mixed
            model.sub_(tracked, alpha=view.lr)
        mix_named(tracked, "y", received, view)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        names = ("x",) if self.form == "atc" else ("x", "y")
        return dict.fromkeys(names, TensorSpec(dtype, elements))


def mix_named(own: Tensor, name: str, received: Mapping[int, Payload], view: RoundView) -> None:
    """own <- sum_j W_ij of the tensors `name`, in place."""
    own.mul_(view.weights[view.uid])
    for uid, payload in received.items():
        own.add_(payload.tensors[name], alpha=view.weights[uid])
