"""Full sharing: every node sends its whole model and takes the weighted mean of what arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decentnode import mixing
from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.requirements import Requirements


class FullConfig(SharingConfig):
    pass


class Full(Sharing):
    """x_i <- sum_j W_ij x_j (D-PSGD, Lian et al. 2017, arXiv 1705.09056; algorithm 1 with an overlapped schedule)."""

    Config: ClassVar[type[component.Config]] = FullConfig
    requirements = Requirements(elementwise=True, linear=True)
    STACKED = ASYNCHRONOUS = True

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        payload = Payload({"x": model})
        return dict.fromkeys(view.neighbors, payload)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.mix_into(model, model, received, view)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        arrived = [(payload.tensors["x"], view.weights[uid]) for uid, payload in received.items()]
        mixing.mix_into(out, model, view.weights[view.uid], arrived)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements)}
