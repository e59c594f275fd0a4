"""Arrived chunks of round payloads: filled by the I/O thread, emptied by the thread that mixes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.receive.chunking import MESSAGE_COST, TensorPlan, plans
from decentnode.communication.receive.partial_payload import (
    SLOTS,
    ChunkedPayload,
    MappedPayload,
    PartialPayload,
    SlotPayload,
    SlotReader,
    cut,
)
from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS, RunState
from decentnode.errors import PeerFault
from decentnode.wire.messages import Chunk, Scalars

ExchangeKey = tuple[int, int]  # round, phase
MAX_SKIPS = 64
"""Stretches of payloads that do not come, kept of one source."""
SUM = -1
"""The source of what a whole averaging group adds up; nobody in particular is waited for."""


class Inbox:
    """Chunks by (round, phase) and source. `consumed(uid, bytes)` tells the transport what it may ask more of."""

    def __init__(
        self,
        schemas: tuple[Schema, ...],
        chunk_bytes: int,
        status: RunState,
        counters: Counters,
        consumed: Callable[[int, int], None],
        reject_non_finite: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """device: where exchanges give their payloads; the CPU when None."""
        self.device = device or torch.device("cpu")
        self.on_cpu = self.device.type == "cpu"
        self.lift: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(self.device)
        """How a tensor in the host's memory comes to `device`; it may change afterwards."""
        self.schemas = schemas
        self.reject_non_finite = reject_non_finite
        self.plans = tuple(plans(schema, chunk_bytes) for schema in schemas)
        self.status = status
        self.counters = counters
        self._consumed = consumed
        self._incoming: dict[ExchangeKey, dict[int, PartialPayload]] = {}
        self.together: dict[ExchangeKey, frozenset[int]] = {}
        """Nodes that a communicator serves in one batch or call: when one departs, nothing comes of the others."""
        self._skips: dict[int, list[tuple[ExchangeKey, ExchangeKey]]] = {}
        """By source: from which (round, phase) to which nothing comes of it."""
        self._floor = 0
        self._end = math.inf
        """This node takes part in no round from this one on, so that nothing of theirs is kept."""
        self._round = -1
        """The one under way; the training thread's."""
        self._given_up: set[int] = set()
        """Sources that were waited for in vain in it."""
        self._finished: set[ExchangeKey] = set()
        self._wanted: set[int] = set()
        """Sources that the training thread waits for."""
        self._wanted_what: tuple[ExchangeKey, int] = ((-1, 0), 0)
        """(key, chunk) that it waits for; chunk -1 stands for a whole payload."""
        self._usual = tuple(_packed([plan.expected for plan in each]) for each in self.plans)
        """By phase: the sizes that every payload has, as doorbells have them; None where they may differ."""
        self._usual_bytes = tuple(sum(p.spec.max_elements * p.spec.dtype.itemsize for p in each) for each in self.plans)

    # -- I/O thread -------------------------------------------------------------------------------------------

    def put(self, message: Chunk, buffer: memoryview) -> None:
        """Take one chunk; the buffer is kept. Raises PeerFault when it does not fit the schema or the moment."""
        plan = self._plan(message, buffer)
        key = (message.round, message.phase)
        with self.status.lock:
            self.status.silent.discard(message.source)
            if message.round < self._floor or key in self._finished:
                raise PeerFault("stale_round", f"round {message.round} from {message.source}")
            if message.round >= self._end:
                self._consumed(message.source, buffer.nbytes + MESSAGE_COST)
                return
            tensors = self.plans[message.phase]
            sources = self._incoming.setdefault(key, {})
            incoming = sources.get(message.source)
            if incoming is None:
                incoming = sources[message.source] = ChunkedPayload(tensors)
            if not isinstance(incoming, ChunkedPayload) or incoming.has(message.tensor, message.chunk):
                raise PeerFault("duplicate_chunk", f"round {message.round} from {message.source}")
            known = incoming.totals[message.tensor]
            if known is not None and known != message.total:
                raise PeerFault("wrong_shape", f"{plan.name} of {message.total} elements after {known}")
            incoming.totals[message.tensor] = message.total
            incoming.buffers[message.tensor][message.chunk] = buffer
            incoming.arrived = clock.now()
            if message.scalars:
                incoming.scalars = message.scalars
            if not self.schemas[message.phase].elementwise:
                self._absorb(key, message.source, incoming)
            self._wake(key, message.source, incoming)

    def put_landing(
        self, key: ExchangeKey, source: int, tensors: list[Tensor], scalars: Scalars, let_go: Callable[[], None]
    ) -> bool:
        """Any thread: the chunks of a payload start to come into `tensors`; False when nobody wants them any more.

        let_go is called once nobody reads `tensors` any more, at once with False.
        """
        with self.status.lock:
            sources = self._incoming.get(key, {})
            if key[0] < self._floor or key[0] >= self._end or key in self._finished or source in sources:
                let_go()
                return False
            landing = MappedPayload(self.plans[key[1]], tensors, scalars, let_go, pieces=0)
            self._incoming.setdefault(key, {})[source] = landing
            return True

    def landed(self, key: ExchangeKey, source: int, last: bool) -> None:
        """Any thread: the next chunk after those before is there; last: the whole payload is."""
        with self.status.lock:
            self.status.silent.discard(source)
            incoming = self._incoming.get(key, {}).get(source)
            if not isinstance(incoming, MappedPayload) or incoming.pieces is None:
                return
            incoming.pieces = None if last else incoming.pieces + 1
            incoming.arrived = clock.now()
            self._wake(key, source, incoming)

    def put_slot(
        self, source: int, key: ExchangeKey, slot: int, use: int, packed: bytes, scalars: Scalars, reader: SlotReader
    ) -> int:
        """Take a payload that lies in a neighbor's publish buffer; its bytes. Raises PeerFault as `put` does.

        packed: elements of each tensor, 8 bytes each. The slot is let go of at once where the payload is not kept.
        """
        try:
            return self._put_slot(source, key, slot, use, packed, scalars, reader)
        except PeerFault:
            if key[1] < len(self.plans) and not self._holds(source, key[1], slot, use):
                reader.release(key[1], slot, use)
            raise

    def _put_slot(
        self, source: int, key: ExchangeKey, slot: int, use: int, packed: bytes, scalars: Scalars, reader: SlotReader
    ) -> int:
        round, phase = key
        if phase >= len(self.plans):
            raise PeerFault("wrong_shape", f"phase {phase}")
        tensors, size = reader.slots[phase][slot], self._usual_bytes[phase]
        if packed != self._usual[phase]:
            tensors = self._cut(tensors, phase, packed)
            size = sum(tensor.nbytes for tensor in tensors)
        incoming = SlotPayload(self.plans[phase], tensors, scalars, reader, phase, slot, use)
        with self.status.lock:
            self.status.silent.discard(source)
            if round < self._floor or key in self._finished:
                raise PeerFault("stale_round", f"round {round} from {source}")
            if round >= self._end:
                incoming.let_go()
                return size
            sources = self._incoming.get(key)
            if sources is not None and source in sources:
                raise PeerFault("duplicate_chunk", f"round {round} from {source}")
            if len(self._incoming) >= SLOTS and self._held_of(source, phase) >= SLOTS:
                raise PeerFault("window_exceeded", f"more than {SLOTS} slots of {source}")
            if sources is None:
                sources = self._incoming[key] = {}
            sources[source] = incoming
            incoming.arrived = clock.now()
            self._wake(key, source, incoming)
        return size

    def _holds(self, source: int, phase: int, slot: int, use: int) -> bool:
        """Whether a payload is kept that lies in this slot of the source's publish buffer, told of by another
        doorbell."""
        with self.status.lock:
            kept = (sources.get(source) for sources in self._incoming.values())
            return any(isinstance(each, SlotPayload) and (each.phase, each.slot) == (phase, slot) and each.use <= use
                       for each in kept)  # fmt: skip

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey) -> None:
        """I/O thread: a source says that its payloads from `first` to `last` do not come. Raises PeerFault for more of
        such words than anybody needs."""
        with self.status.lock:
            self.status.silent.discard(source)
            known = [each for each in self._skips.get(source, ()) if each[1][0] >= self._floor]
            if first > last or len(known) >= MAX_SKIPS:
                raise PeerFault("malformed_header", f"payloads {first} to {last} of {source} are skipped")
            self._skips[source] = [*known, (first, last)]
            self.status.notify()

    def _is_skipped(self, source: int, key: ExchangeKey) -> bool:
        return any(first <= key <= last for first, last in self._skips.get(source, ()))

    def _held_of(self, source: int, phase: int) -> int:
        """Slots of this source's publish buffer that are kept. Rounds whose payload came as chunks are none of them."""
        kept = (sources.get(source) for key, sources in self._incoming.items() if key[1] == phase)
        return sum(isinstance(each, SlotPayload) for each in kept)

    def _cut(self, tensors: list[Tensor], phase: int, packed: bytes) -> list[Tensor]:
        """A slot's tensors as long as a doorbell says. Raises PeerFault when they cannot be."""
        plans = self.plans[phase]
        totals = [int.from_bytes(packed[i : i + 8], "little") for i in range(0, len(packed), 8)]
        if len(totals) != len(plans) or not all(map(TensorPlan.accepts, plans, totals)):
            raise PeerFault("wrong_shape", f"slot of {totals} elements")
        return [cut(tensor, 0, total) for tensor, total in zip(tensors, totals, strict=True)]

    def _plan(self, message: Chunk, buffer: memoryview) -> TensorPlan:
        if message.phase >= len(self.plans) or message.tensor >= len(self.plans[message.phase]):
            raise PeerFault("wrong_shape", f"tensor {message.tensor} of phase {message.phase}")
        plan = self.plans[message.phase][message.tensor]
        if not plan.accepts(message.total) or message.chunk >= plan.count(message.total):
            raise PeerFault("wrong_shape", f"{plan.name}: chunk {message.chunk} of {message.total} elements")
        start, stop = plan.bounds(message.chunk, message.total)
        if buffer.nbytes != (stop - start) * plan.spec.dtype.itemsize:
            raise PeerFault("wrong_size", f"{plan.name}: {buffer.nbytes} bytes for {stop - start} elements")
        return plan

    def _absorb(self, key: ExchangeKey, source: int, incoming: PartialPayload) -> None:
        """Whole payloads are put together as they come, for this round and the next; later rounds wait."""
        if key[0] <= self._floor + 1:
            freed = incoming.assemble()
            if freed:
                self._consumed(source, freed)

    def _wake(self, key: ExchangeKey, source: int, incoming: PartialPayload) -> None:
        """Something came: the training thread goes on once everything it waits for is there."""
        wanted = self._wanted
        if source in wanted:
            what, chunk = self._wanted_what
            if key == what and (incoming.has(0, chunk) if chunk >= 0 else incoming.complete):
                wanted.discard(source)
                if not wanted:
                    self.status.notify()

    # -- training thread --------------------------------------------------------------------------------------

    def advance(self, round: int) -> None:
        """Rounds below `round` are over: what still comes of them is stale."""
        if round != self._round:
            self._round, self.status.waited_seconds = round, 0.0
            self._given_up.clear()
        if round <= self._floor:  # which the training thread alone moves
            return
        with self.status.lock:
            self._floor = round
            if self._finished:
                self._finished = {key for key in self._finished if key[0] >= round}
            if self.together:
                self.together = {key: group for key, group in self.together.items() if key[0] >= round}
            if not self._incoming:
                return
            for key in [key for key in self._incoming if key[0] < round]:
                self._drop(key)
            for key, sources in self._incoming.items():
                if not self.schemas[key[1]].elementwise:
                    for source, incoming in sources.items():
                        self._absorb(key, source, incoming)

    def end(self, round: int) -> None:
        """This node takes part in no round from `round` on. What others sent for it makes room for what still has to
        come of them: means share the window with payloads."""
        with self.status.lock:
            self._end = round
            for key in [key for key in self._incoming if key[0] >= round]:
                self._drop(key)

    def reset(self, round: int) -> None:
        """A new generation begins with `round`: what came in the one before is let go of."""
        with self.status.lock:
            for sources in self._incoming.values():
                for incoming in sources.values():
                    incoming.let_go()
            self._incoming.clear()
            self._finished.clear()
            self.together.clear()
            self._skips.clear()
            self._wanted = set()
            self.status.silent.clear()
            self._floor, self._end, self._round = round, math.inf, -1

    def finish(self, key: ExchangeKey) -> None:
        with self.status.lock:
            self._finished.add(key)
            if self.together:
                self.together.pop(key, None)
            self._drop(key)

    def _drop(self, key: ExchangeKey) -> None:
        for source, incoming in self._incoming.pop(key, {}).items():
            waiting = incoming.waiting_bytes()
            incoming.let_go()
            if waiting:
                self._consumed(source, waiting)

    def wait(
        self, key: ExchangeKey, chunk: int, sources: list[int], timeout_seconds: float
    ) -> dict[int, PartialPayload]:
        """Blocking: those of `sources` that delivered `chunk` (-1: everything).

        Fewer when the others departed or nothing came for `timeout_seconds`, which all waits of a round share. Whoever
        was given up in a round is waited for again in it only once something came.
        """
        with self.status.lock:
            waiting = self._outstanding(key, chunk, sources)
            if waiting:
                self._await(key, chunk, waiting, timeout_seconds)
                waiting = self._outstanding(key, chunk, sources)
            arrived = self._incoming.get(key, {})
            return {source: arrived[source] for source in sources if source not in waiting}

    def _await(self, key: ExchangeKey, chunk: int, waiting: list[int], timeout_seconds: float) -> None:
        """With `status.lock` held: until everything of `waiting` came that will."""
        status = self.status
        began = last = clock.now()
        waiting = [s for s in waiting if s not in self._given_up or s not in status.silent]
        before = 0.0 if self._given_up else status.waited_seconds  # whoever used that up is not among these
        while waiting:
            status.raise_if_failed()
            if status.departed:
                waiting = [s for s in waiting if not self._departed(s, key) and not self._held_up(s, key)]
            if self._skips:
                waiting = [s for s in waiting if not self._is_skipped(s, key)]
            limit = min(timeout_seconds, STOPPING_TIMEOUT_SECONDS) if status.stopping else timeout_seconds
            exposed, now = status.exposed_since, clock.now()
            remaining = max(last, exposed) + limit - before - now
            if remaining <= 0:
                status.silent.update(waiting)
                self._given_up.update(waiting)
            if not waiting or remaining <= 0 or status.regrouping:
                break
            self._wanted, self._wanted_what = set(waiting), (key, chunk)
            status.waiting = None if exposed > now else (self._whom(key, waiting), max(began, exposed))
            status.wait(min(remaining, 1.0))
            still = self._outstanding(key, chunk, waiting)
            if len(still) < len(waiting):
                # when it came, not when it was noticed: this thread is woken once all that it waits for is there, or
                # after a second, which would be added to the wait for the others
                here = self._incoming.get(key, {})
                times = [here[s].arrived for s in waiting if s not in still and s in here]
                last, before = max(times, default=clock.now()), 0.0
                status.waited_seconds = 0.0
            if not still and waiting[-1] != SUM:
                self.counters.edge(waiting[-1]).wait_seconds += max(0.0, last - max(began, status.exposed_since))
            waiting = still
        self._wanted, status.waiting = set(), None
        status.waited_seconds += max(0.0, clock.now() - max(last, status.exposed_since))
        for source in waiting:
            if source != SUM:
                waited = clock.now() - max(began, status.exposed_since)
                self.counters.edge(source).wait_seconds += max(0.0, waited)

    def _whom(self, key: ExchangeKey, waiting: list[int]) -> tuple[int, ...]:
        return tuple(sorted(self.together.get(key, ()))) if SUM in waiting else tuple(waiting)

    def _departed(self, uid: int, key: ExchangeKey) -> bool:
        return self.status.departed.get(uid, key[0] + 1) <= key[0]

    def _held_up(self, source: int, key: ExchangeKey) -> bool:
        """Whether a source comes together with a node that departed before: then neither does."""
        group = self.together.get(key, frozenset())
        return (source in group or source == SUM) and any(self._departed(uid, key) for uid in group)

    def _outstanding(self, key: ExchangeKey, chunk: int, sources: list[int]) -> list[int]:
        """Those of `sources` that have not delivered `chunk` (-1: everything)."""
        arrived = self._incoming.get(key)
        if arrived is None:
            return sources
        found = []
        for source in sources:
            incoming = arrived.get(source)
            if incoming is None or not (incoming.complete if chunk < 0 else incoming.has(0, chunk)):
                found.append(source)
        return found

    def release(self, chunk: int, sources: dict[int, PartialPayload]) -> None:
        """Give back the buffers of a mixed chunk."""
        with self.status.lock:
            for source, incoming in sources.items():
                freed = incoming.take(chunk)
                if freed:
                    self._consumed(source, freed)


def _packed(totals: list[int | None]) -> bytes | None:
    """8 bytes each; None where one is not known."""
    known = [total.to_bytes(8, "little") for total in totals if total is not None]
    return b"".join(known) if len(known) == len(totals) else None
