"""Any rule with its values compressed on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from decentnode import rng
from decentnode.compression.base import Codec, make_codec
from decentnode.config.component import load_class
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing, SharingConfig

COUNT = ".count"
"""Ending of the scalar that says how many values a tensor of free length had."""


def make_sharing(config: Any, machines: Sequence[Sequence[int]] = ()) -> Sharing:
    """The rule of a section, within its compression where it does not compress by itself.

    machines: the uids on every machine; without them the rule is still to be told (`set_machines`).
    Raises EnvironmentFault when a codec's library is not installed.
    """
    made: Sharing = load_class(config.name, SHARINGS, "sharing")(config)
    if machines:
        made.set_machines(machines)
    if made.compresses or getattr(config, "compression", None) is None:
        return made
    return Compressed(made, make_codec(config.compression))


def draws_of(codec: Codec, view: RoundView, device: torch.device) -> torch.Generator | None:
    """The codec's draws of this node, round and phase; None where it makes none."""
    if not codec.unbiased:
        return None
    purpose = f"compression, phase {view.phase}" if view.phase else "compression"
    return torch.Generator(device).manual_seed(rng.torch_seed(view.seed, view.uid, purpose, view.round))


class Compressed(Sharing):
    """The floating-point tensors of a rule's payload that are no metadata travel coded; the rule sees them decoded.

    What a lossy codec takes away is lost: the mean over the nodes is kept up to the codec's error only, and nodes
    agree no closer than it. `choco` is the rule for coarse codecs.
    """

    Config: ClassVar[type[SharingConfig]] = SharingConfig

    def __init__(self, rule: Sharing, codec: Codec) -> None:
        self.rule = rule
        self.codec = codec
        for name in ("needs_symmetric", "needs_doubly_stochastic", "needs_column_stochastic", "needs_static",
                     "smallest_eigenvalue", "forgets_losses", "needs_gradient", "phases", "needs_sequential",
                     "needs_tree", "overrides_topology", "needs_groups", "scalars"):  # fmt: skip
            setattr(self, name, getattr(rule, name))
        self.elementwise = rule.elementwise and codec.elementwise  # type: ignore[misc]
        self._specs: dict[str, TensorSpec] = {}
        self._own: Payload | None = None
        """What this node sent, as its neighbors read it, until it is mixed."""

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        self.rule.set_machines(machines)

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.rule.set_parameter_shapes(shapes)

    def exchange_number(self, round: int) -> int | None:
        return self.rule.exchange_number(round)

    def plan(self, view: RoundView) -> RoundView:
        return self.rule.plan(view)

    def plan_buffers(self, view: RoundView) -> RoundView:
        return self.rule.plan_buffers(view)

    def begin(self, model: Tensor, view: RoundView) -> None:
        self.rule.begin(model, view)

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:
        return self.rule.direction(gradient, view)

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        self.rule.adjust(model, view, loss)

    def finish(self, model: Tensor, view: RoundView) -> None:
        self.rule.finish(model, view)

    def advance(self, model: Tensor, update: Tensor, view: RoundView) -> None:
        self.rule.advance(model, update, view)

    def _coded(self, name: str) -> bool:
        return self._specs[name].dtype.is_floating_point

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        self._specs = self.rule.payload_schema(elements, dtype)
        found: dict[str, TensorSpec] = {}
        counts: dict[str, ScalarSpec] = {}
        for name, spec in self._specs.items():
            if not self._coded(name):
                found[name] = spec
                continue
            for part, coded in self.codec.schema(spec.max_elements, spec.dtype).items():
                found[self._name(name, part)] = coded if spec.exact else replace(coded, exact=False)
            if not spec.exact:
                counts[name + COUNT] = ScalarSpec(int, low=0, high=spec.max_elements)
        self.scalars = {**self.rule.scalars, **counts}  # type: ignore[misc]
        return found

    def _name(self, name: str, part: str) -> str:
        return name if self.elementwise else f"{name}.{part}"

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        if not self._specs:
            self.payload_schema(model.numel(), model.dtype)
        draws = draws_of(self.codec, view, model.device)
        packed: dict[int, Payload] = {}
        out = {}
        kept = self.rule.outgoing(model, view)
        for uid, payload in kept.items():
            if id(payload) not in packed:
                packed[id(payload)] = self._packed(payload, draws)
            out[uid] = packed[id(payload)]
        self._own = self._decoded(next(iter(out.values()))) if out and self.rule.includes_self(view) else None
        return out

    def _packed(self, payload: Payload, draws: torch.Generator | None) -> Payload:
        tensors: dict[str, Tensor] = {}
        scalars, metadata = dict(payload.scalars), set(payload.metadata)
        for name, tensor in payload.tensors.items():
            if not self._coded(name):
                tensors[name] = tensor
                continue
            for part, coded in self.codec.encode(tensor, draws).items():
                tensors[self._name(name, part)] = coded
                if part in self.codec.metadata:
                    metadata.add(self._name(name, part))
            if not self._specs[name].exact:
                scalars[name + COUNT] = tensor.numel()
        return Payload(tensors, scalars, frozenset(metadata))

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        return self.rule.unpack(self._decoded(payload), uid, view)

    def _decoded(self, payload: Payload) -> Payload:
        """The rule's payload as receivers see it. Raises PeerFault for bytes that no encoder made."""
        tensors: dict[str, Tensor] = {}
        scalars = dict(payload.scalars)
        for name, spec in self._specs.items():
            if not self._coded(name):
                tensors[name] = payload.tensors[name]
                continue
            count = spec.max_elements if spec.exact else scalars.pop(name + COUNT, -1)
            if not isinstance(count, int) or not 0 <= count <= spec.max_elements:
                raise PeerFault("malformed_payload", f"{count} values of {name}")
            parts = self.codec.schema(count, spec.dtype)
            tensors[name] = self.codec.decode(
                {part: payload.tensors[self._name(name, part)] for part in parts}, count, spec.dtype
            )
        return Payload(tensors, scalars, payload.metadata)

    def _slice(self, payload: Payload) -> Payload:
        """One slice of a payload whose codec works element by element; weighted sums widen it block by block."""
        dtype = self._specs["x"].dtype
        if self.rule.linear and payload.tensors["x"].is_floating_point():
            return payload
        return Payload({"x": payload.tensors["x"].to(dtype)}, payload.scalars)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if self.elementwise:
            received = {uid: self._slice(payload) for uid, payload in received.items()}
        if self._own is not None and self.rule.includes_self(view):
            received, self._own = {**received, view.uid: self._own}, None
        self.rule.mix(model, received, view)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if self.elementwise:
            received = {uid: self._slice(payload) for uid, payload in received.items()}
        self.rule.mix_into(out, model, received, view)

    def undelivered(self, uid: int, payload: Payload) -> None:
        """The rule gets what would have arrived."""
        self.rule.undelivered(uid, self._decoded(payload))

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state)
