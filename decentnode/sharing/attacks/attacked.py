"""Any sharing rule in a run with attackers, which send forged models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from decentnode.errors import UsageError
from decentnode.graph.base import Graph, RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.attacks.base import Attack, Knowledge
from decentnode.sharing.base import Sharing
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.rounds import rule_view
from decentnode.sharing.wrapper import Wrapper


class Attacked(Wrapper):
    """The rule of every node of a run with attackers; on attackers it sends the models that the attack forges.

    The rule inside sees forged models in `outgoing` alone: it mixes what arrives into the attacker's own model.
    Requirements are the same on all nodes: models are not mixed slice by slice, because an attack may need all of the
    models that arrived, and sums of models are not used, because an attacker's own sum would hold its forged model.

    For an omniscient attack there is a phase before the rule's own: honest nodes send their models to the attackers.
    """

    def __init__(self, rule: Sharing, attack: Attack, attackers: Sequence[int], graph: Graph) -> None:
        """attack: an object of this node and this rule alone. graph: the graph over which the rule exchanges."""
        self.attack, self._attackers, self._graph = attack, frozenset(attackers), graph
        super().__init__(rule)
        self._received: dict[int, Tensor] = {}
        """The models [P] that this attacker mixed last, by uid, ascending."""
        self._honest: dict[int, Tensor] = {}
        """The models [P] that honest nodes send in this round, by uid, ascending, as an omniscient attacker knows."""

    def changed(self, inner: Requirements) -> Requirements:
        needs = replace(inner, elementwise=False, linear=False)
        return replace(needs, phases=2, overrides_topology=True) if self.attack.OMNISCIENT else needs

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        schema = super().payload_schema(elements, dtype)
        assert sends_models(schema, elements) or not self.attack.NEEDS_MODELS  # a check of the experiment says so
        self._payload_bytes = sum(spec.max_elements * spec.dtype.itemsize for spec in schema.values())
        return schema

    def phase_bytes(self, view: RoundView, elements: int) -> tuple[float, ...] | None:
        if self.attack.OMNISCIENT:  # models in both phases; in the first, nothing may be sent in the first rounds
            return self._payload_bytes, self._payload_bytes
        return self.rule.phase_bytes(view, elements)

    def plan(self, view: RoundView) -> RoundView:
        if not self.attack.OMNISCIENT:
            return self.rule.plan(view)
        if self._learns_in(view):
            return self._learning(view)
        return replace(self.rule.plan(self._inner(view)), phase=view.phase)

    def plan_buffers(self, view: RoundView) -> RoundView:
        return self.rule.plan(view) if self.attack.OMNISCIENT else self.rule.plan_buffers(view)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        inner = self._inner(view)
        if self._learns_in(view) or not self._attacks_in(view) or not view.neighbors:  # none in rounds without exchange
            return self.rule.outgoing(model, inner)
        try:
            return self._forged(model, inner)
        except UsageError as error:
            raise UsageError(f"attack: node {view.uid}, an attacker, cannot send what it forged: {error}") from error

    def _forged(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        """Returns the payloads of an attacker in the rule's own phase."""
        models = self._honest if self.attack.OMNISCIENT else self._received
        payloads = self.rule.outgoing(self._checked(self.attack.forged(model, [*models.values()], view), model), view)
        known = Knowledge(models, self._attackers, self._weights_in(view))
        for uid, forged in self.attack.forged_by_neighbor(model, known, view).items():
            payloads[uid] = self.rule.outgoing(self._checked(forged, model), replace(view, neighbors=(uid,)))[uid]
        return payloads

    def _checked(self, forged: Tensor, model: Tensor) -> Tensor:
        """Returns a forged model in the model's dtype. Raises UsageError if its shape is another."""
        if forged.shape != model.shape:
            raise UsageError(f"{type(self.attack).__name__} must forge models of shape {[*model.shape]}, got "
                             f"{[*forged.shape]}")  # fmt: skip
        return forged.to(model)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if self._keep(received, view, model.dtype):
            self.rule.mix(model, received, self._inner(view))

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if self._keep(received, view, model.dtype):
            self.rule.mix_into(out, model, received, self._inner(view))
        else:
            out.copy_(model)

    def _keep(self, received: Mapping[int, Payload], view: RoundView, dtype: torch.dtype) -> bool:
        """Copies the models that an attacker received, as their memory is the transport's. Returns whether they are to
        be mixed. Those of the last exchange are kept in rounds in which none arrives."""
        learns = self._learns_in(view)
        if view.uid in self._attackers and (learns or self.attack.NEEDS_MODELS):
            arrived = {uid: payload.tensors["x"].to(dtype, copy=True)
                       for uid, payload in received.items() if uid != view.uid}  # fmt: skip
            if learns:
                self._honest = arrived
            else:
                self._received = arrived or self._received
        if not learns:
            self._honest = {}
        return not learns

    # -- what omniscient attackers know

    def _attacks_in(self, view: RoundView) -> bool:
        return view.uid in self._attackers and view.round >= self.attack.config.first_round

    def _learns_in(self, view: RoundView) -> bool:
        """Returns whether this is the phase in which attackers learn the models of honest nodes."""
        return self.attack.OMNISCIENT and view.phase == 0

    def _inner(self, view: RoundView) -> RoundView:
        """Returns a view of the rule's own phase as the rule expects it."""
        return replace(view, phase=0) if self.attack.OMNISCIENT else view

    def _learning(self, view: RoundView) -> RoundView:
        """Returns the view of the phase in which honest nodes send their models to all attackers. Nothing is sent in
        rounds in which the rule does not exchange, or before the attack begins."""
        alone = view.alone()
        if view.round < self.attack.config.first_round or self.rule.exchange_number(view.round) is None:
            return alone
        honest = tuple(uid for uid in view.members if uid not in self._attackers)
        if view.uid not in self._attackers:
            return replace(alone, neighbors=tuple(uid for uid in view.members if uid in self._attackers))
        weights = {uid: float(uid == view.uid) for uid in sorted({view.uid, *honest})}
        return replace(alone, sources=honest, weights=weights)

    def _weights_in(self, view: RoundView) -> Callable[[int], Mapping[int, float]]:
        """Returns a function that returns the row of W of a node in the round of `view`."""
        members = frozenset(view.members)

        @cache
        def weights_of(uid: int) -> Mapping[int, float]:
            found = rule_view(self.rule, self._graph, uid, view.round, view.seed, members)
            return self.rule.plan(replace(found, fragment=view.fragment)).weights

        return weights_of

    # -- generations and checkpoints

    def succeed(self, former: Self) -> None:
        """An attacker keeps what it knows in a new membership generation."""
        super().succeed(former)
        self.attack, self._received = former.attack, former._received

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:  # noqa: ARG002
        return None

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule.state_dict(), "attack": self.attack.state_dict()}
        if self._received:
            found |= {"received": torch.stack([*self._received.values()]), "sources": [*self._received]}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state["rule"])
        self.attack.load_state_dict(state["attack"])
        received = [*state["received"].clone()] if "received" in state else []
        # checkpoints of older versions have no sources
        self._received = dict(zip(state.get("sources", range(len(received))), received, strict=True))


def sends_models(schema: Mapping[str, TensorSpec], elements: int) -> bool:
    """Returns whether a payload is one tensor "x" with the whole model in floating-point numbers."""
    spec = schema.get("x")
    return len(schema) == 1 and spec is not None and spec.exact and spec.max_elements == elements \
        and spec.dtype.is_floating_point  # fmt: skip


def may_differ_by_neighbor(rule: Sharing, elements: int) -> bool:
    """Returns whether every payload of a rule is the model itself, and a round is one exchange of them, so that an
    attacker may send each neighbor another model. rule: one with `set_parameter_shapes` called for this many elements,
    whose state may change."""
    if not sends_models(rule.payload_schema(elements, torch.float32), elements):
        return False
    needs = rule.requirements
    if needs.phases > 1 or needs.sequential or needs.gradient or needs.scalars or needs.star:
        return False
    model, half = torch.arange(float(elements)), {0: 0.5, 1: 0.5}
    payload = rule.outgoing(model, RoundView(0, 0, (1,), (1,), half, half, (0, 1)))[1]
    return torch.equal(payload.tensors["x"], model)
