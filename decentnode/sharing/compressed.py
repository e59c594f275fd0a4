"""Wraps a sharing rule so that a codec compresses the values that it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from decentnode.compression.base import Codec, make_codec
from decentnode.config import component
from decentnode.config.component import load_class
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.operator import make_generator
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.wrapper import Wrapper

COUNT = ".count"
"""Suffix of the scalar that carries the number of values of a tensor whose length is not fixed by the schema."""


def make_sharing(config: Any, machines: Sequence[Sequence[int]] = ()) -> Sharing:
    """Returns the rule of a YAML section, wrapped in `Compressed` if it does not apply its compression itself.

    machines: the uids on each machine; if empty, the caller has to call `set_machines`.
    Raises EnvironmentFault if a codec's library is not installed.
    """
    made: Sharing = load_class(config.name, SHARINGS, "sharing")(config)
    if machines:
        made.set_machines(machines)
    if made.requirements.compresses or getattr(config, "compression", None) is None:
        return made
    return Compressed(made, make_codec(config.compression))


class Compressed(Wrapper):
    """Encodes a rule's payloads before they are sent, and decodes arriving ones before the rule sees them.

    Floating-point tensors are encoded, all others are sent unchanged. The error of a lossy codec is not compensated:
    the mean over the nodes is only preserved up to that error, and nodes do not get closer to consensus than it.
    `choco` is the rule for coarse codecs. If the rule sends entries of the model, no two parameter tensors share a
    scale.
    """

    Config: ClassVar[type[component.Config]] = SharingConfig

    def __init__(self, rule: Sharing, codec: Codec) -> None:
        self.codec = codec
        self._whole = codec
        """The codec of tensors with the layout of the whole model."""
        self._sizes: list[int] = []
        """The number of entries of each parameter tensor."""
        self._specs: dict[str, TensorSpec] = {}
        """The schema of the inner rule's payloads."""
        self._counts: dict[str, ScalarSpec] = {}
        """The scalars with the lengths of encoded tensors whose length is not fixed."""
        self._own: Payload | None = None
        """This node's own payload of the current phase as neighbors decode it; None if the rule does not mix it."""
        self._view: RoundView | None = None
        """The view (round and phase) of the payloads that were sent last."""
        super().__init__(rule)

    def changed(self, inner: Requirements) -> Requirements:
        """Returns the requirements of the wrapper. It is not linear, because the sum of encoded tensors is not the
        encoded sum."""
        return replace(inner, elementwise=inner.elementwise and self.codec.elementwise, linear=False,
                       scalars={**inner.scalars, **self._counts})  # fmt: skip

    def own_contribution(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        """Returns None, as every payload must be decoded before it is added."""
        return

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().set_parameter_shapes(shapes)
        self._sizes = [math.prod(shape) for shape in shapes]
        self._whole = self.codec.divided(self._sizes)

    def _codec_of(self, name: str, sizes: Mapping[str, Sequence[int]]) -> Codec:
        """Returns the codec of a tensor. sizes: as the rule's `tensor_sizes` returned them."""
        if name in sizes:
            return self.codec.divided(sizes[name])
        return self._whole if self._is_whole(self._specs[name]) else self.codec

    def _is_whole(self, spec: TensorSpec) -> bool:
        return spec.exact and bool(self._sizes) and spec.max_elements == sum(self._sizes)

    def _is_encoded(self, name: str) -> bool:
        return self._specs[name].dtype.is_floating_point

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        self._specs, self._counts = self.rule.payload_schema(elements, dtype), {}
        found: dict[str, TensorSpec] = {}
        for name, spec in self._specs.items():
            if not self._is_encoded(name):
                found[name] = spec
                continue
            if self._is_whole(spec) or (spec.exact and self._whole is self.codec):
                parts = self._whole.schema(spec.max_elements, spec.dtype)
            else:
                parts = self.codec.largest_schema(spec.max_elements, spec.dtype, len(self._sizes))
            if not spec.exact:
                self._counts[name + COUNT] = ScalarSpec(int, low=0, high=spec.max_elements)
            found.update({self._name(name, part): coded for part, coded in parts.items()})
        self.requirements = self.changed(self.rule.requirements)
        return found

    def _name(self, name: str, part: str) -> str:
        return name if self.requirements.elementwise else f"{name}.{part}"

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        if not self._specs:
            self.payload_schema(model.numel(), model.dtype)
        self._view = view
        draws = make_generator(self.codec, view, model.device)
        encoded: dict[int, Payload] = {}
        out = {}
        rule_payloads = self.rule.outgoing(model, view)
        for uid, payload in rule_payloads.items():
            if id(payload) not in encoded:
                sizes = self.rule.tensor_sizes(payload, view.uid, uid, view)
                encoded[id(payload)] = self._encode(payload, sizes, draws)
            out[uid] = encoded[id(payload)]
        own = view.phase in self.requirements.includes_self and out
        self._own = self.unpack(next(iter(out.values())), view.uid, view) if own else None
        return out

    def _encode(
        self, payload: Payload, sizes: Mapping[str, Sequence[int]], draws: torch.Generator | None
    ) -> Payload:
        tensors: dict[str, Tensor] = {}
        scalars, metadata = dict(payload.scalars), set(payload.metadata)
        for name, tensor in payload.tensors.items():
            if not self._is_encoded(name):
                tensors[name] = tensor
                continue
            for part, coded in self._codec_of(name, sizes).encode(tensor, draws).items():
                tensors[self._name(name, part)] = coded
                if part in self.codec.metadata:
                    metadata.add(self._name(name, part))
            if not self._specs[name].exact:
                scalars[name + COUNT] = tensor.numel()
        return Payload(tensors, scalars, frozenset(metadata))

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        sizes = self.rule.tensor_sizes(payload, uid, view.uid, view)
        return self.rule.unpack(self._decode(payload, sizes), uid, view)

    def _decode(self, payload: Payload, sizes: Mapping[str, Sequence[int]]) -> Payload:
        """Returns the inner rule's payload as receivers decode it. Raises PeerFault for bytes that cannot be from the
        encoder."""
        tensors: dict[str, Tensor] = {}
        scalars = dict(payload.scalars)
        for name, spec in self._specs.items():
            if not self._is_encoded(name):
                tensors[name] = payload.tensors[name]
                continue
            count = spec.max_elements if spec.exact else scalars.pop(name + COUNT, -1)
            if not isinstance(count, int) or not 0 <= count <= spec.max_elements:
                raise PeerFault("malformed_payload", f"{count} values of {name}")
            if name in sizes and sum(sizes[name]) != count:
                raise PeerFault("malformed_payload", f"{count} values of {name} instead of {sum(sizes[name])}")
            codec = self._codec_of(name, sizes)
            coded = {part: payload.tensors[self._name(name, part)] for part in codec.schema(count, spec.dtype)}
            tensors[name] = codec.decode(coded, count, spec.dtype)
        return Payload(tensors, scalars, payload.metadata)

    def _slice(self, payload: Payload) -> Payload:
        """Returns one slice of a payload in the dtype that the rule mixes.

        Linear rules accept float16 and bfloat16: their weighted sum converts block by block in the cache, which saves a
        pass over memory for the converted tensor.
        """
        dtype = self._specs["x"].dtype
        if self.rule.requirements.linear and payload.tensors["x"].is_floating_point():
            return payload
        return Payload({"x": payload.tensors["x"].to(dtype)}, payload.scalars)

    def _received(self, received: Mapping[int, Payload], view: RoundView) -> Mapping[int, Payload]:
        """Returns the payloads that the inner rule mixes: slices in its dtype, and the node's own payload if the rule
        needs it."""
        if self.requirements.elementwise:
            received = {uid: self._slice(payload) for uid, payload in received.items()}
        if self._own is not None and view.uid not in received:
            received = {**received, view.uid: self._own}
        return received

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.rule.mix(model, self._received(received, view), view)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.rule.mix_into(out, model, self._received(received, view), view)

    def undelivered(self, uid: int, payload: Payload) -> None:
        """Passes the undelivered payload to the inner rule, decoded as the receiver would have."""
        assert self._view is not None
        sizes = self.rule.tensor_sizes(payload, self._view.uid, uid, self._view)
        self.rule.undelivered(uid, self._decode(payload, sizes))
