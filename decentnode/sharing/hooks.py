"""The optional methods of a sharing rule, which do nothing or the default unless a rule overrides them."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from decentnode.graph.base import EQUAL, Graph, RoundView
from decentnode.mixing import mix_into
from decentnode.payload import Payload
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.step_size import Search


class Mixing(Protocol):
    """The exchange of one phase between all nodes."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns W x as a new tensor, or x itself if no node exchanges. x: [N, E], a row per uid; the rows of W are
        the nodes' `view.weights`."""

    def shares(self, x: Tensor) -> Tensor:
        """Returns A x in the same way; the columns of A are the nodes' `view.out_weights`."""


AROUND_STEPS = ("begin", "adjust", "finish")
"""Methods that an overlapped schedule does not call, and that a script only calls for rules with `sequential`."""


def own_methods(rule: type[Hooks], names: Sequence[str]) -> list[str]:
    """Returns which of these methods are implemented outside of this package. Methods of this package's own rules are
    not listed, as those rules work without the call or declare their requirements."""
    package = __name__.partition(".")[0]
    return [name for name in names if getattr(rule, name).__module__.partition(".")[0] != package]


class Hooks:
    """The optional part of `Sharing` (base.py): a rule overrides the methods that it needs; most rules need none."""

    requirements: Requirements

    @abc.abstractmethod
    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """See `Sharing.mix`."""

    # -- before the first round

    @classmethod
    def step_search(cls, config: Any) -> Search | None:  # noqa: ARG003
        """Returns how the default of the key `step_size` is searched (step_size.py); None for rules without this
        key."""
        return None

    def objection(self, graph: Graph, members: Collection[int] | None = None) -> str:  # noqa: ARG002
        """Returns why this rule, with its config, cannot run on a graph that meets its requirements, and what to use
        instead; "" if it can. members: the uids that are alive; None: all. Called before a run starts, which is then
        refused, and when a generation with absent nodes begins, which is then warned of."""
        return ""

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        """Called once, before all other methods. machines: the uids on each machine, ascending."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Called once, before `payload_schema`. shapes: the shapes of the parameters, in their order in the model."""

    def set_samples(self, count: int) -> None:
        """Called once, before the first round. count: the number of the node's training samples; 0 for a server."""

    # -- who exchanges with whom, and when

    def exchange_number(self, round: int) -> int | None:
        """Returns the number of the exchange in `round`, counted from 0, or None for a round without an exchange.

        The graph is asked for its edges by this number, not by the round: a rule that exchanges in every k-th round
        thereby uses all edges of a periodic graph, whatever k is. Every node must compute the same answer.
        """
        return round

    def plan(self, view: RoundView) -> RoundView:
        """Returns the view with the neighbors, sources and weights that this phase of the rule uses.

        All nodes must compute matching results from the view alone: the plans of all phases are made before anything of
        the round is sent.
        """
        return view

    def plan_buffers(self, view: RoundView) -> RoundView:
        """Returns the view for the exchange of the model's float buffers; only called for rules with several phases."""
        return view

    def phase_bytes(self, view: RoundView, elements: int) -> tuple[float, ...] | None:  # noqa: ARG002
        """Returns the bytes of a payload in each phase for a model of `elements` entries, as means over the rounds;
        None if they are the same in all phases and have to be measured. Called after `payload_schema`, for simulated
        networks and for the sizes that a run announces."""
        return None

    def measured_views(self, view: RoundView) -> Sequence[RoundView]:
        """Returns views of rounds whose payloads have the mean size over all rounds together; more than `view` if the
        rule draws sizes. `outgoing` is called with them, for the same purposes as `phase_bytes`."""
        return (view,)

    def wait_seconds(self, phase: int, timeout_seconds: float) -> float:
        """Returns how long the node waits in a phase after the last payload arrived. In a later phase, neighbors may
        themselves still be waiting in earlier ones. timeout_seconds: the time-out of the transport."""
        return timeout_seconds * (1 + phase)

    # -- around the local steps

    def trains(self, view: RoundView) -> bool:  # noqa: ARG002
        """Returns whether the node makes local steps in this round; called right before them."""
        return True

    def is_chosen(self, view: RoundView) -> bool:  # noqa: ARG002
        """Returns whether the node makes local steps in a round if nothing is lost, from the view alone. Only called
        for rules with servers."""
        return True

    def steps_are_for(self, view: RoundView) -> int | None:  # noqa: ARG002
        """Returns the only node that uses the result of this round's local steps and continues without it if it is
        late; None if there are several such nodes, or none."""
        return None

    def leave_out(self, view: RoundView) -> None:
        """Called if the node makes no local steps although `trains` returned True, as the node of `steps_are_for` has
        already continued to a later round."""

    def begin(self, model: Tensor, view: RoundView) -> None:
        """Called before the local steps. model: [P], the result of the last round."""

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:  # noqa: ARG002
        """Returns what the optimizer gets instead of the gradient in a local step. Needs `Requirements.gradient`.

        gradient: [P] mean over the step's samples, clipped; may be modified. Rules that correct the total update of a
        round's local steps, whatever the optimizer is, use `begin` and `adjust` instead.
        """
        return gradient

    def trained(self, samples: int, units: int) -> None:
        """Called after the local steps of a round, before `adjust`. samples: the number of samples trained on. units:
        the number of units over which the loss was averaged: tokens if the task has them, else samples."""

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        """Called after the local steps and before `outgoing`; may change model [P] in place. loss: the round's mean
        loss."""

    def finish(self, model: Tensor, view: RoundView) -> None:
        """Called after the last phase was mixed; may change the whole model [P] in place."""

    def advance(self, model: Tensor, update: Tensor, view: RoundView) -> None:  # noqa: ARG002
        """Adds a local update, computed while the exchange was in flight, to the mixed model in place.

        Only called by overlapped schedules. model, update: [P], or the same slice of both.
        """
        model.add_(update)

    # -- payloads

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        """Returns the name of a payload's tensor -> how many values it contains of each parameter tensor, in the
        model's order.

        Only for tensors that are parts of the model; codecs use it so that no two parameter tensors share a scale.
        Sender and receiver call it, the receiver before the values are decoded. Raises PeerFault as `unpack` does.
        """
        return {}

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        """Checks and decodes a payload from `uid`. Returns the payload that `mix` receives instead.

        All errors that a peer can cause must be detected here (or by `Requirements.scalars`) and not in `mix`, which
        would leave a half-mixed model behind. Raises PeerFault for bytes that cannot be from this rule: the source then
        counts as missing. Any other exception is treated as a PeerFault as well (decoding.py). The values may be
        anything, including NaN and infinity. Not called for elementwise rules.
        """
        return payload

    def undelivered(self, uid: int, payload: Payload) -> None:
        """Called when a payload certainly did not reach `uid`, so that the rule can take back its content."""

    def chosen_entries(self) -> Mapping[str, Tensor]:
        """Returns what the last `outgoing` chose to send, for dumps, if the rule's config has a section `dump`: "sent"
        [K] int64, the positions of the coefficients that were sent, unless all were; with `dump.scores` also "change"
        [C], from which the scores are computed, and "value" [C]."""
        return {}

    def coefficients(self, elements: int) -> int:
        """Returns the number of coefficients, among which the rule chooses, of a model with `elements` elements."""
        return elements

    # -- other ways to mix

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """Like `mix`, but writes the result to `out`, which shares no memory with `model`; `model` is not changed."""
        self.mix(out.copy_(model), received, view)

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:  # noqa: ARG002
        """Returns this node's contribution to a sum over `view.averaging_group`, or None if mixing needs the individual
        payloads.

        The sum is over all members of the group including this node, and is passed to `mix_sum` instead of payloads.
        Either all members return a payload, or all return None.
        """
        return Payload({"x": model}) if self.requirements.linear else None

    def mix_sum(self, out: Tensor, model: Tensor, total: Tensor, view: RoundView) -> None:
        """Like `mix_into`, but from the sum of the group's tensors "x": x <- (w_ii - w) x + w sum, where w is the
        weight of each other member.

        out: where the result is written; may be `model`. total: the sum, not modified. Called only after
        `own_contribution` returned a payload.
        """
        own, other = view.weights[view.uid], max(w for uid, w in view.weights.items() if uid != view.uid)
        if abs(own - other) <= EQUAL:
            torch.mul(total, other, out=out)
        else:
            mix_into(out, model, own - other, [(total, other)])

    # -- nodes in different rounds (node/schedules/asynchronous/)

    ASYNCHRONOUS: ClassVar[bool] = False
    """Whether nodes may be in different rounds, so that a mixed payload may be of any round of its source, and may be
    mixed in several rounds or in none. This must be False for a rule that keeps a state about its neighbors' rounds,
    corrects its local steps by payloads of the same round, or needs all payloads of a round. A subclass must set it
    again."""

    # -- the models of all nodes at once (stacked.py)

    STACKED: ClassVar[bool] = False
    """Whether `begin`, `adjust`, `finish` and `advance` accept the models of all nodes as one tensor [N, P], and
    `mix_stacked` implements the rule's mixing. Such a rule may only use the view's round, phase, learning rate and
    seed, which are the same for all nodes, and no loss. A subclass that adds methods must set it again."""

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:  # noqa: ARG002
        """Returns the mixed models of all nodes, [N, P]. models: [N, P], may be changed. view: the view of one node."""
        return mixing(models)

    # -- generations of members

    def succeed(self, former: Self) -> None:
        """In a new membership generation, take over the state of the previous rule that outlives a generation; here
        nothing. former: the previous rule, which is not used any more; it may have been interrupted in the middle of a
        round. On a node that comes back with a checkpoint, it has the checkpoint's state; without one, it is in its
        initial state."""

    def to_be_summed(self, model: Tensor, view: RoundView) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Returns name -> tensor to be summed over the members of the new generation; here nothing. Names, shapes and
        dtypes must be the same on all members. Called after `succeed`. model: [P], not modified. view: the view of the
        first round."""
        return {}

    def summed(self, totals: Mapping[str, Tensor], view: RoundView) -> None:
        """Receives the sums over all members of the tensors that they returned from `to_be_summed`."""

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state that the rule keeps between rounds: tensors, numbers and text, in dicts and
        lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises ValueError if the state belongs to another rule."""
        if state:
            raise ValueError(f"state must be empty for {type(self).__name__}, got {sorted(state)}")
