"""The contract of a sharing rule: what leaves a node, and how arrivals are mixed into its model."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, dtype

from decentnode.compression import CODECS
from decentnode.config.component import Component, Config, section
from decentnode.graph.base import EQUAL, RoundView
from decentnode.mixing import mix_into
from decentnode.payload import Payload, ScalarSpec, TensorSpec

if TYPE_CHECKING:
    from decentnode.sharing.step_size import Search


class SharingConfig(Config):
    """Keys that every rule has."""

    compression: Annotated[Config, section(CODECS, "compression")] | None = None
    """How the values that leave become fewer bytes; as they are without it."""


class Sharing(Component, abc.ABC):
    """One rule on the flat parameters of one node; no sockets, no graph, no buffers.

    A rule that is `elementwise` is called per slice: `outgoing` gets the whole model, and `mix` gets any slice
    [a:b) of the model with the same slice of every payload's one tensor "x".
    """

    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    """mix is x <- w_ii x + sum_j w_ij payload_j["x"], the model being what leaves: where all neighbors have one weight
    a transport may hand over the sum instead (`own_contribution`, `mix_sum`)."""
    # what is needed of W; the run is refused before it starts where the graph does not give it
    needs_symmetric: ClassVar[bool] = False
    needs_doubly_stochastic: ClassVar[bool] = False
    needs_column_stochastic: ClassVar[bool] = False
    needs_static: ClassVar[bool] = False
    smallest_eigenvalue: ClassVar[float | None] = None
    """W may have no eigenvalue below it; one at it is accepted with a warning."""
    forgets_losses: ClassVar[bool] = True
    """Whether one payload that never comes, its weight returned to the receiver alone, does no harm that stays. Where
    it does, runs that would go on without a payload are refused; a generation begins with a rule anew."""
    needs_gradient: ClassVar[bool] = False
    """Whether `direction` has a say in every local step."""
    phases: ClassVar[int] = 1
    """Exchanges per round, one after the other: `plan`, `outgoing`, `mix` are called for each, `view.phase` says for
    which; what leaves in one phase may depend on what was mixed in the one before. All have the same payload schema."""
    needs_sequential: ClassVar[bool] = False
    """Whether it uses `begin`, `adjust` or `finish`, which an overlapped schedule cannot serve."""
    needs_tree: ClassVar[bool] = False
    overrides_topology: ClassVar[bool] = False
    """Whether `plan` chooses other neighbors than the graph's."""
    needs_groups: ClassVar[bool] = False
    """Whether its Config has `groups` (machine, or lists of uids of one size); the graph must be lumpable between them
    (graph/groups.py)."""
    scalars: ClassVar[Mapping[str, ScalarSpec]] = {}
    """The numbers beside the tensors of a payload; what does not fit is refused before `unpack`. A communicator's calls
    that serve a whole clique at once carry none, so that rules with any never go through them."""
    compresses: ClassVar[bool] = False
    """Whether it applies its `compression` itself; otherwise whoever makes the rule wraps it (compressed.py)."""

    @classmethod
    def step_search(cls, config: Any) -> Search | None:  # noqa: ARG003
        """For rules whose Config has a `step_size` that may be left out: what is tried to find it (step_size.py)."""
        return None

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        """Once, before everything else: the uids on every machine, ascending."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Once, before the first schema: the shapes of the parameters that stand one after the other in the model."""

    def exchange_number(self, round: int) -> int | None:
        """The number of the exchange that takes place in `round`, from 0 and one more with every exchange; None in a
        round of rest.

        The graph is asked for its edges by this number: a rule that meets in every k-th round goes through all edges of
        a periodic graph, whatever k is. Every node must come to the same answer.
        """
        return round

    def plan(self, view: RoundView) -> RoundView:
        """The phase as this rule wants it: its own neighbors, sources and weights, or none where it rests.

        Every node must come to the same answer from the view alone, before anything of the round was sent.
        """
        return view

    def plan_buffers(self, view: RoundView) -> RoundView:
        """As `plan`, for the model's float buffers; asked of rules with several phases only."""
        return view

    def includes_self(self, view: RoundView) -> bool:  # noqa: ARG002
        """Whether `received` is to have what this node sent itself, as its neighbors read it, where that is not what it
        gave out: a lossy codec lies between."""
        return False

    def begin(self, model: Tensor, view: RoundView) -> None:
        """Before the local steps: model [P] as the last round left it."""

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:  # noqa: ARG002
        """What the optimizer gets instead of gradient [P] in a local step; called where `needs_gradient` only.

        gradient: of the step's samples, clipped, the rule's to change. Rules that correct what a round's steps did
        together, whatever the optimizer, have `begin` and `adjust` instead.
        """
        return gradient

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        """After the local steps, in place, before `outgoing`. loss: mean training loss of the round."""

    def finish(self, model: Tensor, view: RoundView) -> None:
        """After mixing the last phase, in place, on the whole model."""

    def advance(self, model: Tensor, update: Tensor, view: RoundView) -> None:  # noqa: ARG002
        """Overlapped schedules: add the local update, made meanwhile, to what was mixed; the whole or any slice."""
        model.add_(update)

    @abc.abstractmethod
    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        """A payload per neighbor of `view`; the same object for several is encoded once.

        model: [P] float, not modified. Payload tensors may be views of `model`: the transport takes its own
        snapshot before returning from `exchange`.
        """

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        """What `mix` gets of what came from `uid`, such that `mix` cannot fail of it: all that a peer may have written
        is looked at here (and in `scalars`), not in `mix`, which has changed half a model when it raises.

        Raises PeerFault for bytes that no such rule made: the source then counts as missing. Whatever else it raises of
        them is taken for that, too (decoding.py). Only values may be anything, NaN and infinity included.
        """
        return payload

    @abc.abstractmethod
    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """Mix in place. `view.weights` already has the weight of missing sources on the node itself."""

    def mix_into(
        self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView
    ) -> None:
        """As `mix`, but the result goes to `out`, which shares no memory with `model`."""
        self.mix(out.copy_(model), received, view)

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:  # noqa: ARG002
        """What this node would send to itself in a phase where the sum of what all of `view.averaging_group` send,
        themselves included, is all that mixing needs; None where it needs every payload. The answer of all of them is
        alike."""
        return Payload({"x": model}) if self.linear else None

    def mix_sum(self, out: Tensor, model: Tensor, total: Tensor, view: RoundView) -> None:
        """As `mix_into`, from the sum over `view.averaging_group`; only after `own_contribution` gave something: x <-
        (w_ii - w) x + w sum.

        out: where the result goes, may be the model itself. total: the sum of their tensors "x", not modified.
        """
        own, other = view.weights[view.uid], max(w for uid, w in view.weights.items() if uid != view.uid)
        if abs(own - other) <= EQUAL:
            torch.mul(total, other, out=out)
        else:
            mix_into(out, model, own - other, [(total, other)])

    def undelivered(self, uid: int, payload: Payload) -> None:
        """Called when a payload certainly did not reach `uid`, to restore what it carried."""

    @abc.abstractmethod
    def payload_schema(self, elements: int, dtype: dtype) -> dict[str, TensorSpec]:
        """Names, dtypes and largest sizes of what neighbors send for a model of `elements`."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of what the rule keeps between rounds: tensors, numbers and text, in dicts and lists, nothing else."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"state must be empty for {type(self).__name__}, got {sorted(state)}")
