"""DeepSqueeze: nodes send compressed models, with error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression.base import make_codec
from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.operator import Operator, add_at
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.step_size import Compress, Search


class DeepSqueezeConfig(SharingConfig):
    fraction: float = Field(0.7, gt=0, le=1)
    """Fraction of the model's entries that a node sends."""
    choose: Literal["largest", "random", "all"] = "largest"
    """Which entries are sent: the largest, random ones, or all (to compress only their values)."""
    step_size: float | None = Field(None, gt=0, le=1)
    """How far a node moves toward the average in a round (gamma). Default: four fifths of the largest step with which
    nodes reach consensus on this graph with this compression (sharing/step_size.py)."""


class DeepSqueeze(Sharing):
    """v = x + e, c = C(v), e = v - c; x += gamma (sum_j W_ij c_j - c_i) (arXiv 1907.07346, algorithm 1).

    The error e is what compression has left out so far; it is added to the next model before that is compressed. A node
    keeps no copies of its neighbors' models, so that W may change from round to round.
    """

    Config: ClassVar[type[component.Config]] = DeepSqueezeConfig
    requirements = Requirements(doubly_stochastic=True, compresses=True)

    def __init__(self, config: DeepSqueezeConfig) -> None:
        search = self.step_search(config)
        super().__init__(config)
        self.operator = search.operator
        self.step_size = config.step_size or search.without_graph()
        self.error: Tensor | None = None
        self._sent: tuple[Tensor, Tensor] | None = None
        self._elements = 0

    @classmethod
    def step_search(cls, config: Any) -> Search:
        """Returns a search that accepts a step if a tenth of the distance is left, measured on models whose common part
        is as large as their differences: models never get closer than about the step size times the compression error
        of the models themselves."""
        codec = make_codec(config.compression) if config.compression else None
        return Search(_simulated_round, Operator(config.fraction, config.choose, codec), enough=0.1, common=1.0)

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.operator.set_parameter_shapes(shapes)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        self._elements = model.numel()
        whole = model.clone() if self.error is None else self.error.add_(model)
        coded, at, values = self.operator.encode(whole, view)
        self._sent = at, values
        if at.numel() == whole.numel():
            self.error = whole - values  # not in place: without a codec the payload is `whole` itself
        else:
            add_at(whole, at, values, -1.0)
            self.error = whole
        return dict.fromkeys(view.neighbors, Payload(coded, {}, self.operator.metadata))

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        assert self._sent is not None
        at, values = self.operator.decode(payload.tensors, self._elements, self._sent[1].dtype)
        return Payload({"at": at, "values": values})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        assert self._sent is not None
        for uid, payload in received.items():
            add_at(model, payload.tensors["at"], payload.tensors["values"], self.step_size * view.weights[uid])
        add_at(model, *self._sent, -self.step_size * sum(view.weights[uid] for uid in received))
        self._sent = None

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return self.operator.schema(elements, dtype)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.error is None else {"error": self.error.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.error = state["error"].clone() if "error" in state else None


def _simulated_round(models: Tensor, error: Tensor, pull: Tensor, step: float, compress: Compress) -> None:
    """Makes a round of all nodes without gradients, for the search of a step, in place. pull: W - I."""
    whole = models + error
    sent = compress(whole)
    torch.sub(whole, sent, out=error)
    models.add_(pull @ sent, alpha=step)
