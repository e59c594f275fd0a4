"""The exchange of one round over an inbox: yields slices of the model as soon as every source has delivered them.

Without threads, `InboxExchange.steps` does not block but yields the waits, so that one thread can drive many nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from decentnode import clock
from decentnode.communication.base import Arrival, Exchange
from decentnode.communication.parts import ExchangeKey, Schema
from decentnode.communication.receive.arrival_wait import ArrivalWait
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.inbox_state import WHOLE, InboxState
from decentnode.communication.receive.partial_payload import PartialPayload, SlotPayload, non_finite_sources
from decentnode.communication.run_state import GuardedWait, Wait
from decentnode.communication.shared_process import SharedProcess
from decentnode.payload import Payload

_NO_SOURCES: frozenset[int] = frozenset()


class InboxExchange(Exchange):
    """One round's exchange over an inbox."""

    def __init__(
        self, inbox: Inbox | InboxState, key: ExchangeKey, expected: tuple[int, ...], neighbors: frozenset[int],
        dropped: frozenset[int] = frozenset(),
    ) -> None:
        """inbox: without threads, its state; only `steps` may be used then. dropped: neighbors to which nothing was
        sent because they take nothing."""
        self._inbox = inbox
        self._state = inbox.state if isinstance(inbox, Inbox) else inbox
        self._dropped = dropped
        self._key = key
        self._expected = expected
        self._neighbors = neighbors
        self._missing: frozenset[int] = frozenset()
        self._rejected: frozenset[int] = frozenset()
        self._began, self._last_arrival = clock.now(), 0.0
        self._read_in_place: list[tuple[int, SlotPayload]] = []
        """Of the current arrival: payloads in neighbors' slots that the caller reads in place."""

    @property
    def seconds(self) -> float:
        return max(0.0, self._last_arrival - self._began)

    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        inbox = self._inbox
        assert isinstance(inbox, Inbox), "without threads nothing blocks: use steps"
        for step in self._steps(timeout_seconds):
            if isinstance(step, ArrivalWait):
                inbox.block(step)
            else:
                yield step

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait]:
        if not isinstance(self._inbox, Inbox):
            return self._steps(timeout_seconds)
        process = self._inbox.run_state.process
        return self.arrivals(timeout_seconds) if process is None else self._guarded(process, timeout_seconds)

    def _guarded(self, process: SharedProcess, timeout_seconds: float) -> Iterator[Arrival | Wait]:
        assert isinstance(self._inbox, Inbox)
        for step in self._steps(timeout_seconds):
            yield GuardedWait(self._inbox.run_state, process, step) if isinstance(step, ArrivalWait) else step

    def _steps(self, timeout_seconds: float) -> Iterator[Arrival | ArrivalWait]:
        """Yields the arrivals, each preceded by the wait for it. Does not block."""
        self._state.facts.raise_if_failed()
        schema = self._state.schemas[self._key[1]]
        arrivals = self._arrivals_by_chunk if schema.elementwise else self._arrival_of_whole
        yield from arrivals(schema, timeout_seconds)
        self._inbox.finish(self._key)

    def _arrivals_by_chunk(self, schema: Schema, timeout_seconds: float) -> Iterator[Arrival | ArrivalWait]:
        inbox, plan = self._state, self._state.plans[self._key[1]][0]
        placement = inbox.placement
        sources = list(self._expected)
        chunk, stop = 0, -1
        while stop < schema.elements:
            wait = ArrivalWait(inbox, self._key, chunk, sources, timeout_seconds, self._tolerated(len(sources)))
            yield wait
            arrived = wait.arrived
            if len(arrived) < len(sources):
                self._missing |= set(sources) - arrived.keys()
            in_slots = self._prepare_reading(arrived)
            start, stop = plan.bounds(chunk, schema.elements)
            if stop < schema.elements and all(each.is_contiguous for each in arrived.values()) and (
                placement.on_cpu
                or all(placement.is_on_device(each.part(chunk, start, stop)) for each in arrived.values())
            ):
                stop = schema.elements  # everything has arrived, and nothing has to be copied to a GPU in pieces
            found: dict[int, Payload] = {}
            for source, incoming in arrived.items():
                tensor = incoming.part(chunk, start, stop)
                needs_no_move = placement.on_cpu and tensor.is_cpu
                found[source] = Payload({plan.name: tensor if needs_no_move else placement.to_device(tensor)})
            received = self._without_rejected(found, in_slots)
            yield Arrival(start, stop, received, self._missing)
            sources = [source for source in received if source not in self._missing]
            if stop < schema.elements:  # `finish` releases the rest
                self._inbox.release(chunk, arrived)
            chunk += 1
        self._read_in_place = []

    def _arrival_of_whole(self, schema: Schema, timeout_seconds: float) -> Iterator[Arrival | ArrivalWait]:
        tolerated = self._tolerated(len(self._expected))
        wait = ArrivalWait(self._state, self._key, WHOLE, list(self._expected), timeout_seconds, tolerated)
        yield wait
        arrived = wait.arrived
        self._missing = frozenset(self._expected) - arrived.keys()
        in_slots = self._prepare_reading(arrived)
        payloads = {source: self._whole_payload(incoming) for source, incoming in arrived.items()}
        received = self._without_rejected(payloads, in_slots)
        yield Arrival(0, schema.elements, received, self._missing)

    def _tolerated(self, num_sources: int) -> int:
        """Returns how many of `num_sources` sources may be missing once a quorum has delivered."""
        quorum = self._state.facts.quorum
        return 0 if quorum is None else quorum.tolerates(len(self._expected), num_sources)

    def _whole_payload(self, incoming: PartialPayload) -> Payload:
        """Returns a whole payload on the device of the models. Rules that mix whole payloads keep state that cannot be
        rolled back, so they must not see bytes that can still change: a payload in a slot is copied."""
        payload = incoming.payload()
        placement = self._state.placement
        must_copy = placement.on_cpu and isinstance(incoming, SlotPayload) and not incoming.reader.on_device
        tensors = {name: t.clone() if must_copy else placement.to_device(t) for name, t in payload.tensors.items()}
        return Payload(tensors, payload.scalars)

    def _prepare_reading(self, arrived: dict[int, PartialPayload]) -> list[tuple[int, SlotPayload]]:
        """Prepares to read the payloads. Returns those in slots of the host's memory, which may change while they are
        read."""
        in_slots: list[tuple[int, SlotPayload]] = []
        for source, incoming in arrived.items():
            if incoming.arrived_at > self._last_arrival:
                self._last_arrival = incoming.arrived_at
            if isinstance(incoming, SlotPayload):
                if incoming.reader.on_device:
                    incoming.enter()
                else:
                    in_slots.append((source, incoming))
        return in_slots

    def _without_rejected(
        self, received: dict[int, Payload], in_slots: list[tuple[int, SlotPayload]]
    ) -> dict[int, Payload]:
        """Returns `received` without payloads that hold NaN or infinity, if these are to be rejected, and without
        copies of payloads that changed while they were copied."""
        if self._state.reject_non_finite:
            for source in non_finite_sources(received):
                del received[source]
                self._missing |= {source}
                self._rejected |= {source}
                self._state.counters.fault("non_finite", source, f"round {self._key[0]}, phase {self._key[1]}")
        if in_slots and not (self._state.placement.on_cpu and self._state.schemas[self._key[1]].elementwise):
            for source in self._overwritten(in_slots):
                received.pop(source, None)
            in_slots = []
        self._read_in_place = in_slots
        return received

    @property
    def in_place(self) -> bool:
        return bool(self._read_in_place)

    def spoiled(self) -> frozenset[int]:
        return frozenset(self._overwritten(self._read_in_place)) if self._read_in_place else _NO_SOURCES

    def _overwritten(self, in_slots: list[tuple[int, SlotPayload]]) -> list[int]:
        """Returns the sources whose payloads were overwritten while they were read; they are missing from now on."""
        found = [source for source, each in in_slots if not each.is_intact()]
        for source in found:
            if source not in self._missing:
                self._missing |= {source}
                self._state.counters.fault("overwritten", source, f"round {self._key[0]}, phase {self._key[1]}")
        return found

    @property
    def missing(self) -> frozenset[int]:
        return self._missing

    @property
    def undelivered(self) -> frozenset[int]:
        gone, round = self._state.facts.departed, self._key[0]
        return self._dropped | {uid for uid in self._neighbors if gone.get(uid, round + 1) <= round}

    @property
    def departed(self) -> frozenset[int]:
        facts = self._state.facts
        if facts.stopping or facts.regrouping:
            return self._missing
        round = self._key[0]
        return self._rejected | {uid for uid in self._missing if facts.departed.get(uid, round + 1) <= round}
