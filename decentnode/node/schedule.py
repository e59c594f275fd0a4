"""The order of local steps, exchange and mixing in a round. Nothing else in the project decides it.

A round of a rule with several phases is one exchange after the other: `begin` sends the first, `mix` and `send` go from
each to the next, `finish` mixes the last. For a rule with one phase only `begin` and `finish` are called.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import AveragingGroup, Communication, Exchange
from decentnode.errors import PeerFault, PeerLost
from decentnode.graph.base import RoundView
from decentnode.node.background import BackgroundMixer, supported, worthwhile
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.decoding import decode
from decentnode.tensors import FlatModel, blocks
from decentnode.training.base import Training, Update

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
    """The outcome of one phase's exchange, as uids."""

    missing: frozenset[int]
    """Sources of which nothing came, or nothing that could be read."""
    departed: frozenset[int]
    """Those among them that had said that they send no more, or whose payload was refused."""
    undelivered: frozenset[int]
    """Neighbors that did not take this node's payload."""


@dataclass(frozen=True)
class _Slice:
    """The payloads that arrived for the part [start, stop) of the model, and the view that has their weights."""

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


class Schedule(abc.ABC):
    """One round, divided where the neighbors must act before it can go on. `view` is that of the phase under way."""

    def __init__(
        self, training: Training, sharing: Sharing, communication: Communication, *, averaging_groups: bool = False,
        in_background: bool | None = None,
    ) -> None:
        """averaging_groups: whether the transport may average a whole group of nodes at once. A member that is missing
        then makes all others of its group missing, too.

        in_background: `mix_in_background` of the config; None: where it is worthwhile.
        """
        self.averaging_groups = averaging_groups
        self.in_background = in_background
        self.training = training
        self.sharing = sharing
        self.communication = communication
        self.times = RoundTimes()
        self._outgoing: dict[int, Payload] = {}
        self._refused: frozenset[int] = frozenset()
        self._mixing: BackgroundMixer | None = None

    @property
    def model(self) -> FlatModel:
        return self.training.model

    @abc.abstractmethod
    def begin(self, view: RoundView, check: Callable[[], None]) -> Update:
        """Make the local steps and begin the first phase's exchange. `check` is called after the local steps, before
        their result is sent."""

    @abc.abstractmethod
    def mix(self, view: RoundView) -> Mixed:
        """Wait for the exchange of a phase that is not the last, and mix it into the model. Blocking."""

    def send(self, view: RoundView) -> None:
        """Begin the exchange of a later phase, with the model as `mix` left it."""
        self._exchange = self._send(self.model.parameters, view)

    @abc.abstractmethod
    def finish(self, view: RoundView) -> Mixed:
        """Wait for the last phase's exchange, mix it into the model, and end the round. Blocking."""

    def abandon(self) -> None:
        """End mixing in the background, after the communication said that the generation or the run is over. Blocking;
        the communication has ended the waits of the other thread by then."""
        mixing, self._mixing = self._mixing, None
        if mixing is not None:
            self.communication.exposed_since = clock.now()
            with contextlib.suppress(Exception):
                mixing.join()

    def timeout_seconds(self, phase: int) -> float:
        """Returns the longest wait for a neighbor in a phase: in a later phase it may itself still wait in earlier
        ones."""
        return self.communication.config.timeout_seconds * (1 + phase)

    def _send(self, model: Tensor, view: RoundView) -> Exchange:
        started = clock.now()
        self._outgoing = self.sharing.outgoing(model, view)
        group = None
        if self.averaging_groups and view.averaging and not self.sharing.requirements.scalars:
            group = AveragingGroup(view.averaging, self.sharing.own_contribution(model, view))
        exchange = self.communication.exchange(view.round, self._outgoing, view.sources, view.phase, group)
        self.times.send += clock.now() - started
        return exchange

    def _train(self, view: RoundView) -> Update:
        started = clock.now()
        rule = self.sharing
        update = self.training.local_update(
            view.round, (lambda gradient: rule.direction(gradient, view)) if rule.requirements.gradient else None
        )
        self.times.train += clock.now() - started
        return update

    def _slices(self, exchange: Exchange, view: RoundView, times: RoundTimes) -> Iterator[_Slice]:
        """Yields slices of the model as their payloads arrive, in blocks that fit a core's cache, with a view in which
        the weights of missing sources are returned. Blocking between them; the time goes to `times.wait`."""
        now, missing = view, frozenset[int]()
        waiting, wait = clock.now(), 0.0
        for arrival in exchange.arrivals(self.timeout_seconds(view.phase)):
            wait += clock.now() - waiting
            if arrival.missing != missing:
                missing, now = arrival.missing, view.without(arrival.missing)
            if arrival.total is not None:
                yield _Slice(arrival.start, arrival.stop, {}, now, exchange, arrival.total)
            elif self.sharing.requirements.elementwise:
                cuts = list(blocks(arrival.start, arrival.stop))
                if len(cuts) == 1:
                    yield _Slice(arrival.start, arrival.stop, arrival.received, now, exchange)
                else:
                    flats = {uid: payload.tensors["x"] for uid, payload in arrival.received.items()}
                    for a, b in cuts:
                        part = slice(a - arrival.start, b - arrival.start)
                        received = {uid: Payload({"x": flat[part]}) for uid, flat in flats.items()}
                        yield _Slice(a, b, received, now, exchange)
            else:
                received = self._unpacked(arrival.received, view)
                yield _Slice(arrival.start, arrival.stop, received, now.without(self._refused), exchange)
            waiting = clock.now()
        times.wait += wait + clock.now() - waiting

    def _unpacked(self, received: Mapping[int, Payload], view: RoundView) -> dict[int, Payload]:
        """Returns the payloads as the rule decoded them. Sources whose bytes it could not read go to `_refused`.

        Raises PeerLost for such a source where the rule cannot go on without a payload.
        """
        found = {}
        for uid, payload in received.items():
            try:
                found[uid] = decode(self.sharing, payload, uid, view)
            except PeerFault as fault:
                logger.warning("round %d: refused the payload of node %d: %s", view.round, uid, fault)
                logger.debug("what was raised of it", exc_info=fault)
                self.communication.counters.fault(fault.reason, uid, str(fault))
                self._refused |= {uid}
                if not self.sharing.requirements.tolerates_missing:
                    raise PeerLost(f"node {view.uid}: node {uid} sent in round {view.round} what cannot be read, and "
                                   f"the sharing rule cannot go on without it: {fault}", [uid]) from fault
        return found

    def _place(self, model: Tensor) -> Tensor | None:
        """Returns a slot of the publish buffer that the mixed model may be written to, so that the transport need not
        copy it next time; None where the payload is not the model itself. Blocking until neighbors have read the
        slot."""
        if not self.sharing.requirements.elementwise or model.device.type != "cpu":
            return None
        if not any(payload.tensors["x"].data_ptr() == model.data_ptr() for payload in self._outgoing.values()):
            return None
        started = clock.now()
        place = self.communication.acquire_slot(model, self.communication.config.timeout_seconds)
        self.times.wait += clock.now() - started
        return place

    def _mix_in_place(self, view: RoundView) -> None:
        """Mix the arrivals of the exchange in flight into the model, which may move to another slot. Blocking."""
        started, waited = clock.now(), self.times.wait
        model, place, chosen = self.model.parameters, None, False
        with torch.no_grad():
            for each in self._slices(self._exchange, view, self.times):
                if not chosen:  # a neighbor that sent this round's model has usually read the last: its slot is free
                    place, chosen = self._place(model), True
                each.mix(self.sharing, model, place)
        if place is not None:
            self.model.rebind(place)
        self.times.mix += clock.now() - started - (self.times.wait - waited)

    def _settle(self, exchange: Exchange) -> Mixed:
        self.times.flight += exchange.seconds
        for uid in exchange.undelivered:
            self.sharing.undelivered(uid, self._outgoing[uid])
        self._outgoing = {}
        refused, self._refused = self._refused, frozenset()
        return Mixed(exchange.missing | refused, exchange.departed | refused, exchange.undelivered)


