"""Exchanges one fragment of the model: what its rule sends, what arrives, and how that is mixed into its part of the
model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Arrival, AveragingGroup, Communication, Exchange
from decentnode.communication.run_state import Steps, Wait
from decentnode.errors import PeerFault, PeerLost, UsageError
from decentnode.graph.base import RoundView
from decentnode.metrics.history import ExchangeRecord
from decentnode.node.schedules.dumps import Dumps
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.decoding import decode
from decentnode.sharing.fragments import Fragment
from decentnode.tensors import blocks

logger = logging.getLogger(__name__)


@dataclass
class RoundTimes:
    """How the training thread spent one round, in seconds."""

    train: float = 0.0
    send: float = 0.0
    """Making the payload, handing it to the transport, and keeping a copy of the sent model where it is needed."""
    wait: float = 0.0
    """Waiting for payloads, and for a slot that neighbors are still reading: the exposed communication time."""
    mix: float = 0.0
    flight: float = 0.0
    """From handing the payload to the transport until the last neighbor's payload had arrived."""

    @property
    def overlap(self) -> float:
        """The fraction of `flight` in which the training thread did other work, in [0, 1]; 1 without an exchange."""
        return 1.0 - min(1.0, self.wait / self.flight) if self.flight > 0 else 1.0


@dataclass
class ExchangeOutcome:
    """The outcome of one exchange: which sources are missing, as uids."""

    missing: frozenset[int]
    """The sources from which nothing arrived, or nothing that could be decoded."""
    departed: frozenset[int]
    """The missing sources that had announced to send nothing more, or whose payload was refused."""


@dataclass(frozen=True)
class Slice:
    """The payloads that arrived for the elements [start, stop) of a fragment, and the view with their mixing
    weights."""

    start: int
    stop: int
    received: Mapping[int, Payload]
    view: RoundView
    exchange: Exchange
    total: Tensor | None = None

    def mix(self, sharing: Sharing, model: Tensor, slot: Tensor | None = None) -> RoundView:
        """Mix the payloads with `model` [P], in place or into `slot` [P]. Returns the view that was used, which lacks
        sources whose payloads were overwritten while they were read."""
        part = slice(self.start, self.stop)
        x = model[part]
        out = x if slot is None else slot[part]
        if self.total is not None:
            sharing.mix_sum(out, x, self.total, self.view)
        elif self.exchange.in_place:
            return self._mix_in_scratch(sharing, x, out)
        elif slot is None:
            sharing.mix(x, self.received, self.view)
        else:
            sharing.mix_into(out, x, self.received, self.view)
        return self.view

    def _mix_in_scratch(self, sharing: Sharing, x: Tensor, out: Tensor) -> RoundView:
        """Mix into memory other than the model's: the payloads are in the neighbors' shared memory and may be
        overwritten while they are read, in which case the slice is mixed again without those that were."""
        received, view = self.received, self.view
        scratch = torch.empty_like(x) if out is x else out
        sharing.mix_into(scratch, x, received, view)
        while spoiled := self.exchange.spoiled() & received.keys():
            received, view = {uid: p for uid, p in received.items() if uid not in spoiled}, view.without(spoiled)
            sharing.mix_into(scratch, x, received, view)
        if out is x:
            x.copy_(scratch)
        return view


