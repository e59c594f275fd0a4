"""Push-sum gossip, for directed and irregular graphs and lossy links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.full import FullConfig
from decentnode.sharing.hooks import Mixing
from decentnode.sharing.requirements import Requirements


class PushSum(Sharing):
    """Stochastic gradient push (Assran et al. 2019, arXiv 1811.10792, algorithm 1).

    The model is the de-biased z = x / w. A node sends shares of x and of its weight w; the share that it keeps and
    those that arrive add up to the new x and w. The sums of x and of w over all nodes are preserved on every graph: a
    share that certainly did not arrive is taken back. Under an overlapped schedule this is overlap SGP with one step of
    staleness (algorithm 2 with tau = 1).
    """

    Config: ClassVar[type[component.Config]] = FullConfig
    requirements = Requirements(column_stochastic=True, scalars={"w": ScalarSpec(float, low=0.0)})
    STACKED = ASYNCHRONOUS = True

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        self.weight = 1.0
        self._weights: Tensor | None = None
        """[N, 1] float64: w of all nodes if this object holds the models of all nodes, else None."""
        self.least_divisor = 0.0
        """The least value by which local steps are divided instead of w; 0 as in algorithm 1."""
        self._back: list[Payload] = []
        self._start: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self._start = model.clone()

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        """Divides the update by w, as it belongs to x, not to z: z <- z_0 + (z - z_0) / w."""
        if self._start is not None and (self._weights is not None or self.weight != 1.0):
            model.sub_(self._start).div_(self._divisor(model)).add_(self._start)
        self._start = None

    def advance(self, model: Tensor, update: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self._weights is None:
            model.add_(update, alpha=1.0 / self.weight)
        else:
            model.add_(update / self._divisor(model))

    def _divisor(self, model: Tensor) -> Tensor | float:
        """Returns the value by which local steps are divided."""
        return max(self.weight, self.least_divisor) if self._weights is None else self._weight_of(model)

    def _weight_of(self, model: Tensor) -> Tensor | float:
        return self.weight if self._weights is None else self._weights.to(model.dtype)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        found: dict[float, Payload] = {}
        out = {}
        for uid in view.neighbors:
            share = view.out_weights[uid]
            if share not in found:
                found[share] = Payload({"x": model * (share * self.weight)}, {"w": share * self.weight})
            out[uid] = found[share]
        return out

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        own = view.out_weights[view.uid]
        model.mul_(own * self.weight)
        self.weight *= own
        for payload in [*received.values(), *self._back]:
            model.add_(payload.tensors["x"])
            self.weight += float(payload.scalars["w"])
        self._back = []
        model.div_(self.weight)

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:  # noqa: ARG002
        if self._weights is None:
            self._weights = torch.ones(len(models), 1, dtype=torch.float64, device=models.device)
        mixed = mixing.shares(models.mul_(self._weight_of(models)))
        self._weights = mixing.shares(self._weights)
        return mixed.div_(self._weight_of(models))

    def undelivered(self, uid: int, payload: Payload) -> None:  # noqa: ARG002
        self._back.append(payload)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements)}

    def state_dict(self) -> dict[str, Any]:
        back = [{"x": p.tensors["x"].clone(), "w": p.scalars["w"]} for p in self._back]
        start = {} if self._start is None else {"start": self._start.clone()}
        return {"weight": self.weight, "back": back, **start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = float(state["weight"])
        self._start = state["start"].clone() if "start" in state else None
        self._back = [Payload({"x": each["x"].clone()}, {"w": float(each["w"])}) for each in state["back"]]
