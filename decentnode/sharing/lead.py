"""LEAD: exact diffusion whose models are sent as compressed differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression import CODECS
from decentnode.config import component
from decentnode.config.component import Config, section
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.choco import Choco, ChocoConfig
from decentnode.sharing.operator import add_at
from decentnode.sharing.step_size import Compress, Search

LARGEST_DEFAULT = 0.5
"""The paper's gamma = 1, with which W counts as (I + W) / 2: no eigenvalue of it is negative."""


class LeadConfig(ChocoConfig):
    fraction: float = Field(0.5, gt=0, le=1)
    """Fraction of the entries of a difference that a node sends with `choose: random`."""
    choose: Literal["random", "all"] = "all"
    """Which entries are sent: all (to compress only their values), or random ones. Always leaving out the smallest
    entries would drive the models apart."""
    compression: Annotated[Config, section(CODECS, "compression")] | None = Field(
        default_factory=lambda: section(CODECS, "compression").validate({"name": "int4", "unbiased": True})
    )
    """Codec of the values that are sent: one with little error, or an unbiased one. Default: int4, unbiased, which is
    close to the quantization of the paper."""
    step_size: float | None = Field(None, gt=0, le=1)
    """How far a node moves toward its neighbors in a round; half the gamma of the paper. Default: four fifths of the
    largest step with which nodes reach consensus on this graph with this compression (sharing/step_size.py), at most
    0.5, as in the paper."""


class Lead(Choco):
    """z = x - u + c, y = h + Q(z - h), h += a Q(z - h), d_i = s sum_j W_ij (y_j - y_i), x = z + d, c += d: LEAD
    (Liu et al. 2021, arXiv 2007.00232, algorithm 1, with its D = -c / lr and gamma = 2 s).

    Without compression this is exact diffusion (d2.py) with the matrix I + s (W - I). It converges to the exact optimum
    on unequal data. u is the total update of a round's local steps. Q is unbiased, and a = 1 / (1 + w) where
    E|Q(v) - v|^2 <= w |v|^2, so that the public copies h are those of choco.py; for other codecs a = 1. The
    correction c is a sum of differences between nodes, which cancel in the sum over all nodes, whatever is sent:
    the mean of the models moves by the mean of u.

    The correction falls with the learning rate: it cancels lr times a gradient. In a round with learning rate 0 nodes
    only mix, and it does not change. Memory: one copy per neighbor and three more. A lost payload makes the mean drift
    for ever.
    """

    Config: ClassVar[type[component.Config]] = LeadConfig
    requirements = replace(Choco.requirements, sequential=True, tolerates_missing=False)

    def __init__(self, config: LeadConfig) -> None:
        super().__init__(config)
        self.beyond = _unbiasing(config, self.operator.codec.variance if self.operator.codec else 0.0) - 1.0
        """y - h after the update of h, as a multiple of the difference that was decoded (operator.py)."""
        self.correction: Tensor | None = None
        """c_i [P]."""
        self.lr = 0.0
        """The last learning rate that was not 0."""

    @classmethod
    def step_search(cls, config: Any) -> Search:
        """Returns a search in which the correction is mixed as well: without gradients, it makes nodes overshoot, which
        diverges with compressors that lag behind."""
        operator = super().step_search(config).operator
        unbiasing = _unbiasing(config, operator.codec.variance if operator.codec else 0.0)

        def advance(models: Tensor, state: Tensor, pull: Tensor, step: float, compress: Compress) -> None:
            public, correction = state.chunk(2, dim=1)
            models.add_(correction)
            decoded = compress(models - public)
            difference = (pull @ torch.add(public, decoded, alpha=unbiasing)).mul_(step)
            public.add_(decoded)
            correction.add_(difference)
            models.add_(difference)

        return LeadSearch(advance, operator, most=LARGEST_DEFAULT, state_width=2)

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        if not view.lr:
            return
        if self.correction is not None:
            model.add_(self.correction.mul_(min(1.0, view.lr / self.lr)))
        self.lr = view.lr

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        assert self.public is not None and self._sent is not None
        own, self._sent = self._estimate(self.public, self._sent), None
        difference, apart = torch.zeros_like(model), torch.empty_like(model)
        for uid, change in self._update_copies(received).items():
            if uid in self.copies:
                # Where one node got a whole copy, so did the other: neither knows the other's last change.
                here = self.public if change is None else own
                torch.sub(self._estimate(self.copies[uid], change), here, out=apart)
                difference.add_(apart, alpha=self.step_size * view.weights[uid])
        model.add_(difference)
        if view.lr:
            self.correction = difference if self.correction is None else self.correction.add_(difference)

    def _estimate(self, public: Tensor, change: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns y from the public copy h and its last change; h itself where they are the same."""
        if change is None or not self.beyond:
            return public
        estimate = public.clone()
        add_at(estimate, *change, self.beyond)
        return estimate

    def state_dict(self) -> dict[str, Any]:
        correction = {} if self.correction is None else {"correction": self.correction.clone()}
        return {**super().state_dict(), **correction, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.correction = state["correction"].clone() if "correction" in state else None
        self.lr = float(state["lr"])


@dataclass(frozen=True)
class LeadSearch(Search):
    def without_graph(self) -> float:
        """Returns a smaller step than for `choco` with coarse compression, whose noise the correction adds up: at most
        1 / (w (1 + w)^2) for the variance w, which simulations needed on rings, tori and complete graphs."""
        kept = 1 - self.operator.lost()
        bound = kept**3 / (1 - kept) if kept < 1 else 1.0
        return min(super().without_graph(), float(f"{max(0.001, bound):.2g}"))


def _unbiasing(config: LeadConfig, variance: float) -> float:
    """Returns by how much the values that the operator decodes (operator.py) must be multiplied to be unbiased."""
    return (1.0 + variance) / (config.fraction if config.choose == "random" else 1.0)
