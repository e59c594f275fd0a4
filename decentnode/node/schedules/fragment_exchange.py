"""One fragment's exchange: its rule, what is sent and what arrives of it, and its part of the model."""

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
    """Seconds of one round on the training thread."""

    train: float = 0.0
    send: float = 0.0
    """Making the payload, handing it to the transport, and keeping a copy of the sent model where it is needed."""
    wait: float = 0.0
    """Waiting for payloads, and for a slot that neighbors still read: the exposed communication time."""
    mix: float = 0.0
    flight: float = 0.0
    """From handing over the payload until the last one of the neighbors had arrived."""

    @property
    def overlap(self) -> float:
        """The share of `flight` in which the training thread did other work, in [0, 1]; 1 without an exchange."""
        return 1.0 - min(1.0, self.wait / self.flight) if self.flight > 0 else 1.0


@dataclass
class Mixed:
    """The outcome of one exchange, as uids."""

    missing: frozenset[int]
    """Sources of which nothing came, or nothing that could be read."""
    departed: frozenset[int]
    """Those among them that had said that they send no more, or whose payload was refused."""


@dataclass(frozen=True)
class Slice:
    """The payloads that arrived for the part [start, stop) of a fragment, and the view that has their weights."""

    start: int
    stop: int
    received: Mapping[int, Payload]
    view: RoundView
    exchange: Exchange
    total: Tensor | None = None

    def mix(self, sharing: Sharing, model: Tensor, place: Tensor | None = None) -> RoundView:
        """Mix the payloads with `model` [P], in place or into `place` [P]. Returns the view that was used: it has fewer
        sources where payloads changed while they were read."""
        part = slice(self.start, self.stop)
        x = model[part]
        out = x if place is None else place[part]
        if self.total is not None:
            sharing.mix_sum(out, x, self.total, self.view)
        elif self.exchange.in_place:
            return self._mix_apart(sharing, x, out)
        elif place is None:
            sharing.mix(x, self.received, self.view)
        else:
            sharing.mix_into(out, x, self.received, self.view)
        return self.view

    def _mix_apart(self, sharing: Sharing, x: Tensor, out: Tensor) -> RoundView:
        """Mix into other memory than the model's: the payloads lie in the neighbors' shared memory and may change, and
        then the mixing is repeated without those that did."""
        received, view = self.received, self.view
        apart = torch.empty_like(x) if out is x else out
        sharing.mix_into(apart, x, received, view)
        while spoiled := self.exchange.spoiled() & received.keys():
            received, view = {uid: p for uid, p in received.items() if uid not in spoiled}, view.without(spoiled)
            sharing.mix_into(apart, x, received, view)
        if out is x:
            x.copy_(apart)
        return view


