"""Top-k: nodes send the entries that changed most; receivers use their own values for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression import indices, select
from decentnode.config import component
from decentnode.config.component import ADDED
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.dump import DumpConfig
from decentnode.sharing.operator import add_at, sizes_at
from decentnode.sharing.state import Tensors

METADATA = frozenset({"indices"})
NOTHING = torch.empty(0), torch.empty(0, dtype=torch.int64)


def mix_filled(own: Tensor, received: Mapping[int, tuple[Tensor, Tensor]], weights: Mapping[int, float]) -> None:
    """Computes own += sum_j w_j (v_j - own) at the indices of v_j, in place.

    This is the weighted mean in which the node's own value replaces every entry that source j did not send. All
    differences are computed before the first is added. own: [C]. received: uid -> (indices [K], values [K]).
    """
    if any(at.numel() == own.numel() for at, _ in received.values()):
        # Whole models (K = C) need no gather: differences to a copy of `own`, or with a single source to `own` itself,
        # are computed in one pass.
        before = own.clone() if len(received) > 1 else own
        for uid, (at, values) in received.items():
            was = before if at.numel() == own.numel() else before.index_select(0, at)
            add_at(own, at, values - was, weights[uid])
        return
    moves = [(at, values - own.index_select(0, at), weights[uid]) for uid, (at, values) in received.items()]
    for at, move, weight in moves:
        add_at(own, at, move, weight)


class TopKConfig(SharingConfig):
    fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the model's entries that a node sends."""
    accumulate: Literal["all", "training", "none"] = "all"
    """Which changes of an entry since it was last sent make up its score. all: those by training and by mixing.
    training: only those by training. none: only this round's training."""
    cleared: Literal["after_mixing", "before_mixing"] = "after_mixing"
    """With accumulate all: when the scores of sent entries are set to zero. after_mixing: after the round, since
    neighbors now know these values. before_mixing: before the round's change is added, as decentralizepy does, so that
    this change counts for the next choice although it was sent."""
    full_from: float = Field(1.0, gt=0, le=1)
    """From this fraction on, the whole model is sent without indices, which is then shorter."""

    scored: Annotated[Literal["change", "value"], ADDED] = "change"
    """What an entry's score is. change: its change as defined by `accumulate`. value: its absolute value, whatever
    changed (decentralizepy's change_based_selection: False)."""

    dump: Annotated[DumpConfig | None, ADDED] = None
    """Write what was chosen, for studies; nothing is written when not given."""

    @pydantic.model_validator(mode="after")
    def _order_matters(self) -> TopKConfig:
        if self.scored == "value" and self.accumulate != "all":
            raise ValueError(f"must have accumulate all, its default, with scored value, got {self.accumulate}")
        if self.scored == "value" and self.cleared == "before_mixing":
            raise ValueError("must have scored change with cleared before_mixing, which only applies to changes")
        if self.cleared == "before_mixing" and self.accumulate != "all":
            raise ValueError(f"must have accumulate all with cleared before_mixing, got {self.accumulate}")
        return self


