"""What the schedules have in common in which no node waits for the round of another one."""

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
from decentnode.node.schedules.fragment_exchange import FragmentExchange, Mixed
from decentnode.node.schedules.schedule import Schedule
from decentnode.payload import Payload
from decentnode.sharing.decoding import MALFORMED


class Asynchronous(Schedule):
    """Local steps, then mix what has come, and go on. The model is one fragment, and the rule has one phase."""

    asynchronous = True

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._buffers = Copies(age_weights=self.config.age_weights)
        """The neighbors' float buffers."""
        self._round = -1
        """The one under way, or the last; -1 before the first."""
        self._held: dict[int, list[Collected]] = {}
        """By channel: what came of nodes that have made a checkpoint before this one has; until the next round."""
        self._heard: dict[int, float] = {}
        """By source, when something came of it last; in this generation of members."""

    @property
    def config(self) -> AsynchronousConfig:
        return self.asynchronous_config or AsynchronousConfig.model_validate({})

    @property
    def fragment(self) -> FragmentExchange:
        return self.fragments[0]

    @property
    def view(self) -> RoundView:
        """Of the round under way."""
        return self.fragment.view

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        self._round, model = round, self.model.parameters
        with torch.no_grad():
            self.fragment.begin_turn(model)
        yield from self._train(round)
        with torch.no_grad():
            self.fragment.adjust(model, self.update.loss)
        check()
        yield from self._take_in()
        self._publish_round(round)

    def _take_in(self) -> Steps[None]:
        """After the local steps, before the neighbors are told of them: take what has come meanwhile."""
        return at_once(None)

    def _publish_round(self, round: int) -> None:
        """After the local steps: tell the neighbors. Not blocking."""

    def mix(self) -> Steps[list[Mixed]]:
        raise NotImplementedError("an asynchronous schedule has one phase")

    def finish(self) -> Steps[list[Mixed]]:
        yield from self._mix_round(self.view.round)
        now = clock.now()
        self._heard = dict.fromkeys(self.view.sources, now) | self._heard
        self.communication.ask_after(self._heard)
        with torch.no_grad():
            self.fragment.finish_turn(self.model.parameters)
        nobody = frozenset[int]()
        return [Mixed(nobody, nobody)]

    @abc.abstractmethod
    def _mix_round(self, round: int) -> Steps[None]:
        """Mix what has come; count seconds in `times`."""

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int = 0) -> frozenset[int]:
        """As `Communication.publish`, with its seconds in `times`."""
        if self.communication.history is not None:
            self.communication.history.published(round, channel, outgoing)
        if self.cuts.number:
            marked = {id(each): self.cuts.marked(each) for each in outgoing.values()}  # one object stays one
            outgoing = {uid: marked[id(each)] for uid, each in outgoing.items()}
        started = clock.now()
        refused = self.communication.publish(round, outgoing, channel)
        self.times.send += clock.now() - started
        return refused

    def collect(
        self, channel: int = 0, sources: Collection[int] = (), seconds: float = 0.0, count: int = 0
    ) -> Steps[list[Collected]]:
        """As `Communication.collect_steps`, with its seconds in `times`. What was published after a checkpoint that
        this node has not made yet is held back until then."""
        started, held = clock.now(), self._held.pop(channel, [])
        found = yield from self.communication.collect_steps(
            channel, count=max(0, count - len(held)), sources=sources, seconds=seconds
        )
        now = clock.now()
        self.times.wait += now - started
        self._heard |= dict.fromkeys((each.source for each in found), now)
        return [plain for each in [*held, *found] for plain in self._admitted(each, channel)]

    def _admitted(self, each: Collected, channel: int) -> Iterable[Collected]:
        """Yields a payload without the number of its source's checkpoint, unless it is held back."""
        cuts = self.cuts
        try:
            plain, number = cuts.read(each)
        except ValueError as error:
            self.communication.counters.fault(MALFORMED, each.source, f"{error} from {each.source}")
            return
        if cuts.holds and number > cuts.number:
            cuts.heard = max(cuts.heard, number)
            if cuts.believes:
                self._held.setdefault(channel, []).append(each)
                return
        yield plain

    def record(self, copies: Iterable[Copy], channel: int = 0) -> None:
        """These copies are about to be mixed: keep which they are, where the node keeps a record."""
        history, round = self.communication.history, self._round
        if history is not None:
            told = ((each.source, each.round, round - each.came, each.as_it_came) for each in copies)
            history.mixed_copies(round, channel, told)

    def record_new(self, found: Iterable[Collected], channel: int = 0) -> None:
        """As `record`, of payloads that are mixed in the round in which they were taken out of the mailbox."""
        self.record((Copy.of(each, self._round) for each in found), channel)

    def publish_buffers(self, round: int) -> None:
        """Send the float buffers to the neighbors, where they are averaged."""
        if self.averages_buffers and self.model.buffers.numel():
            payload = Payload({"x": self.model.buffers})
            self.publish(round, dict.fromkeys(self.view.neighbors, payload), self.buffer_channel)

    def mix_buffers(self, among: Collection[int] | None = None) -> Steps[None]:
        """Mix the newest float buffers that came, by their weights (`Copies.weighed`). among: of these nodes alone."""
        if not self.averages_buffers or not self.model.buffers.numel():
            return
        copies = self._buffers
        found = yield from self.collect(self.buffer_channel)
        copies.take(Copy.of(each, self.view.round) for each in found)
        copies.drop_older(self.view.round, self.config.max_age)
        seen = copies.weighed(self.view, self.weights_in, among)
        self.record(copies.of(seen), self.buffer_channel)
        mixed = self.model.buffers * seen.weights[seen.uid]
        for uid, payload in copies.payloads(seen).items():
            mixed.add_(payload.tensors["x"], alpha=seen.weights[uid])
        self.model.buffers.copy_(mixed)


def mailboxes(schemas: tuple[Schema, ...], kept: int) -> tuple[Schema, ...]:
    """The same payloads in mailboxes that keep so many of each source."""
    return tuple(replace(schema, elementwise=False, mailbox=kept) for schema in schemas)
