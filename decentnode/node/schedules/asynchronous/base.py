"""The base class of asynchronous schedules, in which no node waits for another one's round."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from decentnode import clock
from decentnode.communication.parts import Collected, Schema
from decentnode.communication.run_state import Steps, at_once
from decentnode.graph.base import RoundView
from decentnode.node.schedules.asynchronous.config import AsynchronousConfig
from decentnode.node.schedules.asynchronous.copies import Copies, Copy
from decentnode.node.schedules.fragment_exchange import ExchangeOutcome, FragmentExchange
from decentnode.node.schedules.schedule import Schedule
from decentnode.payload import Payload
from decentnode.sharing.decoding import MALFORMED


class Asynchronous(Schedule):
    """Makes local steps, mixes the payloads that have arrived, and continues without waiting. The model is one
    fragment, and the rule has one phase."""

    asynchronous = True

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._buffers = Copies(age_weights=self.config.age_weights)
        """The newest float buffers of each neighbor."""
        self._round = -1
        """The current round, or between rounds the last one; -1 before the first."""
        self._held_back: dict[int, list[Collected]] = {}
        """channel -> payloads of nodes that have made a checkpoint that this node has not made yet; held until the next
        round."""
        self._last_arrivals: dict[int, float] = {}
        """source -> `clock.now()` when its last payload arrived in this membership generation, or if none has arrived,
        at the end of the first round in which it was a source."""

    @property
    def config(self) -> AsynchronousConfig:
        return self.asynchronous_config or AsynchronousConfig.model_validate({})

    @property
    def fragment(self) -> FragmentExchange:
        return self.fragments[0]

    @property
    def view(self) -> RoundView:
        """The view of the current round."""
        return self.fragment.view

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        self._round, model = round, self.model.parameters
        with torch.no_grad():
            self.fragment.begin_turn(model)
        yield from self._train(round)
        with torch.no_grad():
            self.fragment.adjust(model, self.update.loss)
        check()
        yield from self._process_arrivals()
        self._publish_round(round)

    def _process_arrivals(self) -> Steps[None]:
        """Process payloads that arrived during the local steps, before this node publishes, as steps. Here nothing."""
        return at_once(None)

    def _publish_round(self, round: int) -> None:
        """Publish to the neighbors after the local steps. Not blocking. Here nothing."""

    def mix(self) -> Steps[list[ExchangeOutcome]]:
        raise NotImplementedError("an asynchronous schedule has one phase")

    def finish(self) -> Steps[list[ExchangeOutcome]]:
        yield from self._mix_round(self.view.round)
        now = clock.now()
        self._last_arrivals = dict.fromkeys(self.view.sources, now) | self._last_arrivals
        self.communication.ping_silent(self._last_arrivals)
        with torch.no_grad():
            self.fragment.finish_turn(self.model.parameters)
        none_missing = frozenset[int]()
        return [ExchangeOutcome(none_missing, none_missing)]

    @abc.abstractmethod
    def _mix_round(self, round: int) -> Steps[None]:
        """Mix the payloads that have arrived, as steps, and add the seconds to `times`."""

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int = 0) -> frozenset[int]:
        """Publish payloads as `Communication.publish` does, marked with the number of this node's last checkpoint, and
        add the seconds to `times`. Returns the neighbors to which nothing was sent."""
        if self.communication.history is not None:
            self.communication.history.published(round, channel, outgoing)
        if self.cuts.number:
            # a payload shared by several neighbors stays one object
            marked = {id(each): self.cuts.mark(each) for each in outgoing.values()}
            outgoing = {uid: marked[id(each)] for uid, each in outgoing.items()}
        started = clock.now()
        refused = self.communication.publish(round, outgoing, channel)
        self.times.send += clock.now() - started
        return refused

    def collect(
        self, channel: int = 0, sources: Collection[int] = (), seconds: float = 0.0, count: int = 0
    ) -> Steps[list[Collected]]:
        """Take payloads out of the mailbox as `Communication.collect_steps` does, and add the seconds to `times`.
        Payloads that were published after a checkpoint that this node has not made yet are held back until it has."""
        started, held_back = clock.now(), self._held_back.pop(channel, [])
        found = yield from self.communication.collect_steps(
            channel, count=max(0, count - len(held_back)), sources=sources, seconds=seconds
        )
        now = clock.now()
        self.times.wait += now - started
        self._last_arrivals |= dict.fromkeys((each.source for each in found), now)
        return [unmarked for each in [*held_back, *found] for unmarked in self._unmark_or_hold(each, channel)]

    def _unmark_or_hold(self, each: Collected, channel: int) -> Iterable[Collected]:
        """Yields the payload without the checkpoint number that marks it, unless it is held back or malformed."""
        cuts = self.cuts
        try:
            unmarked, number = cuts.unmark(each)
        except ValueError as error:
            self.communication.counters.fault(MALFORMED, each.source, f"{error} from {each.source}")
            return
        if cuts.holds_back and number > cuts.number:
            cuts.highest_known = max(cuts.highest_known, number)
            if cuts.trusts_numbers:
                self._held_back.setdefault(channel, []).append(each)
                return
        yield unmarked

    def record_mixed(self, copies: Iterable[Copy], channel: int = 0) -> None:
        """Note in the node's history, if it keeps one, that these copies are about to be mixed."""
        history, round = self.communication.history, self._round
        if history is not None:
            records = ((each.source, each.round, round - each.arrived_in, each.as_published) for each in copies)
            history.mixed_copies(round, channel, records)

    def record_new_payloads(self, found: Iterable[Collected], channel: int = 0) -> None:
        """Like `record_mixed`, for payloads that are mixed in the round in which they were taken out of the mailbox."""
        self.record_mixed((Copy.of(each, self._round) for each in found), channel)

    def publish_buffers(self, round: int) -> None:
        """Publish the float buffers to the neighbors if they are averaged."""
        if self.averages_buffers and self.model.buffers.numel():
            payload = Payload({"x": self.model.buffers})
            self.publish(round, dict.fromkeys(self.view.neighbors, payload), self.buffer_channel)

    def mix_buffers(self, among: Collection[int] | None = None) -> Steps[None]:
        """Mix the newest float buffers that arrived, with the weights of `Copies.weighted_view`, as steps. among: use
        only those of these nodes; None: of all."""
        if not self.averages_buffers or not self.model.buffers.numel():
            return
        copies = self._buffers
        found = yield from self.collect(self.buffer_channel)
        copies.store(Copy.of(each, self.view.round) for each in found)
        copies.drop_older(self.view.round, self.config.max_age)
        seen = copies.weighted_view(self.view, self.weights_in, among)
        self.record_mixed(copies.of(seen), self.buffer_channel)
        mixed = self.model.buffers * seen.weights[seen.uid]
        for uid, payload in copies.payloads(seen).items():
            mixed.add_(payload.tensors["x"], alpha=seen.weights[uid])
        self.model.buffers.copy_(mixed)


def mailbox_schemas(schemas: tuple[Schema, ...], capacity: int) -> tuple[Schema, ...]:
    """Returns the schemas of the same payloads in mailboxes that keep the newest `capacity` payloads of each source."""
    return tuple(replace(schema, elementwise=False, mailbox=capacity) for schema in schemas)