class TopK(Tensors, Sharing):
    """Sends the model's values where it changed most (TopK of decentralizepy; Alistarh et al. 2018, arXiv 1809.10505).

    Receivers replace the entries that were not sent by their own values, then average. The mean over the nodes is not
    preserved. Subclasses choose and mix entries in another basis (`transform`, `restore`).
    """

    Config: ClassVar[type[component.Config]] = TopKConfig
    TENSORS: ClassVar[tuple[str, ...]] = ("reference", "changes", "previous")
    config: TopKConfig

    def __init__(self, config: TopKConfig) -> None:
        super().__init__(config)
        self.accumulate = config.accumulate
        self.reference: Tensor | None = None
        """The coefficients of the mixed model, each from the round in which it was last sent; with `accumulate`
        training or none, all from the last round. Scores are distances to it."""
        self.previous: Tensor | None = None
        """With `cleared: before_mixing`, the coefficients of the model after the last round."""
        self.changes: Tensor | None = None
        """With `accumulate: training`, the sum of each coefficient's changes by training since it was last sent."""
        self._own = torch.empty(0)
        self._in_model = False
        self._sent = torch.empty(0, dtype=torch.int64)
        self._all_sent = True
        self._dumps_scores = config.dump is not None and config.dump.scores
        self._chosen: dict[str, Tensor] = {}
        """What dumps contain beside the positions."""
        self._sizes: list[int] = []
        self._decoded = NOTHING
        """The indices that were decoded last, encoded and decoded."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        if type(self).transform is TopK.transform:  # in another basis, coefficients do not belong to parameter tensors
            self._sizes = [math.prod(shape) for shape in shapes]

    # -- the basis in which entries are chosen and mixed; here that of the model itself

    def transform(self, model: Tensor) -> Tensor:
        return model

    def restore(self, coefficients: Tensor, model: Tensor) -> None:
        """Writes the model [P] from its coefficients; not called if `transform` returns the model itself."""
        model.copy_(coefficients)

    def score(self, change: Tensor) -> Tensor:
        return change.abs_()

    def fraction(self, view: RoundView) -> float:  # noqa: ARG002
        return self.config.fraction

    def largest_fraction(self) -> float:
        """Returns an upper bound of `fraction` over all rounds, which determines payload sizes."""
        return self.config.fraction

    def count(self, fraction: float, coefficients: int) -> int:
        """Returns how many of `coefficients` coefficients are sent."""
        return coefficients if fraction >= self.config.full_from else select.count_of(fraction, coefficients)

    # -- the rule

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.reference is None and self.config.scored == "change":
            self.reference = self.transform(model).clone()
            self.previous = self.reference.clone() if self.config.cleared == "before_mixing" else None

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        # an overlapped schedule does not call `begin`; in its first round, the model is still the initial one
        self.begin(model, view)
        self._own = own = self.transform(model)
        self._in_model = own is model
        change = self._change(own)
        self._chosen = {"change": change.clone(), "value": own.clone()} if self._dumps_scores else {}
        scores = self.score(change)
        count = self.count(self.fraction(view), scores.numel())
        self._sent = select.largest(scores, count)
        self._all_sent = count == scores.numel()
        values = own if count == scores.numel() else own.index_select(0, self._sent)
        coded = indices.encode(self._sent, scores.numel())
        self._decoded = coded, self._sent
        payload = Payload({"indices": coded, "values": self.numbers(values)}, {}, METADATA)
        return dict.fromkeys(view.neighbors, payload)

    def chosen_entries(self) -> Mapping[str, Tensor]:
        return self._chosen if self._all_sent else {**self._chosen, "sent": self._sent}

    def _change(self, own: Tensor) -> Tensor:
        """Returns the changes [C] from which the scores of the coefficients `own` [C] are computed, in a new tensor."""
        if self.config.scored == "value":
            return own.clone()
        assert self.reference is not None
        change = own - self.reference
        if self.accumulate == "training":
            self.changes = change.clone() if self.changes is None else self.changes.add_(change)
            change = self.changes.clone()
        return change

    def numbers(self, values: Tensor) -> Tensor:
        """Returns the floats that represent coefficients in a payload."""
        return values.contiguous()

    def values(self, numbers: Tensor) -> Tensor:
        """Returns the coefficients that `numbers` represent. Raises PeerFault if these cannot represent any."""
        return numbers

    def _positions(self, coded: Tensor) -> Tensor:
        """Decodes the indices of a payload, once for `tensor_sizes` and `unpack`. Raises PeerFault."""
        if self._decoded[0] is not coded:
            self._decoded = coded, indices.decode(coded, self._own.numel())
        return self._decoded[1]

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        return {"values": sizes_at(self._positions(payload.tensors["indices"]), self._sizes)} if self._sizes else {}

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        at = self._positions(payload.tensors["indices"])
        self._decoded = NOTHING
        values = self.values(payload.tensors["values"])
        if values.numel() != at.numel():
            raise PeerFault("malformed_payload", f"{values.numel()} values for {at.numel()} indices from {uid}")
        return Payload({"at": at, "values": values})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        own, self._own = self._own, torch.empty(0)
        # `own` is the model that was sent; in `mix_into` and under an overlapped schedule, `model` is different memory.
        if self._in_model:
            own = model if own.data_ptr() == model.data_ptr() else model.copy_(own)
        arrived = {uid: (payload.tensors["at"], payload.tensors["values"]) for uid, payload in received.items()}
        mix_filled(own, arrived, view.weights)
        self._note_sent(own)
        if arrived and not self._in_model:
            self.restore(own, model)

    def _note_sent(self, own: Tensor) -> None:
        """After mixing, reset the accumulated changes of the coefficients that were sent. own: [C], the mixed
        coefficients."""
        if self.changes is not None:
            self.changes.index_fill_(0, self._sent, 0)
        if self.config.scored == "value":
            return
        if self.accumulate == "all":
            assert self.reference is not None
            known = own if self.previous is None else self.previous
            self.reference.index_copy_(0, self._sent, known.index_select(0, self._sent))
            if self.previous is not None:
                self.previous = own.clone()
        else:
            self.reference = own.clone()

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        count = self.coefficients(elements)
        most = self.count(self.largest_fraction(), count)
        return {
            "indices": TensorSpec(torch.uint8, indices.largest_bytes(count), exact=False),
            "values": TensorSpec(dtype, self.numbers_of(most), exact=False),
        }

    def numbers_of(self, coefficients: int) -> int:
        """Returns how many floats represent `coefficients` coefficients."""
        return coefficients
