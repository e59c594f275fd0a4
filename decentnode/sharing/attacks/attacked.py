"""Any sharing rule in a run with attackers, which send forged models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.attacks.base import Attack
from decentnode.sharing.base import Sharing
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.wrapper import Wrapper


class Attacked(Wrapper):
    """The rule of every node of a run with attackers; on attackers it sends the model that the attack forges.

    The rule inside sees the forged model in `outgoing` alone: it mixes what arrives into the attacker's own model.
    Requirements are the same on all nodes: models are not mixed slice by slice, because an attack may need all of the
    models that arrived, and sums of models are not used, because an attacker's own sum would hold its forged model.
    """

    def __init__(self, rule: Sharing, attack: Attack, attackers: Sequence[int]) -> None:
        """attack: an object of this node and this rule alone."""
        super().__init__(rule)
        self.attack, self._attackers = attack, frozenset(attackers)
        self._received: list[Tensor] = []
        """[P] each: the models that this attacker mixed last, in ascending order of uid."""

    def changed(self, inner: Requirements) -> Requirements:
        return replace(inner, elementwise=False, linear=False)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        schema = super().payload_schema(elements, dtype)
        assert sends_models(schema, elements) or not self.attack.NEEDS_MODELS  # a check of the experiment says so
        return schema

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        attacks = view.uid in self._attackers and view.round >= self.attack.config.first_round
        if not attacks or not view.neighbors:  # the rounds of a periodic rule without an exchange
            return self.rule.outgoing(model, view)
        return self.rule.outgoing(self.attack.forged(model, self._received, view), view)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self._keep(received, view, model.dtype)
        self.rule.mix(model, received, view)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self._keep(received, view, model.dtype)
        self.rule.mix_into(out, model, received, view)

    def _keep(self, received: Mapping[int, Payload], view: RoundView, dtype: torch.dtype) -> None:
        """Copies the models that an attacker received: their memory is the transport's. Those of the last exchange are
        kept in rounds in which none arrives."""
        if view.uid in self._attackers and self.attack.NEEDS_MODELS:
            arrived = [payload.tensors["x"] for uid, payload in received.items() if uid != view.uid]
            self._received = [each.to(dtype, copy=True) for each in arrived] or self._received

    def succeed(self, former: Self) -> None:
        """An attacker keeps what it knows in a new membership generation."""
        super().succeed(former)
        self.attack, self._received = former.attack, former._received

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:  # noqa: ARG002
        return None

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule.state_dict(), "attack": self.attack.state_dict()}
        return found | ({"received": torch.stack(self._received)} if self._received else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state["rule"])
        self.attack.load_state_dict(state["attack"])
        self._received = list(state["received"].clone()) if "received" in state else []


def sends_models(schema: Mapping[str, TensorSpec], elements: int) -> bool:
    """Returns whether a payload is one tensor "x" with the whole model in floating-point numbers."""
    spec = schema.get("x")
    return len(schema) == 1 and spec is not None and spec.exact and spec.max_elements == elements \
        and spec.dtype.is_floating_point  # fmt: skip
