"""A node's transport in a replay: its record decides the result of every wait, and when a generation is over.

What the record does not decide is executed again over simulated connections: links, chunks, means, the promises of
members.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decentnode.communication.base import Arrival, AveragingGroup, Exchange
from decentnode.communication.run_state import Steps, Wait, at_once
from decentnode.errors import Interrupted, Regrouping
from decentnode.payload import Payload
from decentnode.simulate.world.records import Event, ProcessRecord
from decentnode.simulate.world.transport import Simulated
from decentnode.simulate.world.waits import SimulatedExchange
from decentnode.wire.generation import Limits, Name
from decentnode.wire.membership import Membership
from decentnode.wire.membership.state import name_of
from decentnode.wire.messages import Go
from decentnode.wire.orders import Next


class WaitForever(Wait):
    """The wait of a process whose record is at its end; it is never over."""

    deadline = math.inf

    def step(self, now: float) -> bool:  # noqa: ARG002
        return False


class ScriptedMembership(Membership):
    """Agrees on a generation at the time, with the members and under the name that the replay tells it; all else is the
    real protocol."""

    life: ProcessRecord

    def give_up(self) -> None:
        """Ends the generation in force, because the run's node left it; waits for the leader of the next one."""
        if self.stage == "steady":
            self.end_generation("the run's node left its generation")
            self.yields_until = math.inf

    def propose_recorded(self, name: Name, members: frozenset[int], now: float) -> None:
        """Proposes a generation as its leader, as the run's leader did."""
        self.give_up()
        if self.stage != "suspecting":
            self.change("new leader")
        self.drop_attempt()
        self._leader.prepare(name, members, now)

    def enough(self, generation: object) -> bool:  # noqa: ARG002
        """Returns True: the generation had enough members in the run."""
        return True

    def _request_join(self, now: float) -> None:
        """Does nothing: the run's records decide who comes back when."""

    def _on_go(self, go: Go, now: float) -> None:
        if self._enters(name_of(go)):
            super()._on_go(go, now)

    def _enter(self, cause: Any, now: float) -> None:
        if self.pending is not None and self._enters(self.pending.name):
            super()._enter(cause, now)

    def _enters(self, name: Name) -> bool:
        return any(each.kind == "entered" and each.name == name for each in self.life.events[self.life.cursor :])


class ReplayExchange(SimulatedExchange):
    """Receives the payloads that the run's node mixed, up to where it mixed them, and no others."""

    of: ReplayTransport
    event: Event | None
    """The record that the run's node made of this exchange; None if it left the generation, or ended, before."""

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait]:
        event = self.event
        if event is None:
            yield from self.of.end()
            return
        for step in super().steps(timeout_seconds):
            if isinstance(step, Arrival):
                yield from self._cut(step, event)
            else:
                yield step
            if event.kind == "broken_off" and isinstance(step, Arrival) and step.stop >= event.fields["stop"]:
                yield from self.of.end()

    def _cut(self, arrival: Arrival, event: Event) -> Iterator[Arrival]:
        """Yields the arrival in parts, cut at the elements from which on a source was missing."""
        last = event.fields["stop"] if event.kind == "broken_off" else arrival.stop
        inside = {stop for stop in (*event.partly.values(), last) if arrival.start < stop < arrival.stop}
        cuts = [arrival.start, *sorted(inside), arrival.stop]
        for start, stop in itertools.pairwise(cuts):
            if start >= last:
                return
            gone = {uid for uid, end in event.partly.items() if start >= end}
            received = {uid: payload for uid, payload in arrival.received.items() if uid not in gone}
            if (start, stop) != (arrival.start, arrival.stop):
                part = slice(start - arrival.start, stop - arrival.start)
                received = {uid: Payload({name: x[part] for name, x in payload.tensors.items()})
                            for uid, payload in received.items()}  # fmt: skip
            absent = event.uids("missing") - event.partly.keys()
            yield Arrival(start, stop, received, frozenset(absent | gone))

    @property
    def missing(self) -> frozenset[int]:
        return self._of_event("missing")

    @property
    def departed(self) -> frozenset[int]:
        return self._of_event("departed")

    @property
    def undelivered(self) -> frozenset[int]:
        return self._of_event("undelivered")

    def _of_event(self, key: str) -> frozenset[int]:
        return frozenset() if self.event is None else self.event.uids(key)


