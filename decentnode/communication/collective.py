"""Payloads over torch.distributed's point-to-point operations; control, barriers and means stay with ZeroMQ."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal, Self

import msgpack
import torch
from pydantic import model_validator
from torch import Tensor

from decentnode import component
from decentnode.communication.base import Arrival, Exchange
from decentnode.communication.gloo import Clique, Pool, listen, own_address
from decentnode.communication.inbox import Status
from decentnode.communication.io_thread import CONTROL
from decentnode.communication.plan import TensorPlan
from decentnode.communication.zeromq import CLOSE_SECONDS, ZeroMQ
from decentnode.communication.zeromq_config import ZeroMQConfig
from decentnode.errors import AssemblyError
from decentnode.payload import Payload

HEADER_BYTES = 1024
SEND_WINDOW = 4
"""Payloads that may be under way to one peer; the next one waits."""


class CollectiveConfig(ZeroMQConfig):
    backend: Literal["auto", "gloo"] = "auto"
    """The library below: gloo, between CPUs; auto is gloo."""

    @model_validator(mode="after")
    def _not_encrypted(self) -> Self:
        if self.secure:
            raise ValueError("communication collective sends models unencrypted: use auto or zeromq with keys")
        return self


def pack(round: int, phase: int, totals: list[int], scalars: Mapping[str, int | float]) -> Tensor:
    """[HEADER_BYTES] uint8: two bytes of length, then msgpack. Raises ValueError when it does not fit."""
    raw = msgpack.packb([round, phase, totals, dict(scalars)])
    if len(raw) > HEADER_BYTES - 2:
        raise ValueError(f"payload scalars must fit in {HEADER_BYTES - 2} bytes, got {len(raw)}")
    framed = len(raw).to_bytes(2, "little") + raw
    return torch.frombuffer(bytearray(framed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def unpack(
    header: Tensor, round: int, phase: int, plans: tuple[TensorPlan, ...]
) -> tuple[list[int], dict[str, int | float]]:
    """(elements per tensor, scalars), checked against the own schema. Raises ValueError for anything else."""
    raw = header.numpy().tobytes()
    length = int.from_bytes(raw[:2], "little")
    try:
        value = msgpack.unpackb(raw[2 : 2 + length], max_array_len=64, max_map_len=64, max_str_len=256, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"header is not msgpack: {error}") from error
    if not (isinstance(value, list) and len(value) == 4 and value[:2] == [round, phase]):
        raise ValueError(f"header must be of round {round}, phase {phase}")
    totals, scalars = value[2:]
    if not isinstance(totals, list) or len(totals) != len(plans) or any(type(total) is not int for total in totals):
        raise ValueError("header must have one size per tensor")
    for plan, total in zip(plans, totals, strict=True):
        if not plan.accepts(total):
            raise ValueError(f"{plan.name} must have at most {plan.spec.max_elements} elements, got {total}")
    if not isinstance(scalars, dict) or any(
        not isinstance(k, str) or type(v) not in (int, float) for k, v in scalars.items()
    ):
        raise ValueError("scalars must be named numbers")
    return totals, scalars


class _Source:
    """One source's payload of one round: filled by the peer's line, read under `status.changed`."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.scalars: dict[str, int | float] = {}
        self.pieces = 0
        """How many pieces are there, in the order they were sent."""
        self.complete = False
        self.refused = False
        self.arrived = 0.0


