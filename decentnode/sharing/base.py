"""The contract of a sharing rule: what leaves a node, and how arrivals are mixed into its model."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, dtype

from decentnode.component import Component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec


class Sharing(Component, abc.ABC):
    """One rule on the flat parameters of one node; no sockets, no graph, no buffers.

    A rule that is `elementwise` is called per slice: `outgoing` gets the whole model, and `mix` gets any slice
    [a:b) of the model with the same slice of every payload's one tensor "x".
    """

    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    """mix is x <- w_ii x + sum_j w_ij payload_j["x"]: a transport may hand over the sum instead."""
    needs_symmetric: ClassVar[bool] = False
    needs_doubly_stochastic: ClassVar[bool] = False
    needs_column_stochastic: ClassVar[bool] = False
    needs_static: ClassVar[bool] = False
    needs_gradient: ClassVar[bool] = False
    phases: ClassVar[int] = 1

    @abc.abstractmethod
    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        """A payload per neighbor of `view`; the same object for several is encoded once.

        model: [P] float, not modified. Payload tensors may be views of `model`: the transport takes its own
        snapshot before returning from `exchange`.
        """

    @abc.abstractmethod
    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """Mix in place. `view.weights` already has the weight of missing sources on the node itself."""

    def mix_into(
        self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView
    ) -> None:
        """As `mix`, but the result goes to `out`, which shares no memory with `model`."""
        self.mix(out.copy_(model), received, view)

    def undelivered(self, uid: int, payload: Payload) -> None:
        """Called when a payload certainly did not reach `uid`, to restore what it carried."""

    @abc.abstractmethod
    def payload_schema(self, elements: int, dtype: dtype) -> dict[str, TensorSpec]:
        """Names, dtypes and largest sizes of what neighbors send for a model of `elements`."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"state must be empty for {type(self).__name__}, got {sorted(state)}")
