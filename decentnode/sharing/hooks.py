"""What a sharing rule may add: methods that are called in a round and do nothing, or the usual, unless overridden."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from decentnode.graph.base import EQUAL, RoundView
from decentnode.mixing import mix_into
from decentnode.payload import Payload
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.step_size import Search


class Mixing(Protocol):
    """The exchange of one phase between all nodes."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns W x as a new tensor, or x itself where nobody exchanges. x: [N, E], a row per uid; rows of W are
        `view.weights`."""

    def shares(self, x: Tensor) -> Tensor:
        """Returns A x likewise, with a column of A for every node's `view.out_weights`."""


AROUND_STEPS = ("begin", "adjust", "finish")
"""Methods of a rule that an overlapped schedule does not call, and a script those of a sequential rule alone."""


def own_methods(rule: type[Hooks], names: Sequence[str]) -> list[str]:
    """Returns which of these methods a rule has that neither the defaults are nor a rule of this package's has: its own
    rules do without a call, or say what they need."""
    package = __name__.partition(".")[0]
    return [name for name in names if getattr(rule, name).__module__.partition(".")[0] != package]


class Hooks:
    """The second level of `Sharing` (base.py): a rule overrides what it needs of these, most rules nothing."""

    requirements: Requirements

    @abc.abstractmethod
    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """See `Sharing.mix`."""

    # -- before the first round

    @classmethod
    def step_search(cls, config: Any) -> Search | None:  # noqa: ARG003
        """Returns how a default for the key `step_size` is searched for (step_size.py); None without such a key."""
        return None

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        """Called once, before everything else. machines: the uids on every machine, ascending."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Called once, before `payload_schema`. shapes: of the parameters, in their order in the model."""

    def set_samples(self, count: int) -> None:
        """Called once, before the first round. count: of the node's training samples; 0 for a server."""

    # -- who exchanges with whom, and when

    def exchange_number(self, round: int) -> int | None:
        """Returns the number of the exchange in `round`, counted from 0, or None for a round without an exchange.

        The graph is asked for its edges by this number, not by the round: a rule that exchanges in every k-th round
        thereby uses all edges of a periodic graph, whatever k is. Every node must compute the same answer.
        """
        return round

    def plan(self, view: RoundView) -> RoundView:
        """Returns the view with the neighbors, sources and weights that this phase of the rule uses.

        Every node must compute matching answers from the view alone: the plans of a whole round are made before
        anything of the round is sent.
        """
        return view

    def plan_buffers(self, view: RoundView) -> RoundView:
        """Returns the view for the exchange of the model's float buffers; called for rules of several phases only."""
        return view

    def wait_seconds(self, phase: int, timeout_seconds: float) -> float:
        """Returns how long the node waits in a phase after the last payload that came: in a later phase others may
        themselves still wait in earlier ones. timeout_seconds: of the transport."""
        return timeout_seconds * (1 + phase)

    # -- around the local steps

    def trains(self, view: RoundView) -> bool:  # noqa: ARG002
        """Returns whether the node makes local steps in this round; asked right before them."""
        return True

    def steps_are_for(self, view: RoundView) -> int | None:  # noqa: ARG002
        """Returns the one node that takes what the local steps of this round come to, and goes on without it where it
        is late; None where there are several, or none."""
        return None

    def leave_out(self, view: RoundView) -> None:
        """The node makes no local steps in this round, though `trains` said so: the node of `steps_are_for` has gone on
        to a later one."""

    def begin(self, model: Tensor, view: RoundView) -> None:
        """Called before the local steps. model: [P], as the last round left it."""

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:  # noqa: ARG002
        """Returns what the optimizer gets instead of the gradient in a local step. Needs `Requirements.gradient`.

        gradient: [P] mean over the step's samples, clipped; may be modified. Rules that correct what all local steps of
        a round did together, whatever the optimizer is, use `begin` and `adjust` instead.
        """
        return gradient

    def trained(self, samples: int, units: int) -> None:
        """Called after the local steps of a round, before `adjust`. samples: how many the node has trained on. units:
        the parts that the mean loss was over: tokens, where the task has such, else samples."""

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        """Called after the local steps and before `outgoing`; changes model [P] in place. loss: the round's mean."""

    def finish(self, model: Tensor, view: RoundView) -> None:
        """Called after the last phase was mixed; changes the whole model [P] in place."""

    def advance(self, model: Tensor, update: Tensor, view: RoundView) -> None:  # noqa: ARG002
        """Adds a local update, computed while the exchange was under way, to the mixed model in place.

        Called by overlapped schedules only. model, update: [P], or the same slice of both.
        """
        model.add_(update)

    # -- payloads

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        """Returns how many values of each parameter tensor, in the model's order, a payload's tensor has, by its name.

        For tensors that are parts of the model, so that a codec gives no two parameter tensors a scale in common. Both
        ends call it, receivers before the values are decoded. Raises PeerFault as `unpack` does.
        """
        return {}

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        """Checks and decodes a payload from `uid`, and returns what `mix` receives in its place.

        Everything that a peer may have written wrongly is found here (or by `Requirements.scalars`), and not in `mix`,
        which would leave a half-mixed model behind. Raises PeerFault for bytes that no such rule made: the source then
        counts as missing. Every other exception is taken as a PeerFault, too (decoding.py). The values themselves may
        be anything, also NaN and infinity. Not called for elementwise rules.
        """
        return payload

    def undelivered(self, uid: int, payload: Payload) -> None:
        """Called when a payload certainly did not reach `uid`: the rule can take back what it carried."""

    def chosen_entries(self) -> Mapping[str, Tensor]:
        """Returns what the last `outgoing` chose, for dumps, where the rule's config has a section `dump`: "sent" [K]
        int64, the positions of coefficients that were sent, unless all were; with `dump.scores` "change" [C], what
        their scores are made of, and "value" [C]."""
        return {}

    def coefficients(self, elements: int) -> int:
        """Returns among how many coefficients of a model with so many elements a rule chooses."""
        return elements

    # -- other ways to mix

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """As `mix`, but writes the result to `out`, which shares no memory with `model`; `model` stays as it is."""
        self.mix(out.copy_(model), received, view)

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:  # noqa: ARG002
        """Returns what this node adds to a sum over `view.averaging_group`, or None where mixing needs every payload.

        The sum is that of all members of the group, this node included, and `mix_sum` gets it instead of payloads.
        Either all members return a payload, or all return None.
        """
        return Payload({"x": model}) if self.requirements.linear else None

    def mix_sum(self, out: Tensor, model: Tensor, total: Tensor, view: RoundView) -> None:
        """As `mix_into`, from the sum of the group's tensors "x": x <- (w_ii - w) x + w sum, w the others' weight.

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
    """Whether nodes may be in different rounds: what is mixed may then be of any round of its source, and be mixed in
    several rounds or in none. A rule cannot that keeps a state of its neighbors' rounds, corrects what its local steps
    did by what came in the same round, or needs all payloads of a round. A subclass says it again."""

    # -- the models of all nodes at once (stacked.py)

    STACKED: ClassVar[bool] = False
    """Whether `begin`, `adjust`, `finish` and `advance` may get the models of all nodes as one tensor [N, P], and
    `mix_stacked` is the mixing of this rule. Of the view such a rule uses the round, the phase, the learning rate and
    the seed alone, which all nodes have in common, and no loss. A subclass that adds methods says it again."""

    def mix_stacked(self, models: Tensor, mixing: Mixing, view: RoundView) -> Tensor:  # noqa: ARG002
        """Returns the mixed models of all nodes, [N, P] as `models`, which may be changed. view: that of one node."""
        return mixing(models)

    # -- generations of members

    def succeed(self, former: Self) -> None:
        """In a new generation of members: take from the rule before, which is not used any more, what outlives a
        generation; here nothing. former: as it was left, maybe in the middle of a round, or as a checkpoint has it on
        a node that comes back with one. A node that comes back without has a former rule that has seen no round."""

    def to_be_summed(self, model: Tensor, view: RoundView) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Returns, after `succeed`, what the nodes of the new generation are to add up, by name: the same names, shapes
        and dtypes on all of its members; here nothing. model: [P], not modified. view: of the first round."""
        return {}

    def summed(self, totals: Mapping[str, Tensor], view: RoundView) -> None:
        """Takes the sums over all members of what they returned in `to_be_summed`."""

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that the rule keeps between rounds: tensors, numbers and text, in dicts and lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for the state of another rule."""
        if state:
            raise ValueError(f"state must be empty for {type(self).__name__}, got {sorted(state)}")