class CollectiveExchange(Exchange):
    """One round's exchange; sends and receives are all under way."""

    def __init__(
        self, owner: Collective, key: tuple[int, int], sources: dict[int, _Source], neighbors: frozenset[int],
        dropped: frozenset[int],
    ) -> None:
        self._owner, self._key, self._sources = owner, key, sources
        self._neighbors, self._dropped = neighbors, dropped
        self._status: Status = owner._status
        self._missing: frozenset[int] = frozenset()
        self._refused: frozenset[int] = frozenset()
        self._began, self._last = time.monotonic(), 0.0
        self._deadline = math.inf

    @property
    def seconds(self) -> float:
        return max(0.0, self._last - self._began)

    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        self._deadline = time.monotonic() + timeout_seconds
        schema, plans = self._owner.schemas[self._key[1]], self._owner.plans(self._key[1])
        alive = sorted(self._sources)
        if schema.elementwise:
            plan = plans[0]
            for chunk in range(plan.count(schema.elements)):
                alive = self._wait(alive, lambda source, chunk=chunk: source.pieces > chunk)  # type: ignore[misc]
                start, stop = plan.bounds(chunk, schema.elements)
                received = {u: Payload({plan.name: self._sources[u].tensors[0][start:stop]}) for u in alive}
                received = self._finite(received)
                alive = list(received)
                yield Arrival(start, stop, received, self._missing)
        else:
            alive = self._wait(alive, lambda source: source.complete)
            received = self._finite({
                u: Payload({plan.name: t for plan, t in zip(plans, self._sources[u].tensors, strict=True)},
                           self._sources[u].scalars)
                for u in alive
            })  # fmt: skip
            yield Arrival(0, schema.elements, received, self._missing)
        for source in self._sources.values():
            if source.complete:
                for tensor in source.tensors:
                    self._owner.pool.give(tensor)

    def _wait(self, alive: list[int], ready: Callable[[_Source], bool]) -> list[int]:
        """Blocking: those of `alive` that are ready; the others will not come."""
        status, round = self._status, self._key[0]
        began, last = time.monotonic(), -1
        with status.changed:
            while True:
                status.raise_if_failed()
                late = [u for u in alive if not ready(self._sources[u])]
                late_alive = [
                    u for u in late
                    if status.departed.get(u, round + 1) > round and not self._sources[u].refused
                ]  # fmt: skip
                remaining = self._deadline - time.monotonic()
                if not late_alive or remaining <= 0:
                    break
                last = late_alive[0]
                status.waiting = (tuple(late_alive), began)
                status.wait(min(remaining, 1.0))
            status.waiting = None
        if last >= 0:
            self._owner.counters.edge(last).wait_seconds += time.monotonic() - began
        self._missing |= set(late)
        self._refused |= {u for u in late if self._sources[u].refused}
        there = [u for u in alive if u not in late]
        self._last = max([self._last, *(self._sources[u].arrived for u in there)])
        return there

    def _finite(self, received: dict[int, Payload]) -> dict[int, Payload]:
        if self._owner.config.non_finite != "reject":
            return received
        bad = {
            u for u, p in received.items()
            if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in p.tensors.values())
            or any(not math.isfinite(value) for value in p.scalars.values())
        }  # fmt: skip
        for uid in bad:
            self._owner.counters.fault("non_finite", uid, f"round {self._key[0]}, phase {self._key[1]}")
        self._missing |= bad
        self._refused |= bad
        return {u: p for u, p in received.items() if u not in bad}

    @property
    def missing(self) -> frozenset[int]:
        return self._missing

    @property
    def undelivered(self) -> frozenset[int]:
        gone, round = self._status.departed, self._key[0]
        return self._dropped | {uid for uid in self._neighbors if gone.get(uid, round + 1) <= round}

    @property
    def departed(self) -> frozenset[int]:
        if self._status.stopping:
            return self._missing
        gone, round = self._status.departed, self._key[0]
        return self._refused | {uid for uid in self._missing if gone.get(uid, round + 1) <= round}


