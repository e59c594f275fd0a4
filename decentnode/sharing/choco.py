"""CHOCO-SGD: nodes mix public copies of their models, which are updated by compressed differences."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression.base import Codec, make_codec
from decentnode.config import component
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.operator import Operator, add_at
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.step_size import Compress, Search
from decentnode.tensors import as_bytes


class ChocoConfig(SharingConfig):
    fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the entries of a difference that a node sends."""
    choose: Literal["largest", "random", "all"] = "largest"
    """Which entries are sent: the largest, random ones, or all (to compress only their values)."""
    step_size: float | None = Field(None, gt=0, le=1)
    """How far a node moves toward its neighbors' public copies in a round (gamma). Default: four fifths of the largest
    step with which nodes reach consensus on this graph with this compression (sharing/step_size.py)."""


class Choco(Sharing):
    """q_i = C(x_i - h_i) is sent; h_j += q_j for all; x_i += gamma sum_j W_ij (h_j - h_i) (arXiv 1902.00340, alg. 2).

    h_i, the public copy, is the estimate of x_i that all neighbors of i have. With a static doubly stochastic W the
    mean of the models is preserved whatever C is, and the models converge to it exactly. Memory: one copy per neighbor
    and two more.

    Copies start as the initial model, which is the same on all nodes; the first payloads carry its checksum. A node
    that missed a payload of neighbor j no longer knows h_j: it leaves j out of its mixing and requests the whole h_j
    from j.
    """

    Config: ClassVar[type[component.Config]] = ChocoConfig
    requirements = Requirements(
        static=True, symmetric=True, doubly_stochastic=True, compresses=True,
        scalars={"start": ScalarSpec(int, low=0, high=(1 << 32) - 1, optional=True),
                 "ask": ScalarSpec(int, low=0, high=1, optional=True)},
    )  # fmt: skip

    def __init__(self, config: ChocoConfig) -> None:
        super().__init__(config)
        codec = make_codec(config.compression) if config.compression else None
        self.operator = self.make_operator(config, codec)
        self.step_size = config.step_size or self.step_search(config).without_graph()
        self.public: Tensor | None = None
        """h_i [P], this node's own public copy."""
        self.copies: dict[int, Tensor] = {}
        """h_j [P] of each neighbor j from which no payload was missed."""
        self.pull: Tensor | None = None
        """sum_j W_ij (h_j - h_i) [P] over `pulled`."""
        self.pulled: dict[int, float] = {}
        """The neighbors whose copies are in `pull`, with their weights in it."""
        self.asked: set[int] = set()
        """The neighbors that requested the whole h_i, or missed a payload of this node."""
        self.started = False
        """Whether the first payloads, which carry the checksum of the initial model, have been sent."""
        self._sent: tuple[Tensor, Tensor] | None = None
        self._start = -1

    @classmethod
    def make_operator(cls, config: ChocoConfig, codec: Codec | None) -> Operator:
        return Operator(config.fraction, config.choose, codec)

    @classmethod
    def step_search(cls, config: Any) -> Search:
        """Returns a search that starts from different models with public copies of zeros, which is worse than any run,
        whose models start equal."""
        codec = make_codec(config.compression) if config.compression else None
        return Search(_simulated_round, cls.make_operator(config, codec))

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.operator.set_parameter_shapes(shapes)

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.public is None:
            self.public = model.clone()

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        self.begin(model, view)
        assert self.public is not None
        first = not self.started
        scalars: dict[str, int] = {"start": _checksum(self.public)} if first else {}
        if first:
            self.copies = {uid: self.public.clone() for uid in view.sources}
            self._start = scalars["start"]
        coded, at, values = self.operator.encode(model - self.public, view)
        add_at(self.public, at, values)
        self._sent, self.started = (at, values), True
        nothing = model.new_empty(0)
        # All neighbors get the same object, which is encoded once, except those that request a whole copy or from which
        # one is requested.
        common_payload = Payload({**coded, "whole": nothing}, scalars, self.operator.metadata)
        out = {}
        for uid in view.neighbors:
            asking = {"ask": 1} if uid in view.sources and uid not in self.copies else {}
            whole = uid in self.asked
            if not asking and not whole:
                out[uid] = common_payload
                continue
            tensors = {name: tensor[:0] if whole else tensor for name, tensor in coded.items()}
            out[uid] = Payload({**tensors, "whole": self.public if whole else nothing}, {**scalars, **asking},
                               self.operator.metadata)  # fmt: skip
        self.asked = set()
        return out

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        assert self.public is not None
        whole = payload.tensors["whole"]
        if whole.numel():
            if whole.numel() != self.public.numel():
                raise PeerFault("malformed_payload", f"{whole.numel()} values of a whole copy from {uid}")
            return Payload({"whole": whole}, payload.scalars)
        coded = {name: tensor for name, tensor in payload.tensors.items() if name != "whole"}
        at, values = self.operator.decode(coded, self.public.numel(), self.public.dtype)
        return Payload({"at": at, "values": values}, payload.scalars)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        assert self.public is not None and self._sent is not None
        (own_at, own_values), self._sent = self._sent, None
        changes = self._update_copies(received)
        new_pulled = {uid: view.weights[uid] for uid in sorted(received) if uid in self.copies}
        # The pull sum_j W_ij (h_j - h_i) is only recomputed if a weight changed, or a copy changed otherwise than by q.
        # Otherwise the sparse changes are added to it, which costs K entries per neighbor instead of P. In half
        # precision the rounding errors of these additions would stay in it and move the mean in every later round.
        is_half = self.public.dtype.itemsize < 4
        must_recompute = is_half or self.pull is None or new_pulled != self.pulled or None in changes.values()
        if must_recompute:
            self.pull = torch.zeros_like(self.public)
            for uid, weight in new_pulled.items():
                self.pull.add_(self.copies[uid] - self.public, alpha=weight)
        else:
            assert self.pull is not None
            for uid, weight in new_pulled.items():
                change = changes[uid]
                assert change is not None
                add_at(self.pull, *change, weight)
            add_at(self.pull, own_at, own_values, -sum(new_pulled.values()))
        self.pulled = new_pulled
        assert self.pull is not None
        model.add_(self.pull, alpha=self.step_size)

    def _update_copies(self, received: Mapping[int, Payload]) -> dict[int, tuple[Tensor, Tensor] | None]:
        """Updates all copies. Returns the change of each, by uid, as `_update_copy` does."""
        changes = {uid: self._update_copy(uid, payload) for uid, payload in received.items()}
        # q_j is lost, so that h_j is unknown until j sends the whole copy
        for uid in self.copies.keys() - received.keys():
            del self.copies[uid]
        return changes

    def _update_copy(self, uid: int, payload: Payload) -> tuple[Tensor, Tensor] | None:
        """Updates the copy of `uid`. Returns the change q_j as (positions, values), or None if h_j was replaced or is
        not known."""
        if payload.scalars.get("ask"):
            self.asked.add(uid)
        if "whole" in payload.tensors:
            self.copies[uid] = payload.tensors["whole"].clone()
            return None
        if "start" in payload.scalars and payload.scalars["start"] != self._start:
            self.copies.pop(uid, None)  # j started from another model; it detects the same from this node's checksum
            self.asked.add(uid)
        if uid not in self.copies:
            return None
        change = payload.tensors["at"], payload.tensors["values"]
        add_at(self.copies[uid], *change)
        return change

    def undelivered(self, uid: int, payload: Payload) -> None:  # noqa: ARG002
        self.asked.add(uid)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        coded = {name: TensorSpec(s.dtype, s.max_elements, exact=False)
                 for name, s in self.operator.schema(elements, dtype).items()}  # fmt: skip
        return {**coded, "whole": TensorSpec(dtype, elements, exact=False)}

    def state_dict(self) -> dict[str, Any]:
        found = {name: tensor.clone() for name in ("public", "pull") if (tensor := getattr(self, name)) is not None}
        return {**found, "copies": {str(uid): copy.clone() for uid, copy in self.copies.items()},
                "pulled": {str(uid): weight for uid, weight in self.pulled.items()},
                "asked": sorted(self.asked), "started": self.started, "start": self._start}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("public", "pull"):
            setattr(self, name, state[name].clone() if name in state else None)
        self.copies = {int(uid): copy.clone() for uid, copy in state["copies"].items()}
        self.pulled = {int(uid): float(weight) for uid, weight in state["pulled"].items()}
        self.asked, self.started, self._start = set(state["asked"]), bool(state["started"]), int(state["start"])


def _simulated_round(models: Tensor, public: Tensor, pull: Tensor, step: float, compress: Compress) -> None:
    """Makes a round of all nodes without gradients, for the search of a step, in place. pull: W - I."""
    public.add_(compress(models - public))
    models.add_(pull @ public, alpha=step)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(as_bytes(tensor.detach().cpu().contiguous()))