class FragmentExchange:
    """A fragment's sharing rule and its exchange in the current phase. Used from one thread at a time."""

    view: RoundView
    """The view of the current phase; first set by `enter`."""
    is_due: bool
    """Whether the fragment is exchanged in the current round."""

    def __init__(
        self, fragment: Fragment, rule: Sharing, communication: Communication, *, num_fragments: int = 1,
        averaging_groups: bool = False,
    ) -> None:
        """num_fragments: the number of fragments of the model. averaging_groups: as for `Schedule`."""
        self.fragment, self.rule = fragment, rule
        self._communication, self._num_fragments = communication, num_fragments
        self._averaging_groups = averaging_groups
        self._round = -1
        self._views: Sequence[RoundView] = ()
        self._device = torch.device("cpu")
        """The model's device; set when something is sent."""
        self._is_whole_model: bool | None = None
        """Whether the fragment is the whole flat model; set with the first tensor."""
        self._in_turn = False
        """Whether the rule's `begin` was called for the current turn."""
        self._losses: list[float] = []
        """The losses of the turn's rounds so far."""
        self._outgoing: dict[int, Payload] = {}
        self._refused: frozenset[int] = frozenset()
        self._exchange: Exchange | None = None
        self._record: ExchangeRecord | None = None
        """The record of the exchange in flight, if the node keeps a history."""

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the state that is kept between rounds; a turn may have several rounds. No exchange may be
        in flight."""
        return {"rule": self.rule.state_dict(), "in_turn": self._in_turn, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises ValueError if the state belongs to another rule."""
        self.rule.load_state_dict(state["rule"])
        self._in_turn, self._losses = bool(state["in_turn"]), [float(loss) for loss in state["losses"]]

    def enter(self, round: int, views: Sequence[RoundView]) -> None:
        """Begin a round. views: the views of the phases of the turn that the round belongs to."""
        self._round, self._views, self.view = round, views, views[0]
        self.is_due = self.fragment.is_due(round)

    @property
    def exchange(self) -> Exchange:
        """The exchange in flight."""
        assert self._exchange is not None, "nothing was sent yet"
        return self._exchange

    def part(self, flat: Tensor) -> Tensor:
        """Returns the fragment's part of a tensor [P], as a view."""
        if self._is_whole_model is None:
            self._is_whole_model = self.fragment.elements == flat.numel()
        return flat if self._is_whole_model else flat[self.fragment.start : self.fragment.stop]

    # -- local steps

    def begin_turn(self, model: Tensor) -> None:
        """Before a turn's first local steps, give the rule the model [P] as the previous exchange left it."""
        if not self._in_turn:
            self.rule.begin(self.part(model), self.view)
            self._in_turn = True

    def adjust(self, model: Tensor, loss: float) -> None:
        """After the local steps of a round, record their loss. In the last round of a turn, let the rule correct what
        all local steps of the turn did to the model [P], in place."""
        self._losses.append(loss)
        if self.is_due:
            self.rule.adjust(self.part(model), self.view, math.fsum(self._losses) / len(self._losses))
            self._losses = []

    def direct(self, gradient: Tensor) -> None:
        """Let the rule replace its part of a local step's gradient [P], in place."""
        own = self.part(gradient)
        direction = self.rule.direction(own, self.view)
        if direction is not own:
            own.copy_(direction)

    def finish_turn(self, model: Tensor) -> None:
        """After the last phase was mixed, let the rule change its part of the model [P] in place."""
        self.rule.finish(self.part(model), self.view)
        self._in_turn = False

    # -- exchanges

    def send(self, model: Tensor, phase: int) -> Steps[None]:
        """Begin the exchange of a phase with the payloads that the rule makes from `model` [P], as steps."""
        view, own = self._views[phase], self.part(model)
        self.view, self._device = view, own.device
        self._outgoing = self.rule.outgoing(own, view)
        # the neighbor would wait until the time-out for a payload that was left out
        if self._outgoing.keys() != {*view.neighbors}:
            raise UsageError(f"{type(self.rule).__name__}.outgoing must return a payload for each of the neighbors "
                             f"{[*view.neighbors]}, got those for {sorted(self._outgoing)} "
                             f"(round {view.round})")  # fmt: skip
        group = None
        if self._averaging_groups and view.averaging and not self.rule.requirements.scalars:
            group = AveragingGroup(view.averaging, self.rule.own_contribution(own, view))
        channel = channel_of(phase, self.fragment.index, self._num_fragments)
        history = self._communication.history
        if history is not None:
            self._record = history.sent(self._round, channel, self._outgoing)
        self._exchange = yield from self._communication.exchange_steps(
            self._round, self._outgoing, view.sources, channel, group
        )

    def dump(self, round: int, dumps: Dumps) -> None:
        """After the round, write which coefficients the rule chose to send."""
        coefficients = self.rule.coefficients(self.fragment.elements)
        dumps.take(round, self.fragment.index, self.rule.chosen_entries(), coefficients)

    def sends_memory_of(self, model: Tensor) -> bool:
        """Returns whether a payload is the memory of `model` [P] itself, not a copy."""
        address = model.data_ptr()
        return any(payload.tensors["x"].data_ptr() == address for payload in self._outgoing.values())

    def slices(self, timeout_seconds: float, times: RoundTimes) -> Iterator[Slice | Wait | None]:
        """Yields slices of the fragment as their payloads arrive, in blocks (`tensors.blocks`), with a view in which
        the weights of missing sources are given to the node itself. Between slices it blocks, or yields waits as
        `Exchange.steps` does; the time is added to `times.wait`."""
        exchange, view, record = self.exchange, self.view, self._record
        current_view, missing = view, frozenset[int]()
        waiting, wait = clock.now(), 0.0
        for arrival in exchange.steps(timeout_seconds):
            if not isinstance(arrival, Arrival):
                yield arrival
                continue
            wait += clock.now() - waiting
            if record is not None:
                record.take(arrival.stop, arrival.received, arrival.total)
            if arrival.missing != missing:
                missing, current_view = arrival.missing, view.without(arrival.missing)
            if arrival.total is not None:
                yield Slice(arrival.start, arrival.stop, {}, current_view, exchange, arrival.total)
            elif self.rule.requirements.elementwise:
                bounds = list(blocks(arrival.start, arrival.stop, self._device))
                in_place = record is not None and exchange.in_place
                already_missing = exchange.missing if in_place else missing
                flats = {} if len(bounds) == 1 else {uid: each.tensors["x"] for uid, each in arrival.received.items()}
                for a, b in bounds:
                    part = slice(a - arrival.start, b - arrival.start)
                    received = {uid: Payload({"x": flat[part]}) for uid, flat in flats.items()}
                    yield Slice(a, b, received or arrival.received, current_view, exchange)
                    # the slice is mixed by now, without the payloads that were overwritten meanwhile
                    if record is not None and in_place:
                        record.spoiled(exchange.missing - already_missing, a)
                        already_missing = exchange.missing
            else:
                if arrival.missing and self.rule.requirements.star:
                    # a server must not take a step with the partial answers of a round that was interrupted
                    self._communication.raise_if_over()
                received = self._decode_all(arrival.received)
                yield Slice(arrival.start, arrival.stop, received, current_view.without(self._refused), exchange)
            waiting = clock.now()
        times.wait += wait + clock.now() - waiting

    def _decode_all(self, received: Mapping[int, Payload]) -> dict[int, Payload]:
        """Returns the payloads as the rule decoded them. Sources whose payloads cannot be decoded are added to
        `_refused`.

        Raises PeerLost for such a source if the rule cannot continue without a payload.
        """
        decoded, round = {}, self._round
        for uid, payload in received.items():
            try:
                decoded[uid] = decode(self.rule, payload, uid, self.view)
            except PeerFault as fault:
                logger.warning("round %d: refused the payload of node %d: %s", round, uid, fault)
                logger.debug("what was raised of it", exc_info=fault)
                self._communication.counters.fault(fault.reason, uid, str(fault))
                self._refused |= {uid}
                if not self.rule.requirements.tolerates_missing:
                    raise PeerLost(f"node {self.view.uid}: node {uid} sent an unreadable payload in round {round}, "
                                   f"and the sharing rule cannot continue without it: {fault}", [uid]) from fault
        return decoded

    def mark_mixed(self, stop: int) -> None:
        """Note that the exchange in flight has been mixed into the model itself up to element `stop`."""
        if self._record is not None:
            self._record.stop = stop

    def abandon(self) -> None:
        """Abandon the exchange in flight, as the generation is over: nothing more of it is mixed."""
        record, self._record = self._record, None
        if record is not None:
            record.broken_off()

    def settle(self, times: RoundTimes) -> ExchangeOutcome:
        """End the exchange after its phase was mixed, and tell the rule which payloads were not delivered. Returns
        which sources are missing."""
        exchange = self.exchange
        times.flight += exchange.seconds
        for uid in exchange.undelivered:
            self.rule.undelivered(uid, self._outgoing[uid])
        self._outgoing = {}
        refused, self._refused = self._refused, frozenset()
        if self._record is not None:
            self._record.over(exchange.missing, exchange.departed, exchange.undelivered, refused)
            self._record = None
        return ExchangeOutcome(exchange.missing | refused, exchange.departed | refused)


def channel_of(phase: int, fragment: int, num_fragments: int) -> int:
    """Returns the channel number by which the transport distinguishes the exchanges of one round. Exchanges begin in
    ascending order: all fragments of one phase, then those of the next phase, and float buffers last."""
    return phase * num_fragments + fragment
