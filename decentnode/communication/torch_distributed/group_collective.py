"""Collective exchanges of a whole clique: one call of torch.distributed per bucket, in place of point-to-point sends.

=============== ============================================ ================ ==========================
call            when                                         bytes, n members where
=============== ============================================ ================ ==========================
all_reduce      every member sends one model to all others,  2 (n - 1) / n S  ``full`` and similar rules on a
                and only their sum is needed                                  complete graph
reduce_scatter  as before, but each gets a part of its own   (n - 1) / n S    ``hierarchical``, 1st phase
                (NCCL only)
all_gather      every member needs each other's payload      (n - 1) / n S    ``hierarchical``, 3rd phase
=============== ============================================ ================ ==========================

Point to point, the first would take (n - 1) S, the others the same as here. The library chooses the order of addition:
sums equal those in ascending order of uid up to the rounding of their dtype, and are the same on all members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from decentnode.communication.base import Arrival, AveragingGroup, Exchange
from decentnode.communication.counters import EdgeCounters
from decentnode.communication.parts import ExchangeKey, Schema
from decentnode.communication.receive.absences import SUM
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.torch_distributed.buffers import Buffers, Pool, pieces
from decentnode.communication.torch_distributed.calls import Calls
from decentnode.formatting import names
from decentnode.payload import Payload

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


def kind_of(
    group: AveragingGroup, outgoing: Mapping[int, Payload], schema: Schema, scatters: bool
) -> CollectiveKind | None:
    """Returns the collective call that does the work of these payloads; None if point-to-point sends are as good. All
    members get the same answer.

    scatters: see `Calls.scatters`.

    With two members, each sends the other what it has either way. Slices are not gathered: they are mixed as they
    arrive.
    """
    one = len({id(payload) for payload in outgoing.values()}) == 1
    if len(group.members) < 3 or not all(spec.exact for spec in schema.tensors.values()):
        return None
    if group.own is None:
        return "all_gather" if one and not schema.elementwise else None
    if len(schema.tensors) != 1 or any(not spec.dtype.is_floating_point for spec in schema.tensors.values()):
        return None
    if one:
        return "all_reduce"
    return "reduce_scatter" if scatters else None


class CollectiveCall:
    """One (round, phase) of an averaging group in flight. One thread of each member makes the `launches` in their
    order, and `launch_completed` is called for each completed launch, in the same order."""

    def __init__(self, kind: CollectiveKind, key: ExchangeKey, calls: Calls, inbox: Inbox, pool: Pool) -> None:
        self.key, self.launches = key, list[Callable[[], Any]]()
        self.ready: Any = None
        """On a GPU, the event after which copies of the payloads are complete."""
        self._kind, self._calls, self._inbox, self._pool = kind, calls, inbox, pool
        self._plans = inbox.plans[key[1]]
        self._totals = [plan.spec.max_elements for plan in self._plans]
        self._sources: list[int] = []
        self._buffers: list[Buffers] = []
        self._scratch: list[Tensor] = []
        self._num_completed = 0

    def prepare(self, group: AveragingGroup, outgoing: Mapping[int, Payload]) -> CollectiveCall:
        """Copies what is sent, and announces to the inbox what will arrive. Training thread."""
        if any(payload.scalars for payload in outgoing.values()):
            raise ValueError("payloads of an averaging group must have no scalars")
        prepare = {
            "all_reduce": self._prepare_all_reduce,
            "reduce_scatter": self._prepare_reduce_scatter,
            "all_gather": self._prepare_all_gather,
        }
        prepare[self._kind](group, outgoing)
        return self

    def _prepare_all_reduce(self, group: AveragingGroup, outgoing: Mapping[int, Payload]) -> None:  # noqa: ARG002
        assert group.own is not None
        buffers = self._receive_buffers(SUM)
        self._fill(buffers.tensors, group.own)
        for piece in pieces(self._plans, buffers.tensors):
            self.launches.append(lambda piece=piece: self._calls.all_reduce(piece))  # type: ignore[misc]

    def _prepare_reduce_scatter(self, group: AveragingGroup, outgoing: Mapping[int, Payload]) -> None:
        assert group.own is not None
        (plan,), n = self._plans, len(group.members)
        flat = self._pool.take(n * plan.spec.max_elements, plan.spec.dtype)
        self._scratch.append(flat)
        parts = []
        for each, part in zip(group.members, flat.view(n, -1), strict=True):
            self._fill([part], outgoing.get(each, group.own))
            parts.append(pieces(self._plans, [part]))
        for out, *given in zip(pieces(self._plans, self._receive_buffers(SUM).tensors), *parts, strict=True):
            self.launches.append(lambda out=out, given=given: self._calls.reduce_scatter(out, given))  # type: ignore[misc]

    def _prepare_all_gather(self, group: AveragingGroup, outgoing: Mapping[int, Payload]) -> None:
        own, back = (Buffers(self._pool, self._plans, 1) for _ in range(2))
        self._buffers += [own, back]
        self._fill(own.tensors, next(iter(outgoing.values())))
        found = [self._receive_buffers(each) if each in outgoing else back for each in group.members]
        outs = [pieces(self._plans, each.tensors) for each in found]
        for piece, *out in zip(pieces(self._plans, own.tensors), *outs, strict=True):
            self.launches.append(lambda piece=piece, out=out: self._calls.all_gather(out, piece))  # type: ignore[misc]

    def _receive_buffers(self, source: int) -> Buffers:
        buffers = Buffers(self._pool, self._plans, num_users=2)
        self._buffers.append(buffers)
        self._sources.append(source)
        self._inbox.start_receive(self.key, source, buffers.trimmed(self._totals), {}, buffers.release)
        return buffers

    def _fill(self, tensors: Sequence[Tensor], payload: Payload) -> None:
        for plan, tensor in zip(self._plans, tensors, strict=True):
            tensor.copy_(payload.tensors[plan.name], non_blocking=self._pool.device.type == "cuda")

    def count(self, edge: EdgeCounters) -> None:
        """Counts what passed between this member and another one: as if each had sent to each, and what the call
        saved."""
        edge.frames_sent += len(self.launches)
        edge.frames_received += len(self.launches)
        for plan, total in zip(self._plans, self._totals, strict=True):
            size = total * plan.spec.dtype.itemsize
            edge.received(size)
            if self._kind == "all_reduce":
                edge.saved_bytes += size - 2 * size // len(self._calls.members)

    @property
    def operation(self) -> str:
        """The operation and its members, for messages."""
        return f"the {self._kind} of round {self.key[0]} among nodes {names(self._calls.members)}"

    @property
    def is_last_launch(self) -> bool:
        """Whether the next completed launch is the last."""
        return self._num_completed + 1 == len(self.launches)

    def launch_completed(self) -> None:
        """Records that the next launch has completed. Called on one thread only."""
        is_last = self.is_last_launch
        self._num_completed += 1
        if is_last:
            for tensor in self._scratch:
                self._pool.put_back(tensor)
        for source in self._sources:
            self._inbox.chunk_received(self.key, source, last=is_last)
        if is_last:
            for buffers in self._buffers:
                buffers.release()


class SumExchange(Exchange):
    """An exchange whose arrivals are sums: either all payloads have arrived, or none."""

    def __init__(self, inbox: Inbox, key: ExchangeKey, expected: tuple[int, ...]) -> None:
        self._inner = InboxExchange(inbox, key, (SUM,), frozenset(expected))
        self._expected = frozenset(expected)

    @property
    def seconds(self) -> float:
        return self._inner.seconds

    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        for arrival in self._inner.arrivals(timeout_seconds):
            found = arrival.received.get(SUM)
            if found is None:
                yield Arrival(arrival.start, arrival.stop, {}, self._expected)
            else:
                (total,) = found.tensors.values()
                yield Arrival(arrival.start, arrival.stop, {}, frozenset(), total)

    @property
    def missing(self) -> frozenset[int]:
        return self._expected if self._inner.missing else frozenset()

    @property
    def undelivered(self) -> frozenset[int]:
        return self._inner.undelivered

    @property
    def departed(self) -> frozenset[int]:
        """With one departed member, the payloads of all others are lost as well."""
        return self.missing if self._inner.departed or self.undelivered else frozenset()
