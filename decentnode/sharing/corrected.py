"""Rules that correct the bias of gossip on unequal data. u_t is the update that the local steps of round t applied:
x after them is x_t - u_t. With plain SGD u_t = lr g_t; a changing learning rate is thereby accounted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode import component
from decentnode.component import Config
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.full import Full, FullConfig
from decentnode.sharing.state import Tensors


class D2(Tensors, Full):
    """x_{t+1} = W (2 x_t - x_{t-1} - (u_t - u_{t-1})): D2 (arXiv 1803.07068, algorithm 1), exact diffusion.

    With momentum in the local optimizer it is EDM. Exact on unequal data; needs a static symmetric W without
    eigenvalues at or below -1/3.
    """

    Config: ClassVar[type[component.Config]] = FullConfig
    needs_sequential: ClassVar[bool] = True
    needs_static: ClassVar[bool] = True
    needs_symmetric: ClassVar[bool] = True
    needs_doubly_stochastic: ClassVar[bool] = True
    smallest_eigenvalue: ClassVar[float | None] = -1 / 3
    TENSORS: ClassVar[tuple[str, ...]] = ("x", "old_x", "old_update")

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        self.x: Tensor | None = None
        self.old_x: Tensor | None = None
        self.old_update: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.x = model.clone()

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        assert self.x is not None
        update = self.x - model
        if self.old_x is not None and self.old_update is not None:
            model.add_(self.x).sub_(self.old_x).add_(self.old_update)
        self.old_x, self.old_update, self.x = self.x, update, None


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


class MomentumConfig(Config):
    momentum: float = Field(0.9, ge=0, lt=1)
    """Decay of the rule's own momentum; the local optimizer should have none."""


class MomentumTracking(GradientTracking):
    """Gradient tracking of the momentum m <- b m + u instead of u (Takezawa et al., TMLR 2023, algorithm 1)."""

    Config: ClassVar[type[component.Config]] = MomentumConfig

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, MomentumConfig)
        self.beta = config.momentum

    def smoothed(self, update: Tensor) -> Tensor:
        self.momentum = torch.zeros_like(update) if self.momentum is None else self.momentum
        return self.momentum.mul_(self.beta).add_(update).clone()


class QuasiGlobalMomentum(Tensors, Full):
    """x' = W (x - u - b m),  m <- b m + (1 - b) (x - x') (QG-DSGDm, arXiv 2102.04761, algorithm 1).

    m is in units of updates, so that a changing learning rate needs no care. The local optimizer should have no
    momentum of its own.
    """

    Config: ClassVar[type[component.Config]] = MomentumConfig
    needs_sequential: ClassVar[bool] = True
    needs_doubly_stochastic: ClassVar[bool] = True
    TENSORS: ClassVar[tuple[str, ...]] = ("x", "momentum")

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, MomentumConfig)
        self.beta = config.momentum
        self.x: Tensor | None = None
        self.momentum: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.x = model.clone()
        self.momentum = torch.zeros_like(model) if self.momentum is None else self.momentum

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        assert self.momentum is not None
        model.sub_(self.momentum, alpha=self.beta)

    def finish(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.x is not None and self.momentum is not None:
            self.momentum.mul_(self.beta).add_(self.x.sub_(model), alpha=1 - self.beta)
            self.x = None


class DecentLaM(QuasiGlobalMomentum):
    """m <- b m + x - W (x - u),  x <- x - m (arXiv 2104.11981, algorithm 2); for static symmetric W only."""

    needs_static: ClassVar[bool] = True
    needs_symmetric: ClassVar[bool] = True

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        return

    def finish(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.x is not None and self.momentum is not None:
            self.momentum.mul_(self.beta).add_(self.x).sub_(model)
            torch.sub(self.x, self.momentum, out=model)
            self.x = None
