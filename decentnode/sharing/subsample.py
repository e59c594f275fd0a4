"""Nodes send a random part of the model, which sender and receiver derive from the same random stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from decentnode import rng
from decentnode.compression import select
from decentnode.config import component
from decentnode.config.component import ADDED
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.dump import DumpConfig
from decentnode.sharing.operator import sizes_at
from decentnode.sharing.state import Tensors
from decentnode.sharing.topk import mix_filled
from decentnode.tensors import moved


class SubsampleConfig(SharingConfig):
    fraction: float = Field(0.3, gt=0, le=1)
    """Probability with which an entry is sent."""
    layerwise: bool = False
    """true: draw exactly this fraction of every parameter tensor. false: draw each entry independently."""
    full_above: Annotated[float, ADDED, Field(gt=0, le=1)] = 1.0
    """Above this fraction whole models are sent (decentralizepy's metadata_cap)."""
    dump: Annotated[DumpConfig | None, ADDED] = None
    """Write what was chosen, for studies; nothing is written when not given."""

    @pydantic.model_validator(mode="after")
    def _no_scores(self) -> SubsampleConfig:
        if self.dump is not None and self.dump.scores:
            raise ValueError("must have dump.scores: false, as a random choice has no scores")
        return self


class Subsample(Tensors, Sharing):
    """Sends a random part of the model. It follows from seed, sender and round, so that no indices are sent."""

    Config: ClassVar[type[component.Config]] = SubsampleConfig
    config: SubsampleConfig

    def __init__(self, config: SubsampleConfig) -> None:
        super().__init__(config)
        self._sizes: tuple[int, ...] = ()
        self._elements = 0
        self._sent = torch.empty(0, dtype=torch.int64)
        self._drawn: tuple[tuple[int, int, int], Tensor] | None = None
        """((seed, uid, round), positions) of the last draw."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._sizes = tuple(torch.Size(shape).numel() for shape in shapes)

    def chosen(self, elements: int, uid: int, view: RoundView) -> Tensor:
        """Returns the ascending positions that node `uid` sends in this round."""
        if self.config.fraction > self.config.full_above:
            return torch.arange(elements)
        draws = rng.stream(view.seed, uid, view.purpose("subsample"), view.round)
        if not self.config.layerwise:
            return select.random_positions(self.config.fraction, elements, draws)
        found, start = [], 0
        for size in self._sizes or (elements,):
            part = draws.permutation(size)[: select.count_of(self.config.fraction, size)]
            found.append(torch.from_numpy(part).sort().values + start)
            start += size
        return torch.cat(found)

    def _chosen(self, uid: int, view: RoundView) -> Tensor:
        """Returns what `chosen` returns; cached, as `tensor_sizes` and `unpack` both need it."""
        key = view.seed, uid, view.round
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = key, self.chosen(self._elements, uid, view)
        return self._drawn[1]

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        return {"values": sizes_at(self._chosen(source, view), self._sizes)} if self._sizes else {}

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        self._elements = model.numel()
        at = moved(self._chosen(view.uid, view), model.device)
        self._sent = at
        return dict.fromkeys(view.neighbors, Payload({"values": model.index_select(0, at)}))

    def chosen_entries(self) -> Mapping[str, Tensor]:
        return {"sent": self._sent} if self._sent.numel() < self._elements else {}

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        values = payload.tensors["values"]
        at = moved(self._chosen(uid, view), values.device)
        if at.numel() != values.numel():
            raise PeerFault("malformed_payload", f"{values.numel()} values instead of {at.numel()} from {uid}")
        return Payload({"at": at, "values": values})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        arrived = {uid: (payload.tensors["at"], payload.tensors["values"]) for uid, payload in received.items()}
        mix_filled(model, arrived, view.weights)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"values": TensorSpec(dtype, elements, exact=False)}