class Sequential(Schedule):
    """Local steps, then exchange, then mix: x <- W (x + delta)."""

    def begin(self, view: RoundView, check: Callable[[], None]) -> Update:
        self.times = RoundTimes()
        with torch.no_grad():
            self.sharing.begin(self.model.parameters, view)
        update = self._train(view)
        with torch.no_grad():
            self.sharing.adjust(self.model.parameters, view, update.loss)
        check()
        self._exchange = self._send(self.model.parameters, view)
        return update

    def mix(self, view: RoundView) -> Mixed:
        self._mix_in_place(view)
        return self._settle(self._exchange)

    def finish(self, view: RoundView) -> Mixed:
        self._mix_in_place(view)
        started = clock.now()
        with torch.no_grad():
            self.sharing.finish(self.model.parameters, view)
        self.times.mix += clock.now() - started
        return self._settle(self._exchange)


class Overlapped(Schedule):
    """The exchange of x(r) flies during the local steps from x(r); then x <- W x + delta
    (docs/explanation/round.rst, "Overlapped").

    Of several phases the first flies during the local steps, the others follow it. W x is computed in the background of
    the local steps where that is worthwhile (background.py), for rules that do not change the update; only delta is
    added afterwards then.
    """

    _delta: Tensor | None = None
    """[P] the local update, kept while phases are mixed one after the other."""
    _mixed: Tensor | None = None
    """[P] W x, where it is computed in the background."""
    _spans: list[tuple[int, int, RoundView]]
    """(start, stop, view) of each part of `_mixed`."""

    def begin(self, view: RoundView, check: Callable[[], None]) -> Update:
        self.times = RoundTimes()
        self._before = self.model.parameters
        if not self.sharing.requirements.elementwise:  # such a rule may keep views of what it sends until it mixes
            self._before = self._before.clone()
        self._exchange = self._send(self._before, view)
        place, started = self._place(self._before), clock.now()
        if place is not None:
            self.model.rebind(place.copy_(self._before))
        elif self.sharing.requirements.elementwise:
            self._before = self._before.clone()
        self.times.send += clock.now() - started
        if self._mixes_in_background:
            self._begin_mixing(view)
        update = self._train(view)
        check()
        return update

    @functools.cached_property
    def _mixes_in_background(self) -> bool:
        """Decided in the first round: nothing that it depends on changes within a generation."""
        needs, model = self.sharing.requirements, self.model.parameters
        if needs.phases > 1 or needs.gradient or not supported(self.communication, model):
            return False
        return worthwhile(self.communication, model) if self.in_background is None else self.in_background

    def _begin_mixing(self, view: RoundView) -> None:
        """Begin to mix in the background. Until `join`, only the other thread uses the exchange, the rule and
        `_mixed`."""
        if self._mixed is None:
            self._mixed = torch.empty_like(self._before)
        self._spans = []
        exchange, before, mixed, spans = self._exchange, self._before, self._mixed, self._spans

        def mix() -> None:
            with torch.no_grad():
                for each in self._slices(exchange, view, RoundTimes()):
                    seen = each.mix(self.sharing, before, mixed)
                    spans.append((each.start, each.stop, seen))

        self.communication.exposed_since = math.inf
        self._mixing = BackgroundMixer(mix)

    def mix(self, view: RoundView) -> Mixed:
        if self._delta is None:
            self._delta = self.model.parameters - self._before
            self.model.parameters.copy_(self._before)
        self._mix_in_place(view)
        return self._settle(self._exchange)

    def finish(self, view: RoundView) -> Mixed:
        if self._mixing is not None:
            self._advance_mixed(self._mixing)
            return self._settle(self._exchange)
        if self._delta is None:
            self._mix_and_advance(view)
            return self._settle(self._exchange)
        self._mix_in_place(view)
        mixed = self._settle(self._exchange)
        with torch.no_grad():
            self.sharing.advance(self.model.parameters, self._delta, view.without(mixed.missing))
        self._delta = None
        return mixed

    def _advance_mixed(self, mixing: BackgroundMixer) -> None:
        """Wait until all that arrived is mixed, then make the model W x + delta. Blocking."""
        started = clock.now()
        self.communication.exposed_since = clock.now()
        mixing.join()
        self._mixing = None
        self.times.wait += (joined := clock.now()) - started
        model, before, mixed = self.model.parameters, self._before, self._mixed
        assert mixed is not None
        with torch.no_grad():
            for start, stop, view in self._spans:
                for a, b in blocks(start, stop) if self.sharing.requirements.elementwise else [(start, stop)]:
                    delta = model[a:b] - before[a:b]
                    self.sharing.advance(model[a:b].copy_(mixed[a:b]), delta, view)
        self.times.mix += clock.now() - joined

    def _mix_and_advance(self, view: RoundView) -> None:
        """Mix and add the update slice by slice, so that neither the mixed model nor the update needs memory for all
        parameters. Blocking."""
        started, waited = clock.now(), self.times.wait
        model, before = self.model.parameters, self._before
        with torch.no_grad():
            for each in self._slices(self._exchange, view, self.times):
                x, was = model[each.start : each.stop], before[each.start : each.stop]
                delta = x - was
                seen = each.mix(self.sharing, before, model)
                self.sharing.advance(x, delta, seen)
        self.times.mix += clock.now() - started - (self.times.wait - waited)


SCHEDULES: dict[str, type[Schedule]] = {"sequential": Sequential, "overlapped": Overlapped}
