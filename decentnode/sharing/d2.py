"""D2 and exact diffusion: gossip averaging whose bias on unequal data is corrected by the update of the last round.

Here and in the other rules that correct local steps, u_t is the total update of the local steps of round t: the model
after them is x_t - u_t. With one step of plain SGD, u_t = lr g_t. Written with u_t, a rule is also valid for several
local steps and other optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.full import Full, FullConfig
from decentnode.sharing.hooks import Mixing
from decentnode.sharing.state import TensorsAndRate


class D2(TensorsAndRate, Full):
    """x_{t+1} = W (2 x_t - x_{t-1} - (u_t - u_{t-1})): D2 (arXiv 1803.07068, algorithm 1), exact diffusion.

    With momentum in the local optimizer it is EDM. It converges to the exact optimum on unequal data, and needs a
    static symmetric W whose eigenvalues are above -1/3.

    It is computed with a correction c of the local steps: z_t = x_t - u_t + c_t, d_t = sum_j W_ij (z_j - z_i), x_{t+1}
    = z_t + d_t, c_{t+1} = c_t + d_t, and c_0 = 0. This is the same recursion, but c is a sum of differences between
    nodes, which cancel in the sum over all nodes. With 2 x_t - x_{t-1}, every rounding error of W x and every error of
    a codec would move the mean again in each later round. With a codec, differences are computed from the models as
    neighbors decode them, including the node's own.

    A payload that is missing at one receiver leaves a difference in c that is never canceled, so that the mean would
    drift in every later round: runs that continue without a payload are refused.
    """

    Config: ClassVar[type[component.Config]] = FullConfig
    requirements = replace(Full.requirements, elementwise=False, linear=False, sequential=True, tolerates_missing=False,
                           static=True, symmetric=True, doubly_stochastic=True, smallest_eigenvalue=-1 / 3,
                           includes_self=frozenset({0}))  # fmt: skip
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("correction",)

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        self.correction: Tensor | None = None
        self._difference: Tensor | None = None
        """d_t, kept from mixing, which may be repeated, until the end of the round."""

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        """Changes the model from x_t - u_t to z_t."""
        if not view.lr:
            return
        if self.correction is not None:
            if view.lr < self.lr:
                self.correction.mul_(view.lr / self.lr)
            model.add_(self.correction)
        self.lr = view.lr

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        own = received[view.uid].tensors["x"] if view.uid in received else model
        difference, apart = torch.zeros_like(model), torch.empty_like(model)
        for uid, payload in received.items():
            if uid != view.uid:
                difference.add_(torch.sub(payload.tensors["x"], own, out=apart), alpha=view.weights[uid])
        torch.add(model, difference, out=out)
        self._difference = difference

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:  # noqa: ARG002
        apart = models - models.mean(0)  # the common part of the rows would only add rounding errors
        self._difference = mixing(apart) - apart
        return models.add_(self._difference)

    def finish(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self._difference is not None and view.lr:
            self.correction = self._difference if self.correction is None else self.correction.add_(self._difference)
        self._difference = None
