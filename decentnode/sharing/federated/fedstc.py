"""Sparse ternary compression of messages from and to the server, with error feedback at both ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from decentnode.config import component
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing.federated.fedavg import FedAvg, FedAvgConfig
from decentnode.sharing.federated.rounds import Federated
from decentnode.sharing.operator import add_at
from decentnode.sharing.stc import Ternary


class FedSTCConfig(FedAvgConfig):
    entries: float = Field(0.02, gt=0, le=1)
    """Fraction of the entries of a change that is sent, up and down: the largest, as plus or minus their mean size."""

    @model_validator(mode="after")
    def _no_codec(self) -> Self:
        if self.compression is not None:
            raise ValueError("compression must be left out, because the rule sends signs and one size, got "
                             f"{self.compression.name}")  # fmt: skip
        return self


class FedSTC(FedAvg):
    """Clients send C(d_k + e_k) and keep the rest in e_k; the server sends C(x - h), which all add to their copies of h
    and train from (Sattler et al. 2019, arXiv 1903.02891, algorithm 2; x - h is its residual).

    Every client gets every change of h, also if it does not take part in the round, so that all clients have the same
    copy; this costs as many bytes as if each fetched the changes that it missed. A client that missed a change reports
    it by an empty answer and gets the whole h, as all clients do before the first round. Servers send each other whole
    models.
    """

    Config: ClassVar[type[component.Config]] = FedSTCConfig
    config: FedSTCConfig
    requirements = replace(Federated.requirements, compresses=True,
                           scalars={**Federated.requirements.scalars, "version": ScalarSpec(int, low=0, optional=True)})
    TENSORS: ClassVar[tuple[str, ...]] = ("public", "error", "_sent_values", "_sent_at")
    KEEPS: ClassVar[bool] = True

    def __init__(self, config: FedSTCConfig) -> None:
        super().__init__(config)
        self.operator = Ternary(config.entries)
        self.public: Tensor | None = None
        """h [P], on a client its copy; None before the first round, and if a change was missed."""
        self.error: Tensor | None = None
        """e_k [P], on a client."""
        self.version = 0
        """The number of changes of h so far."""
        self.behind: set[int] = set()
        """On a server: the clients whose copy may differ from h."""
        self._sent_at: Tensor | None = None
        self._sent_values: Tensor | None = None
        """[K] each: the positions and values that the last answer subtracted from the error."""
        self._schema: dict[str, TensorSpec] = {}

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().set_parameter_shapes(shapes)
        self.operator.set_parameter_shapes(shapes)

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        return {}

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        self._elements = elements
        self._schema = {**self.operator.schema(elements, dtype), "x": TensorSpec(dtype, elements)}
        self._schema = {name: replace(spec, exact=False) for name, spec in self._schema.items()}
        return self._schema

    def _payload(self, tensors: Mapping[str, Tensor], like: Tensor, **scalars: int) -> Payload:
        """Returns a payload with these tensors, and with empty ones for the other names of the schema."""
        self._schema = self._schema or self.payload_schema(like.numel(), like.dtype)
        empty = {name: like.new_empty(0, dtype=spec.dtype) for name, spec in self._schema.items()}
        return Payload({**empty, **tensors}, scalars, self.operator.metadata)

    def nothing(self, model: Tensor) -> Payload:
        return self._payload({}, model)

    def down(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        if self.public is None:
            self.public, self.behind = model.clone(), set(view.neighbors)
        coded, at, values = self.operator.encode(model - self.public, view)
        add_at(self.public, at, values)
        self.version += 1
        whole = self._payload({"x": self.public}, model, version=self.version)
        usual = self._payload(coded, model, version=self.version)
        found = {uid: whole if uid in self.behind else usual for uid in view.neighbors}
        for uid in self._lost_answers.keys() & self.takes_part(view):
            scalars = {**found[uid].scalars, "lost": self._lost_answers[uid]}
            found[uid] = replace(found[uid], scalars=scalars)
        self.behind = set()
        return found

    def given(self, model: Tensor) -> dict[str, Tensor]:
        return dict(self._payload({"x": model}, model).tensors)

    def undelivered(self, uid: int, payload: Payload) -> None:
        if "version" in payload.scalars:
            self.behind.add(uid)

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        whole = payload.tensors["x"]
        coded = {name: tensor for name, tensor in payload.tensors.items() if name != "x"}
        if whole.numel():
            if whole.numel() != self._elements:
                raise PeerFault("malformed_payload", f"{whole.numel()} values of a whole model from {uid}")
            return Payload({"x": whole}, payload.scalars)
        if not any(tensor.numel() for tensor in coded.values()):
            return Payload({}, payload.scalars)
        at, values = self.operator.decode(coded, self._elements, self._schema["x"].dtype)
        return Payload({"at": at, "values": values}, payload.scalars)

    def hear(self, model: Tensor, payload: Payload, view: RoundView) -> None:
        version = int(payload.scalars.get("version", -1))
        if "x" in payload.tensors:
            self.public = payload.tensors["x"].clone()
        elif self.public is not None and version == self.version + 1:
            add_at(self.public, payload.tensors["at"], payload.tensors["values"])
        else:
            self.public = None
        self.version = version
        if view.uid not in self.takes_part(view):
            return
        self.settle(payload)
        if self.public is not None:
            model.copy_(self.public)
            self.start = self.public.clone()

    def reply(self, model: Tensor, view: RoundView) -> Payload:
        assert self.start is not None
        whole = model - self.start
        if self.error is not None:
            whole.add_(self.error)
        coded, self._sent_at, self._sent_values = self.operator.encode(whole, view)
        add_at(whole, self._sent_at, self._sent_values, -1.0)
        self.error = whole
        return self._payload(coded, model, samples=self.samples)

    def answer_lost(self) -> None:
        if self.error is not None and self._sent_at is not None and self._sent_values is not None:
            add_at(self.error, self._sent_at, self._sent_values)

    def gathered(self, received: Mapping[int, Payload]) -> None:
        self.behind |= {uid for uid, each in received.items() if not each.tensors}

    def dense(self, payload: Payload) -> Mapping[str, Tensor]:
        values = payload.tensors["values"]
        found = torch.zeros(self._elements, dtype=values.dtype, device=values.device)
        add_at(found, payload.tensors["at"], values)
        return {"x": found}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.version, "behind": sorted(self.behind)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.version, self.behind = int(state["version"]), set(state["behind"])