class Collective(ZeroMQ):
    """Every payload is a send matched by its receive: a header of fixed size, then the tensors in the schema's order.

    Both ends derive tags and sizes from (round, phase) and the schema. Receives go into buffers of their own, so that
    a round that fails changes no model. Sizes that the schema leaves open travel in the header.
    """

    Config: ClassVar[type[component.Config]] = CollectiveConfig
    _clique: Clique | None = None

    def _wants_memory(self, uid: int) -> bool:  # noqa: ARG002
        return False

    def plans(self, phase: int) -> tuple[TensorPlan, ...]:
        return self._inbox.plans[phase]

    def start(self, timeout_seconds: float) -> None:
        super().start(timeout_seconds)
        self.pool = Pool()
        self._flying: dict[int, int] = {}
        self._slots = 1 + max(sum(plan.count(plan.spec.max_elements) for plan in plans) for plans in self._inbox.plans)
        members = tuple(sorted(self._machine_of))
        if len(members) > 1:
            self._meet(members, timeout_seconds)

    def _meet(self, members: tuple[int, ...], timeout_seconds: float) -> None:
        """Blocking: the lowest uid opens a store on a free port, whose number travels as a mean."""
        first = members[0]
        host, via = self._store_host(first)
        store = listen(via, timeout_seconds) if self.uid == first else None
        told = torch.tensor([float(store.port) if store else 0.0], dtype=torch.float64)
        mean, contributors = self.mean("collective/store", told).wait(timeout_seconds)
        port = round(float(mean[0]) * contributors)
        prefix = f"{self.run_id.hex()}/{self._session.generation}"
        try:
            self._clique = Clique(host, port, prefix, self.uid, members, timeout_seconds, via)
        except RuntimeError as error:
            raise AssemblyError(
                f"node {self.uid} could not join the gloo communicator at {host}:{port}: {error}", [self.uid]
            ) from error
        self.barrier("collective/joined", timeout_seconds)

    def _store_host(self, first: int) -> tuple[str, str]:
        """(host of the store, address of the own interface)."""
        far = [uid for uid in self._machine_of if self._machine_of[uid] != self._machine_of[self.uid]]
        if not far:
            if len(set(self._machine_of.values())) == 1:
                return "127.0.0.1", "127.0.0.1"
            raise AssertionError("a mapping of several machines has far nodes")

        def host_of(uid: int) -> str:
            return self._addresses[uid][CONTROL].removeprefix("tcp://").rpartition(":")[0].strip("[]")

        if first in far:
            return host_of(first), own_address(host_of(first))
        via = own_address(host_of(far[0]))
        return via, via

    def claim(self, current: Tensor, timeout_seconds: float) -> Tensor | None:  # noqa: ARG002
        return None

    # -- rounds -----------------------------------------------------------------------------------------------

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0
    ) -> Exchange:
        self._status.raise_if_failed()
        sources = {uid: self._receive(uid, round, phase) for uid in sorted(expected)}
        groups: dict[int, tuple[Payload, list[int]]] = {}
        for uid, payload in sorted(outgoing.items()):
            groups.setdefault(id(payload), (payload, []))[1].append(uid)
        dropped: set[int] = set()
        for payload, uids in groups.values():
            plans = self._checked(payload, phase)
            open_ = [uid for uid in uids if self._may_send(uid, round)]
            dropped |= set(uids) - set(open_)
            if open_:
                self._send(payload, plans, open_, round, phase)
        return CollectiveExchange(self, (round, phase), sources, frozenset(outgoing), frozenset(dropped))

    def _may_send(self, uid: int, round: int) -> bool:
        """Blocking while the window is full; False when the peer is gone or took nothing in time."""
        deadline = time.monotonic() + self.config.timeout_seconds
        with self._status.changed:
            while True:
                self._status.raise_if_failed()
                if self._status.departed.get(uid, round + 1) <= round:
                    return False
                if self._flying.get(uid, 0) < SEND_WINDOW:
                    self._flying[uid] = self._flying.get(uid, 0) + 1
                    return True
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self.counters.fault("send_window", uid, f"round {round}")
                    return False
                self._status.wait(min(remaining, 1.0))

    def _tag(self, round: int, phase: int) -> int:
        return (round * len(self.schemas) + phase) * self._slots

    def _send(
        self, payload: Payload, plans: tuple[TensorPlan, ...], uids: list[int], round: int, phase: int
    ) -> None:
        assert self._clique is not None
        totals = [payload.tensors[plan.name].numel() for plan in plans]
        header = pack(round, phase, totals, payload.scalars)
        copies = [
            self.pool.take(total, plan.spec.dtype).copy_(payload.tensors[plan.name])
            for plan, total in zip(plans, totals, strict=True)
        ]
        left, lock = [len(uids)], threading.Lock()
        pieces = [header, *_pieces(plans, copies)]
        for uid in uids:
            tag = self._tag(round, phase)
            waits = [self._clique.send(uid, piece, tag + slot) for slot, piece in enumerate(pieces)]
            edge = self.counters.edge(uid)
            edge.frames_sent += len(pieces)
            edge.metadata_bytes_sent += HEADER_BYTES
            for plan, total in zip(plans, totals, strict=True):
                size = total * plan.spec.dtype.itemsize
                if plan.name in payload.metadata:
                    edge.metadata_bytes_sent += size
                else:
                    edge.data_bytes_sent += size

            def over(uid: int = uid, waits: list[Callable[[], object]] = waits) -> None:
                for wait in waits:
                    wait()
                with lock:
                    left[0] -= 1
                    last = left[0] == 0
                if last:
                    for copy in copies:
                        self.pool.give(copy)
                with self._status.changed:
                    self._flying[uid] -= 1
                    self._status.notify()

            self._clique.line(uid, out=True).put(over)

    def _receive(self, uid: int, round: int, phase: int) -> _Source:
        """Post what is known to come; the peer's line waits for it and posts the rest."""
        assert self._clique is not None
        clique, plans, source = self._clique, self.plans(phase), _Source()
        tag = self._tag(round, phase)
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        head = clique.receive(uid, header, tag)

        def post(totals: list[int]) -> list[Callable[[], object]]:
            source.tensors = [
                self.pool.take(total, plan.spec.dtype) for plan, total in zip(plans, totals, strict=True)
            ]
            return [
                clique.receive(uid, piece, tag + 1 + slot) for slot, piece in enumerate(_pieces(plans, source.tensors))
            ]

        exact = all(plan.spec.exact for plan in plans)
        posted = post([plan.spec.max_elements for plan in plans]) if exact else []

        def take() -> None:
            head()
            try:
                totals, source.scalars = unpack(header, round, phase, plans)
            except ValueError as error:
                self.counters.fault("malformed", uid, str(error))
                with self._status.changed:
                    source.refused = True
                    self._status.notify()
                return
            waits = posted if exact else post(totals)
            for wait in waits:
                wait()
                with self._status.changed:
                    source.pieces += 1
                    self._status.notify()
            edge = self.counters.edge(uid)
            edge.frames_received += 1 + len(waits)
            edge.metadata_bytes_received += HEADER_BYTES
            edge.data_bytes_received += sum(t.numel() * t.dtype.itemsize for t in source.tensors)
            source.arrived = time.monotonic()
            with self._status.changed:
                source.pieces = max(source.pieces, 1)
                source.complete = True
                self._status.notify()

        with self._status.changed:
            self._flying[-1 - uid] = self._flying.get(-1 - uid, 0) + 1

        def counted() -> None:
            take()
            with self._status.changed:
                self._flying[-1 - uid] -= 1
                self._status.notify()

        clique.line(uid, out=False).put(counted)
        return source

    def close(self) -> None:
        if not self._closed and self._clique is not None:
            deadline = time.monotonic() + (0.0 if self._status.failure is not None else CLOSE_SECONDS)
            with self._status.changed:
                while self._sends_under_way() and (remaining := deadline - time.monotonic()) > 0:
                    self._status.wait(min(remaining, 0.5))
                clean = not any(self._flying.values())
            self._clique.close(clean)
            self._clique = None
        super().close()

    def _sends_under_way(self) -> bool:
        gone = self._status.departed
        return any(count and uid >= 0 and uid not in gone for uid, count in self._flying.items())


def _pieces(plans: tuple[TensorPlan, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors cut as both ends cut them; empty ones give none."""
    return [
        tensor[slice(*plan.bounds(chunk, tensor.numel()))]
        for plan, tensor in zip(plans, tensors, strict=True) if tensor.numel()
        for chunk in range(plan.count(tensor.numel()))
    ]
