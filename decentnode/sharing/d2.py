"""D2 and exact diffusion: gossip whose bias on unequal data is corrected by the update of the last round.

Here and in the other rules that correct local steps, u_t is the update that the local steps of round t made together:
the model after them is x_t - u_t. With one step of plain SGD u_t = lr g_t. Written with u_t, a rule also holds for
learning rates that change, several local steps and other optimizers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.full import Full, FullConfig
from decentnode.sharing.state import Tensors


class D2(Tensors, Full):
    """x_{t+1} = W (2 x_t - x_{t-1} - (u_t - u_{t-1})): D2 (arXiv 1803.07068, algorithm 1), exact diffusion.

    With momentum in the local optimizer it is EDM. It converges to the exact optimum on unequal data, and needs a
    static symmetric W whose eigenvalues are above -1/3.

    A payload that is missing at one receiver moves the mean of the models. The recursion repeats the last move
    x_t - x_{t-1}, so that the mean would drift in every later round: runs that go on without a payload are refused.
    """

    Config: ClassVar[type[component.Config]] = FullConfig
    requirements = replace(Full.requirements, sequential=True, tolerates_missing=False, static=True, symmetric=True,
                           doubly_stochastic=True, smallest_eigenvalue=-1 / 3, keeps_roundings=True)  # fmt: skip
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("x", "old_x", "old_update")

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        self.x: Tensor | None = None
        self.old_x: Tensor | None = None
        self.old_update: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.x = model.clone()

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        """x_t - u_t becomes 2 x_t - x_{t-1} - u_t + u_{t-1}; in the first round it stays as it is."""
        assert self.x is not None
        update = self.x - model
        if self.old_x is not None and self.old_update is not None:
            model.add_(self.x).sub_(self.old_x).add_(self.old_update)
        self.old_x, self.old_update, self.x = self.x, update, None
