"""Wraps a sharing rule so that it weights payloads by the number of samples or tokens that their senders trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from torch import Tensor

from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.wrapper import Wrapper

Unit = Literal["samples", "tokens"]
TRAINED = "trained"
"""The payload's scalar with the number of samples or tokens that its sender trained on."""
MAX_TRAINED = 1 << 40
"""The largest number that is accepted from a peer."""


def reason_against_weights(needs: Requirements) -> str:
    """Returns the reason why a rule cannot be combined with weights by samples or tokens; "" if it can."""
    if needs.star:
        return "has weights of its own (weighted_by)"
    if needs.unweighted:
        return "uses no weights"
    if needs.symmetric or needs.doubly_stochastic or needs.column_stochastic or needs.static or needs.tree:
        return "needs weights that keep the mean of all models, or that stay the same"
    if needs.overrides_topology or needs.phases > 1:
        return "chooses neighbors and weights itself"
    return "" if needs.tolerates_missing else "cannot recover from a missing payload"


class WeightedByTraining(Wrapper):
    """Mixes with the weights w_ij n_j / sum_k w_ik n_k, over the payloads that arrived and the node's own model,
    instead of w_ij.

    n_j is the number of samples or tokens that node j has trained on since its previous payload; the payload carries
    it. Rows sum to one, but columns do not, so that the mean of all models is only preserved if all n_j are equal. If
    all n_j are 0, the weights are w_ij. As the number arrives with the whole payload, a model is not mixed slice by
    slice while it arrives.
    """

    def __init__(self, rule: Sharing, unit: Unit) -> None:
        """rule: a rule for which `reason_against_weights` returns ""."""
        super().__init__(rule)
        self._unit = unit
        self._trained = self._sent = 0
        """What this node has trained on since its last payload, and the number in that payload."""

    def changed(self, inner: Requirements) -> Requirements:
        spec = ScalarSpec(int, low=0, high=MAX_TRAINED)
        return replace(inner, elementwise=False, linear=False, scalars={**inner.scalars, TRAINED: spec})

    def trained(self, samples: int, units: int) -> None:
        super().trained(samples, units)
        self._trained += samples if self._unit == "samples" else units

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        found = self.rule.outgoing(model, view)
        self._sent = min(self._trained, MAX_TRAINED)
        if found:
            self._trained = 0
        outgoing: dict[int, Payload] = {}
        marked: dict[int, Payload] = {}
        for uid, payload in found.items():  # a payload shared by several neighbors stays one object
            if id(payload) not in marked:
                marked[id(payload)] = replace(payload, scalars={**payload.scalars, TRAINED: self._sent})
            outgoing[uid] = marked[id(payload)]
        return outgoing

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        trained = payload.scalars[TRAINED]
        inner = self.rule.unpack(_without(payload), uid, view)
        return replace(inner, scalars={**inner.scalars, TRAINED: trained})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.rule.mix(model, *self._weighted(received, view))

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        self.rule.mix_into(out, model, *self._weighted(received, view))

    def _weighted(
        self, received: Mapping[int, Payload], view: RoundView
    ) -> tuple[dict[int, Payload], RoundView]:
        """Returns the payloads without the scalar TRAINED, and the view with the weights that follow from it."""
        plain = {uid: _without(payload) for uid, payload in received.items()}
        counts = {uid: int(payload.scalars[TRAINED]) for uid, payload in received.items() if uid != view.uid}
        parts = {uid: view.weights[uid] * count for uid, count in counts.items()}
        whole = view.weights[view.uid] * self._sent + sum(parts.values())
        if not whole:
            return plain, view
        row = {uid: part / whole for uid, part in parts.items()}
        row[view.uid] = 1.0 - sum(row.values())
        return plain, replace(view, weights=dict(sorted(row.items())))

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:  # noqa: ARG002
        return None

    def succeed(self, former: Self) -> None:
        super().succeed(former)
        self._trained = former._trained

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.rule.state_dict(), "trained": self._trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state["rule"])
        self._trained = int(state["trained"])


def _without(payload: Payload) -> Payload:
    """Returns a payload without the scalar TRAINED."""
    return replace(payload, scalars={name: each for name, each in payload.scalars.items() if name != TRAINED})