class ReplayTransport(Simulated):
    """A simulated transport in which the process's record decides the result of every wait."""

    life: ProcessRecord
    mixed_in_run: set[tuple[Name, tuple[int, int], int, int]]
    """(generation, channel, source, uid) of every payload that was mixed in the run; no other payload is sent."""

    def __init__(self, *parts: Any, life: ProcessRecord, mixed_in_run: set[Any]) -> None:
        """parts: the arguments of `Simulated`."""
        self.life, self.mixed_in_run = life, mixed_in_run
        self._stopped = False
        super().__init__(*parts)

    def _membership(self, limits: Limits) -> Membership:
        setup = self.setup
        made = ScriptedMembership(setup.uid, setup.num_nodes, limits, draw=bytes, digest=setup.digest)
        made.life = self.life
        return made

    @property
    def membership(self) -> ScriptedMembership:
        """The membership protocol of a run with generations."""
        assert self.reconfiguration is not None
        found = self.reconfiguration.membership
        assert isinstance(found, ScriptedMembership)
        return found

    def end(self) -> Iterator[Wait]:
        """Is called where the record has nothing more of what the node does: the node leaves its generation (raises
        Regrouping), or waits for ever, because its process was killed."""
        if self.life.find_next("left") is not None:
            self._leave()
        yield WaitForever()

    def _leave(self) -> None:
        self.facts.regrouping = self.facts.regrouping or "the run's node left its generation"
        raise Regrouping(self.facts.regrouping)

    def enter(self, round: int) -> None:
        if self.life.next_is("left"):
            self._leave()
        super().enter(round)

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Steps[Exchange]:
        key = (round, phase)
        event = self.life.find_next("mixed", "broken_off", round=round, channel=phase)
        sources = frozenset[int]() if event is None else frozenset(event.sources) | event.partly.keys()
        wanted = {uid: payload for uid, payload in outgoing.items()
                  if (self.session.name, key, self.uid, uid) in self.mixed_in_run}  # fmt: skip
        mixed_sources = tuple(uid for uid in expected if uid in sources)
        yield from super().exchange_steps(round, wanted, mixed_sources, phase, group)
        if self.life.next_is("left"):
            self._leave()
        made = ReplayExchange(self.inbox, key, mixed_sources, frozenset(wanted))
        made.observer, made.of, made.event = lambda _arrival: None, self, event
        return made

    def has_sent_later(self, round: int, uid: int) -> bool:  # noqa: ARG002
        event = self.life.find_next("steps", round=round)
        return event is not None and bool(event.fields.get("left_out"))

    def acquire_slot_steps(self, current: Tensor, timeout_seconds: float) -> Steps[Tensor | None]:  # noqa: ARG002
        return at_once(None)

    def mean_steps(
        self, key: str, closing: bool, shape: torch.Size, device: torch.device, timeout_seconds: float
    ) -> Steps[tuple[Tensor, int]]:
        """As `Simulated.mean_steps`, but returns only if the run's mean was finished."""
        if self.life.find_next("averaged", key=key) is None:
            if not closing and self.life.find_next("stopping") is not None:
                raise Interrupted("the run was asked to stop")
            yield from self.end()
        return (yield from super().mean_steps(key, closing, shape, device, timeout_seconds))

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:  # noqa: ARG002
        return at_once({})

    # -- what the record decides ------------------------------------------------------------------------------

    def suspect(self, uids: Any, reason: str) -> None:
        """Does nothing: the record decides when the generation is over."""

    def fail(self, uid: int, reason: str, *, ends_run: bool = False) -> None:
        """Does nothing: the record decides when the generation is over."""

    def depart(self, rounds: int, neighbors: Any) -> None:
        """Does nothing: no node waits for more than the run's nodes received."""

    def next_step(self, round: int) -> Next:
        """Returns "evaluate" where the record has that order. A pause of the run makes no difference to a replay."""
        return "evaluate" if self.life.next_is("ordered") else super().next_step(round)

    def announce_stop(self) -> None:
        """Does nothing: the record decides when the run is asked to stop."""

    @property
    def leaving(self) -> bool:
        return self.life.next_is("leaving")

    @property
    def stopping(self) -> bool:
        return self._stopped or self.life.next_is("stopping")

    def note_stop_request(self) -> None:
        """Is called when the node records that the run was asked to stop."""
        self._stopped = True
        if self.reconfiguration is not None:
            self.membership.stopping = True