class FragmentExchange:
    """A fragment's rule, and its exchange of the phase under way. Used from one thread at a time."""

    view: RoundView
    """Of the phase under way; `enter` sets it."""
    is_due: bool
    """Whether the fragment is exchanged in this round."""

    def __init__(
        self, fragment: Fragment, rule: Sharing, communication: Communication, *, num_fragments: int = 1,
        averaging_groups: bool = False,
    ) -> None:
        """num_fragments: of the run. averaging_groups: as in `Schedule`."""
        self.fragment, self.rule = fragment, rule
        self._communication, self._num_fragments = communication, num_fragments
        self._averaging_groups = averaging_groups
        self._round = -1
        self._views: Sequence[RoundView] = ()
        self._device = torch.device("cpu")
        """Of the model; known once something is sent."""
        self._covers: bool | None = None
        """Whether the fragment is the whole flat model; found out with the first tensor."""
        self._in_turn = False
        """Whether the rule has seen the model at the beginning of the turn."""
        self._losses: list[float] = []
        """Of the turn's rounds."""
        self._outgoing: dict[int, Payload] = {}
        self._refused: frozenset[int] = frozenset()
        self._exchange: Exchange | None = None
        self._record: ExchangeRecord | None = None
        """Of the exchange under way, where it is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of what is kept between rounds, of which a turn may have several; no exchange is under way."""
        return {"rule": self.rule.state_dict(), "in_turn": self._in_turn, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for the state of another rule."""
        self.rule.load_state_dict(state["rule"])
        self._in_turn, self._losses = bool(state["in_turn"]), [float(loss) for loss in state["losses"]]

    def enter(self, round: int, views: Sequence[RoundView]) -> None:
        """A round begins. views: of the phases of the turn that the round belongs to."""
        self._round, self._views, self.view = round, views, views[0]
        self.is_due = self.fragment.is_due(round)

    @property
    def exchange(self) -> Exchange:
        """In flight."""
        assert self._exchange is not None, "nothing was sent yet"
        return self._exchange

    def part(self, flat: Tensor) -> Tensor:
        """Returns the fragment's part of a tensor [P], as a view."""
        if self._covers is None:
            self._covers = self.fragment.elements == flat.numel()
        return flat if self._covers else flat[self.fragment.start : self.fragment.stop]

    # -- local steps

    def begin_turn(self, model: Tensor) -> None:
        """Before the local steps of a round: the rule sees the model [P] as the last exchange left it."""
        if not self._in_turn:
            self.rule.begin(self.part(model), self.view)
            self._in_turn = True

    def adjust(self, model: Tensor, loss: float) -> None:
        """After the local steps of a round: the last of a turn lets the rule correct what all of them did to the model
        [P], in place."""
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
        """After the last phase was mixed: the rule may change its part of the model [P] in place."""
        self.rule.finish(self.part(model), self.view)
        self._in_turn = False

    # -- exchanges

    def send(self, model: Tensor, phase: int) -> Steps[None]:
        """Begin the exchange of a phase with what the rule makes of `model` [P], as steps."""
        view, own = self._views[phase], self.part(model)
        self.view, self._device = view, own.device
        self._outgoing = self.rule.outgoing(own, view)
        if self._outgoing.keys() != {*view.neighbors}:  # what was left out would be waited for until the time-out
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
        """After the round: write what the rule chose to send in it."""
        coefficients = self.rule.coefficients(self.fragment.elements)
        dumps.take(round, self.fragment.index, self.rule.chosen_entries(), coefficients)

    def sends_from(self, model: Tensor) -> bool:
        """Whether the payload is the model [P] where it lies."""
        lies_at = model.data_ptr()
        return any(payload.tensors["x"].data_ptr() == lies_at for payload in self._outgoing.values())

    def slices(self, timeout_seconds: float, times: RoundTimes) -> Iterator[Slice | Wait | None]:
        """Yields slices of the fragment as their payloads arrive, in blocks (`tensors.blocks`), with a view in which
        the weights of missing sources are returned. Blocking between them, or yielding waits as `Exchange.steps` does;
        the time goes to `times.wait`."""
        exchange, view, record = self.exchange, self.view, self._record
        now, missing = view, frozenset[int]()
        waiting, wait = clock.now(), 0.0
        for arrival in exchange.steps(timeout_seconds):
            if not isinstance(arrival, Arrival):
                yield arrival
                continue
            wait += clock.now() - waiting
            if record is not None:
                record.take(arrival.stop, arrival.received, arrival.total)
            if arrival.missing != missing:
                missing, now = arrival.missing, view.without(arrival.missing)
            if arrival.total is not None:
                yield Slice(arrival.start, arrival.stop, {}, now, exchange, arrival.total)
            elif self.rule.requirements.elementwise:
                cuts = list(blocks(arrival.start, arrival.stop, self._device))
                in_place = record is not None and exchange.in_place
                known = exchange.missing if in_place else missing
                flats = {} if len(cuts) == 1 else {uid: each.tensors["x"] for uid, each in arrival.received.items()}
                for a, b in cuts:
                    part = slice(a - arrival.start, b - arrival.start)
                    received = {uid: Payload({"x": flat[part]}) for uid, flat in flats.items()}
                    yield Slice(a, b, received or arrival.received, now, exchange)
                    if record is not None and in_place:  # mixed by now, without those that changed meanwhile
                        record.spoiled(exchange.missing - known, a)
                        known = exchange.missing
            else:
                if arrival.missing and self.rule.requirements.star:
                    # a server takes no step by the answers that a round had when it was broken off
                    self._communication.raise_if_over()
                received = self._unpacked(arrival.received)
                yield Slice(arrival.start, arrival.stop, received, now.without(self._refused), exchange)
            waiting = clock.now()
        times.wait += wait + clock.now() - waiting

    def _unpacked(self, received: Mapping[int, Payload]) -> dict[int, Payload]:
        """Returns the payloads as the rule decoded them. Sources whose bytes it could not read go to `_refused`.

        Raises PeerLost for such a source where the rule cannot go on without a payload.
        """
        found, round = {}, self._round
        for uid, payload in received.items():
            try:
                found[uid] = decode(self.rule, payload, uid, self.view)
            except PeerFault as fault:
                logger.warning("round %d: refused the payload of node %d: %s", round, uid, fault)
                logger.debug("what was raised of it", exc_info=fault)
                self._communication.counters.fault(fault.reason, uid, str(fault))
                self._refused |= {uid}
                if not self.rule.requirements.tolerates_missing:
                    raise PeerLost(f"node {self.view.uid}: node {uid} sent an unreadable payload in round {round}, "
                                   f"and the sharing rule cannot continue without it: {fault}", [uid]) from fault
        return found

    def applied(self, stop: int) -> None:
        """The exchange under way is mixed into the model itself, up to element `stop`."""
        if self._record is not None:
            self._record.stop = stop

    def abandon(self) -> None:
        """The generation is over: the exchange under way will not be mixed any further."""
        record, self._record = self._record, None
        if record is not None:
            record.broken_off()

    def settle(self, times: RoundTimes) -> Mixed:
        """After the phase was mixed: the rule hears what was not delivered."""
        exchange = self.exchange
        times.flight += exchange.seconds
        for uid in exchange.undelivered:
            self.rule.undelivered(uid, self._outgoing[uid])
        self._outgoing = {}
        refused, self._refused = self._refused, frozenset()
        if self._record is not None:
            self._record.over(exchange.missing, exchange.departed, exchange.undelivered, refused)
            self._record = None
        return Mixed(exchange.missing | refused, exchange.departed | refused)


def channel_of(phase: int, fragment: int, num_fragments: int) -> int:
    """Returns the number by which the transport tells the exchanges of one round apart; they are begun in ascending
    order. Those of all fragments in one phase come before those of the next phase, float buffers come last."""
    return phase * num_fragments + fragment
