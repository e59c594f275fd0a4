"""Gradient tracking: every node follows the mean of all updates, u_t as in d2.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decentnode import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.full import FullConfig
from decentnode.sharing.state import Tensors


class GradientTracking(Tensors, Sharing):
    """x <- W (x - y),  y <- W y + u_t - u_{t-1}, y_0 = u_0 (DSGT, adapt-then-combine; Nedic et al. 2017).

    The mean of y is the mean of u in every round. Works on any doubly stochastic sequence; sends x and y.
    """

    Config: ClassVar[type[component.Config]] = FullConfig
    needs_sequential: ClassVar[bool] = True
    needs_doubly_stochastic: ClassVar[bool] = True
    TENSORS: ClassVar[tuple[str, ...]] = ("tracked", "old_update", "x", "momentum")

    def __init__(self, config: component.Config) -> None:
        self.config = config
        self.tracked: Tensor | None = None
        self.old_update: Tensor | None = None
        self.x: Tensor | None = None
        self.momentum: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.x = model.clone()

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        assert self.x is not None
        update = self.smoothed(self.x - model)
        if self.tracked is None or self.old_update is None:
            self.tracked = update.clone()
        else:
            self.tracked.add_(update).sub_(self.old_update)
        torch.sub(self.x, self.tracked, out=model)
        self.old_update, self.x = update, None

    def smoothed(self, update: Tensor) -> Tensor:
        return update

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        tracked = torch.zeros_like(model) if self.tracked is None else self.tracked
        return dict.fromkeys(view.neighbors, Payload({"x": model, "y": tracked}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        tracked = torch.zeros_like(model) if self.tracked is None else self.tracked
        for own, name in ((model, "x"), (tracked, "y")):
            own.mul_(view.weights[view.uid])
            for uid, payload in received.items():
                own.add_(payload.tensors[name], alpha=view.weights[uid])

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements), "y": TensorSpec(dtype, elements)}
