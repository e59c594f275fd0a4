"""The sharing rule: what a node sends its neighbors, and how it mixes what it receives. `view` has the neighbors,
sources and mixing weights of the round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from decentnode.config.component import Config
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.requirements import Requirements


class LazyConfig(Config):
    keep: float = 0.2
    """Fraction of its own model that a node keeps, whatever it receives."""


class Lazy(Sharing):
    """x_i <- keep x_i + (1 - keep) sum_j W_ij x_j."""

    Config = LazyConfig
    config: LazyConfig
    requirements = Requirements(elementwise=True)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return dict.fromkeys(view.neighbors, Payload({"x": model}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        keep = self.config.keep
        model.mul_(keep + (1 - keep) * view.weights[view.uid])
        for uid, payload in received.items():
            model.add_(payload.tensors["x"], alpha=(1 - keep) * view.weights[uid])

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Names, dtypes and largest sizes of the tensors that are sent: receivers allocate memory accordingly."""
        return {"x": TensorSpec(dtype, elements)}
