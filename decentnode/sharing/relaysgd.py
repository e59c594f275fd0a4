"""RelaySGD: nodes relay sums of models along a tree."""

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
from decentnode.sharing.requirements import Requirements


class RelaySGD(Sharing):
    """x_i <- ((n - c_i) x_i + sum_j m_ji) / n, with m_ij = x_i + sum_{k != j} m_ki (arXiv 2110.04175, algorithm 1).

    m_ji is the sum of the models in the subtree behind neighbor j, each as many rounds old as it has hops to i, and c_i
    the number of models in all m_ji. On a tree the mean is exact after as many rounds as the tree's diameter, for any
    distribution of data.
    """

    Config: ClassVar[type[component.Config]] = FullConfig
    requirements = Requirements(static=True, symmetric=True, tree=True,
                                scalars={"count": ScalarSpec(int, low=1, high=1 << 31)})  # fmt: skip

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        out = {}
        for uid in view.neighbors:
            total, count = model.clone(), 1
            for other, behind in self._sums.items():
                if other != uid:
                    total.add_(behind)
                    count += self._counts[other]
            out[uid] = Payload({"x": total}, {"count": count})
        return out

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        for uid, payload in received.items():
            self._sums[uid] = payload.tensors["x"].clone()
            self._counts[uid] = int(payload.scalars["count"])
        n = len(view.members)
        model.mul_((n - sum(self._counts.values())) / n)
        for uid in sorted(self._sums):
            model.add_(self._sums[uid], alpha=1 / n)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements)}

    def state_dict(self) -> dict[str, Any]:
        sums = {str(uid): tensor.clone() for uid, tensor in self._sums.items()}
        return {"sums": sums, "counts": {str(uid): count for uid, count in self._counts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {int(uid): tensor.clone() for uid, tensor in state["sums"].items()}
        self._counts = {int(uid): int(count) for uid, count in state["counts"].items()}
