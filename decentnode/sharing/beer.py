"""BEER: gradient tracking whose models and trackers are sent as compressed differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.choco import Choco, ChocoConfig
from decentnode.sharing.gradient_tracking import GradientTracking, TrackingConfig
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.step_size import Search


class BeerConfig(ChocoConfig, TrackingConfig):
    form: Literal["semi_atc", "dsgt"] = "semi_atc"
    """When the step is made, as in `gradient_tracking`. semi_atc: nodes step, x <- x - lr v, and send the resulting x.
    dsgt: they send x and step afterwards, as in the paper, which is stable only for smaller steps."""


class Beer(GradientTracking):
    """x += gamma sum_j W_ij (h_j - h_i) - lr v, v += gamma sum_j W_ij (g_j - g_i) + u'/lr' - u/lr (Zhao et al. 2022).

    arXiv 2201.13320, algorithm 1. v is y in gradient_tracking.py, and u is the total update of a round's local steps. h
    and g are public copies of x and v, updated by C(x - h) and C(v - g) as in choco.py, whose exchange is used twice:
    v_0 = u_0 / lr_0, h starts as the initial model and g as zero. The mean of v over the nodes equals the mean of
    u / lr in every round, whatever C is.

    Memory: two copies per neighbor and seven more. Payloads contain both differences, under the prefixes `x.` and `v.`.
    A lost payload makes the mean of v permanently wrong. In a round with learning rate 0 nodes only mix.
    """

    Config: ClassVar[type[component.Config]] = BeerConfig
    requirements = Requirements(
        static=True, symmetric=True, doubly_stochastic=True, compresses=True, sequential=True, tolerates_missing=False,
        scalars={f"{part}.{name}": spec for part in "xv" for name, spec in Choco.requirements.scalars.items()},
    )  # fmt: skip

    STACKED = False
    TENSORS: ClassVar[tuple[str, ...]] = ("tracked", "old_gradient")

    def __init__(self, config: BeerConfig) -> None:
        super().__init__(config)
        self._copies = {"x": Choco(config), "v": Choco(config)}
        """The exchanges of models, with the public copies h, and of trackers, with the public copies g."""
        self.operator, self.step_size = self._copies["x"].operator, self._copies["x"].step_size

    @classmethod
    def step_search(cls, config: Any) -> Search:
        """Returns the search of `choco`: if gradients do not change, x and v are mixed in the same way."""
        return Choco.step_search(config)

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for each in self._copies.values():
            each.set_parameter_shapes(shapes)

    def begin(self, model: Tensor, view: RoundView) -> None:
        self._start(model, view)
        super().begin(model, view)

    def _start(self, model: Tensor, view: RoundView) -> Tensor:
        """Returns v; before the first gradient, v and its public copy are zero."""
        if self.tracked is None:
            self.tracked = torch.zeros_like(model)
            self._copies["x"].begin(model, view)
            self._copies["v"].begin(self.tracked, view)
        return self.tracked

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        tracked = self._start(model, view)
        x = self._copies["x"].outgoing(model, view)
        v = self._copies["v"].outgoing(tracked, _other_draws(view))
        made: dict[tuple[int, int], Payload] = {}
        for uid in view.neighbors:
            if (which := (id(x[uid]), id(v[uid]))) not in made:
                made[which] = _joined({"x": x[uid], "v": v[uid]})
        return {uid: made[id(x[uid]), id(v[uid])] for uid in view.neighbors}

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        return _joined({part: each.unpack(_part(payload, part), uid, view) for part, each in self._copies.items()})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        tracked = self._start(model, view)
        for each in self._copies.values():
            each.pull = None  # computed anew: rounding errors that stay in it would move the mean of v in every round
        self._copies["x"].mix(model, {uid: _part(payload, "x") for uid, payload in received.items()}, view)
        if self.form == "dsgt" and self.old_gradient is not None:
            model.sub_(tracked, alpha=view.lr)  # v before mixing: both lines of the paper's algorithm use v_t
        self._copies["v"].mix(tracked, {uid: _part(payload, "v") for uid, payload in received.items()}, view)

    def undelivered(self, uid: int, payload: Payload) -> None:
        for each in self._copies.values():
            each.undelivered(uid, payload)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        schema = self._copies["x"].payload_schema(elements, dtype)
        return {f"{part}.{name}": spec for part in self._copies for name, spec in schema.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{part: each.state_dict() for part, each in self._copies.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({name: each for name, each in state.items() if name not in self._copies})
        for part, each in self._copies.items():
            each.load_state_dict(state[part])


def _other_draws(view: RoundView) -> RoundView:
    """Returns a view for which the codec's random numbers differ from those for the round's models."""
    return replace(view, phase=1)


def _joined(parts: Mapping[str, Payload]) -> Payload:
    return Payload(
        {f"{part}.{name}": tensor for part, each in parts.items() for name, tensor in each.tensors.items()},
        {f"{part}.{name}": value for part, each in parts.items() for name, value in each.scalars.items()},
        frozenset(f"{part}.{name}" for part, each in parts.items() for name in each.metadata),
    )


def _part(payload: Payload, part: str) -> Payload:
    """Returns one of the payloads that `_joined` combined."""
    start = f"{part}."
    tensors = {name.removeprefix(start): tensor for name, tensor in payload.tensors.items() if name.startswith(start)}
    scalars = {name.removeprefix(start): value for name, value in payload.scalars.items() if name.startswith(start)}
    return Payload(tensors, scalars)
