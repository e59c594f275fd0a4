"""The base class of sharing rules that wrap another one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from decentnode.graph.base import Graph, RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.hooks import Mixing
from decentnode.sharing.requirements import Requirements


class Wrapper(Sharing):
    """Delegates every method to the inner rule; a subclass overrides the methods that it changes.

    Its requirements are the inner rule's, modified by `changed`.
    """

    def __init__(self, rule: Sharing) -> None:
        self.rule = rule
        self.requirements = self.changed(rule.requirements)

    def changed(self, inner: Requirements) -> Requirements:
        """Returns the wrapper's requirements: `dataclasses.replace(inner, ...)` with the differing fields."""
        return inner

    def objection(self, graph: Graph, members: Collection[int] | None = None) -> str:
        return self.rule.objection(graph, members)

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        self.rule.set_machines(machines)

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.rule.set_parameter_shapes(shapes)

    def set_samples(self, count: int) -> None:
        self.rule.set_samples(count)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        schema = self.rule.payload_schema(elements, dtype)
        self.requirements = self.changed(self.rule.requirements)  # a wrapper's scalars may depend on the model's size
        return schema

    def exchange_number(self, round: int) -> int | None:
        return self.rule.exchange_number(round)

    def plan(self, view: RoundView) -> RoundView:
        return self.rule.plan(view)

    def plan_buffers(self, view: RoundView) -> RoundView:
        return self.rule.plan_buffers(view)

    def phase_bytes(self, view: RoundView, elements: int) -> tuple[float, ...] | None:
        return self.rule.phase_bytes(view, elements)

    def measured_views(self, view: RoundView) -> Sequence[RoundView]:
        return self.rule.measured_views(view)

    def wait_seconds(self, phase: int, timeout_seconds: float) -> float:
        return self.rule.wait_seconds(phase, timeout_seconds)

    def trains(self, view: RoundView) -> bool:
        return self.rule.trains(view)

    def is_chosen(self, view: RoundView) -> bool:
        return self.rule.is_chosen(view)

    def steps_are_for(self, view: RoundView) -> int | None:
        return self.rule.steps_are_for(view)

    def leave_out(self, view: RoundView) -> None:
        self.rule.leave_out(view)

    def begin(self, model: Tensor, view: RoundView) -> None:
        self.rule.begin(model, view)

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:
        return self.rule.direction(gradient, view)

    def trained(self, samples: int, units: int) -> None:
        self.rule.trained(samples, units)

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        self.rule.adjust(model, view, loss)

    def finish(self, model: Tensor, view: RoundView) -> None:
        self.rule.finish(model, view)

    def advance(self, model: Tensor, update: Tensor, view: RoundView) -> None:
        self.rule.advance(model, update, view)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return self.rule.outgoing(model, view)

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView
    ) -> Mapping[str, Sequence[int]]:
        return self.rule.tensor_sizes(payload, source, target, view)

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        return self.rule.unpack(payload, uid, view)

    def chosen_entries(self) -> Mapping[str, Tensor]:
        return self.rule.chosen_entries()

    def coefficients(self, elements: int) -> int:
        return self.rule.coefficients(elements)

    def undelivered(self, uid: int, payload: Payload) -> None:
        self.rule.undelivered(uid, payload)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.rule.mix(model, received, view)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.rule.mix_into(out, model, received, view)

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:
        return self.rule.mix_stacked(models, mixing, view)

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:
        return self.rule.own_contribution(model, view)

    def mix_sum(self, out: Tensor, model: Tensor, total: Tensor, view: RoundView) -> None:
        self.rule.mix_sum(out, model, total, view)

    def succeed(self, former: Self) -> None:
        self.rule.succeed(former.rule)

    def to_be_summed(self, model: Tensor, view: RoundView) -> Mapping[str, Tensor]:
        return self.rule.to_be_summed(model, view)

    def summed(self, totals: Mapping[str, Tensor], view: RoundView) -> None:
        self.rule.summed(totals, view)

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state)
