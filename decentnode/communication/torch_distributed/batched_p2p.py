"""Point-to-point payloads as NCCL requires them: one batch per bucket, in one fixed order, matched by order alone.

These rules ensure that no schedule of rounds, however its graph changes, makes batches wait for each other in a circle
(docs/explanation/transports.rst, "Rules against deadlock"; tests/communication/test_deadlocks.py tries to break them on
gloo):

R1  Every send has its receive: neighbors and sources of a round are one pure function on both ends, and sizes come from
    the schema or from the header that was sent before.
R2  Batches, and the collective calls in their place (group_collective.py), are launched in the order of (round, phase,
    bucket), never in the order of arrivals; batch b of a payload is launched after its batch b - 1.
R3  A batch contains all peers at once; different rounds and phases never share one.
R4  At most 256 operations per batch (`Communicator.batch`).
R5  The communicator is created eagerly and warmed up by a batch between all its members, in which every member takes
    part.
R6  One communicator per device.
R7  Whatever waits for the device or allocates on it does so on all nodes alike, or on a thread that launches nothing:
    receive buffers have the schema's largest size and are allocated before the round's first launch.
R8  A kernel of NCCL spins on the GPU while its peer is late. Nothing here asks first whether the peer is ready: that
    would put a round trip of control messages before every launch, and bound nothing, as a peer can die after its
    answer. The wait is bounded by the deadlines of arrivals, after which communicators are aborted. Its cost is bounded
    by MAX_CTAS: in an overlapped schedule the local steps have the rest of the GPU; in a sequential one the node has
    nothing else to do. Nodes of very different speed still should not share a clique.
R9  Every launched operation is waited for, on a thread of its own, before its buffers are reused.
R10 One thread launches everything.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.absences import SUM
from decentnode.communication.receive.chunking import TensorPlan
from decentnode.communication.torch_distributed.buffers import (
    HEADER_BYTES,
    Buffers,
    Pool,
    pack_header,
    pieces,
    unpack_header,
)
from decentnode.communication.torch_distributed.clique_path import CliquePath, NodeSide
from decentnode.communication.torch_distributed.communicator import Communicator
from decentnode.communication.torch_distributed.group_collective import CollectiveCall
from decentnode.errors import PeerLost
from decentnode.formatting import names
from decentnode.payload import Payload
from decentnode.tensors import moved

logger = logging.getLogger(__name__)


@dataclass
class _OutgoingPayload:
    """One payload in flight to some peers."""

    uids: list[int]
    header: Tensor | None
    parts: list[Tensor]
    release: Callable[[], None]


@dataclass
class _IncomingPayload:
    """One payload that is to arrive."""

    uid: int
    header: Tensor | None
    buffers: Buffers
    totals: list[int] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)


@dataclass
class _RoundBatches:
    """The batches of one (round, phase)."""

    key: ExchangeKey
    plans: tuple[TensorPlan, ...]
    outgoing: list[_OutgoingPayload]
    incoming: list[_IncomingPayload]
    ready: Any = None
    """On a GPU, the event after which copies of the payloads are complete and receive buffers are free."""

    @property
    def operation(self) -> str:
        """The operation and its peers, for messages."""
        peers = {uid for each in self.outgoing for uid in each.uids} | {each.uid for each in self.incoming}
        return f"the batch of round {self.key[0]} with node {names(sorted(peers))}"


_LaunchedStep = tuple[_RoundBatches | CollectiveCall, Callable[[], None]]
"""A launched round or call, and what to do next about it."""


class BatchedPath(CliquePath):
    """Sends one batch per bucket, after a batch of headers if the schema leaves sizes or scalars open. One thread
    launches the batches, another waits for them.

    A bucket is a chunk of the plan (`chunk_bytes`). A silent peer holds up every other source of its batch, and all
    later batches: after the deadline they are all missing, and once `window` payloads wait for a peer, PeerLost is
    raised. When one of them departs, no node waits for the others. Nothing is ever left out of a batch on one side
    alone.
    """

    def __init__(
        self, communicator: Communicator, node: NodeSide, *, peers: frozenset[int] | None = None,
        start_seconds: float | None = None,
    ) -> None:
        """Blocks until every member's warm-up has completed with this node's. node: see `CliquePath`.

        peers: the peers, if not all members but this node; a node of a world of one may be its own peer. start_seconds:
        longest wait for the warm-up. Raises RuntimeError after it.
        """
        found = communicator.peers if peers is None else peers
        super().__init__(communicator.calls, Pool(communicator.device, keep=4 * len(found) + 4), node)
        self.peers = found
        self._communicator, self._device = communicator, communicator.device
        if self._device.type == "cuda":
            self._allocate()
        self._rounds: queue.SimpleQueue[_RoundBatches | CollectiveCall | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_LaunchedStep | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"clique {communicator.uid} {name}", daemon=True)
            for name, target in (("launches", self._launch_all), ("waits", self._wait_all))
        ]
        self._warm_up(start_seconds)
        for thread in self._threads:
            thread.start()

    def _allocate(self) -> None:
        """H5, R7: allocates, before round 0, what a round with all peers needs: one more model than there are peers."""
        for plans in self._inbox.plans:
            for buffers in [Buffers(self._pool, plans, 1) for _ in range(len(self.peers) + 1)]:
                buffers.release()

    def _warm_up(self, timeout_seconds: float | None) -> None:
        """R5: NCCL connects a pair at its first use, and later batches may involve only some ranks."""
        own = torch.zeros(1, device=self._device)
        theirs = {uid: torch.empty(1, device=self._device) for uid in self.peers}
        works = self._communicator.batch([(uid, own) for uid in self.peers], list(theirs.items()))
        self._communicator.wait(works, timeout_seconds)

    # -- training thread --------------------------------------------------------------------------------------

    def begin(
        self, key: ExchangeKey, outgoing: Sequence[tuple[Payload, list[int]]], sources: Sequence[int]
    ) -> frozenset[int]:
        plans, gone = self._inbox.plans[key[1]], self._run_state.departed
        late = [uid for uid in sources if self._outstanding.get(uid, 0) >= self.window]
        if late:  # as for sends: rounds that are over still occupy all their buffers
            raise PeerLost(f"nothing came from node {late[0]} in {self.window} exchanges, last {key[0]}", late)
        incoming = [self._prepare_receive(uid, key) for uid in sources if gone.get(uid, key[0] + 1) > key[0]]
        dropped: set[int] = set()
        sends = []
        for payload, uids in outgoing:
            reached = [uid for uid in uids if self._reserve_send(uid, key)]
            dropped |= set(uids) - set(reached)
            if reached:
                sends.append(self._prepare_send(payload, plans, reached, key))
        for each in incoming:
            self._count_receives(1, each.uid)
        self._inbox.served_together[key] = frozenset(c.uid for c in incoming).union(*(s.uids for s in sends))
        self._rounds.put(_RoundBatches(key, plans, sends, incoming, self._record_event()))
        return frozenset(dropped)

    def _launch_call(self, call: CollectiveCall) -> None:
        call.ready = self._record_event()
        self._rounds.put(call)

    def _prepare_receive(self, uid: int, key: ExchangeKey) -> _IncomingPayload:
        plans = self._inbox.plans[key[1]]
        buffers, totals = Buffers(self._pool, plans, 2), [plan.spec.max_elements for plan in plans]
        parts = pieces(plans, buffers.tensors) if self._is_exact(key[1]) else []
        if self._has_header(key[1]):
            return _IncomingPayload(uid, self._pool.take(HEADER_BYTES, torch.uint8), buffers, parts=parts)
        self._start_receive(key, uid, buffers.tensors, {}, buffers.release)
        return _IncomingPayload(uid, None, buffers, totals, parts)

    def _reserve_send(self, uid: int, key: ExchangeKey) -> bool:
        """Returns False for a peer that departed. Raises PeerLost if the peer takes nothing: the send must not be left
        out (R1)."""
        if self._may_send(uid, key[0]):
            return True
        if self._run_state.departed.get(uid, key[0] + 1) <= key[0]:
            return False
        why = self._run_state.why_broken([uid])
        if why:
            raise PeerLost(f"node {self._communicator.uid}: {why}", [uid])
        raise PeerLost(f"node {uid} received nothing for {self._timeout_seconds:g} s, last in round {key[0]}", [uid])

    def _room_wait_seconds(self) -> float:
        """Returns the whole time-out, as nothing can be left out."""
        return self._run_state.patience(self._timeout_seconds)

    def _prepare_send(
        self, payload: Payload, plans: tuple[TensorPlan, ...], uids: list[int], key: ExchangeKey
    ) -> _OutgoingPayload:
        tensors = [payload.tensors[plan.name] for plan in plans]
        totals = [tensor.numel() for tensor in tensors]
        header = moved(pack_header(*key, totals, payload.scalars), self._device) if self._has_header(key[1]) else None
        holding: list[object] = [self._lease_of(tensors[0]) if len(tensors) == 1 else None]
        buffers = None
        if holding[0] is None or tensors[0].device != self._device:
            buffers = Buffers(self._pool, plans, 1)
            for copy, tensor in zip(buffers.trimmed(totals), tensors, strict=True):
                copy.copy_(tensor, non_blocking=copy.is_cuda)  # blocking on the host, where gloo waits for no event
            tensors = buffers.trimmed(totals)
        parts = pieces(plans, tensors)
        for uid in uids:
            self._count_sent(uid, key[1], len(parts))

        def release() -> None:
            holding.clear()
            if buffers is not None:
                buffers.release()

        return _OutgoingPayload(uids, header, parts, release)

    def _record_event(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    # -- launching thread -------------------------------------------------------------------------------------

    def _launch_all(self) -> None:
        with self._on_device():
            while (each := self._rounds.get()) is not None:
                try:
                    if each.ready is not None:
                        torch.cuda.current_stream(self._device).wait_event(each.ready)
                    if isinstance(each, CollectiveCall):
                        self._launch_calls(each)
                    else:
                        self._launch(each)
                except (RuntimeError, MemoryError) as error:
                    self._fail_thread("launching", each, error)
                    break
        self._launched.put(None)

    def _fail_thread(self, doing: str, each: _RoundBatches | CollectiveCall, error: RuntimeError | MemoryError) -> None:
        """Handles an error that ends a thread. Operations are matched by order alone, so all peers are affected."""
        logger.debug("%s ended: %s", doing, error)
        self._mark_broken({SUM, *self.peers}, each.operation, error)

    def _on_device(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def _launch_calls(self, call: CollectiveCall) -> None:
        """Launches the call bucket by bucket, like batches, in the same order of (round, phase): R2."""
        for launch in call.launches:
            work = launch()
            self._launched.put((call, lambda work=work: self._complete_launch(call, work)))  # type: ignore[misc]

    def _launch(self, each: _RoundBatches) -> None:
        if self._has_header(each.key[1]):
            headers = self._batch(
                [(uid, s.header) for s in each.outgoing if s.header is not None for uid in s.uids],
                [(c.uid, c.header) for c in each.incoming if c.header is not None],
            )
            if self._is_exact(each.key[1]):
                self._launched.put((each, lambda: self._receive_headers(each, headers)))
            else:
                self._receive_headers(each, headers)
        buckets = [len(sent.parts) for sent in each.outgoing] + [len(received.parts) for received in each.incoming]
        for bucket in range(max(buckets, default=0)):
            works = self._batch(
                [(uid, s.parts[bucket]) for s in each.outgoing if bucket < len(s.parts) for uid in s.uids],
                [(c.uid, c.parts[bucket]) for c in each.incoming if bucket < len(c.parts)],
            )
            receive_bucket = functools.partial(self._receive_bucket, each, works, bucket)
            self._launched.put((each, receive_bucket))
        self._launched.put((each, lambda: self._release_sent(each)))

    def _batch(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Any]:
        return self._communicator.batch(sends, receives)

    # -- waiting thread (`_receive_headers` runs on the launching thread if the sizes are only in the headers) ---

    def _wait_all(self) -> None:
        with self._on_device():
            while (found := self._launched.get()) is not None:
                each, step = found
                try:
                    step()
                except (RuntimeError, MemoryError) as error:
                    self._fail_thread("waiting", each, error)
                    return

    def _receive_headers(self, each: _RoundBatches, works: list[Any]) -> None:
        """Blocks until the headers have arrived, then announces the payloads to the inbox."""
        self._communicator.wait(works)
        for incoming in each.incoming:
            assert incoming.header is not None
            try:
                incoming.totals, scalars = unpack_header(incoming.header.cpu(), *each.key, each.plans)
            except ValueError as error:
                self._counters.fault("malformed", incoming.uid, str(error))
                raise RuntimeError(f"node {incoming.uid}: {error}") from error
            self._pool.put_back(incoming.header)
            self._counters.edge(incoming.uid).received(0, scalars)
            tensors = incoming.buffers.trimmed(incoming.totals)
            if not self._is_exact(each.key[1]):
                incoming.parts = pieces(each.plans, tensors)
            self._start_receive(each.key, incoming.uid, tensors, dict(scalars), incoming.buffers.release)
            if not incoming.parts:
                self._complete_payload(each, incoming)

    def _receive_bucket(self, each: _RoundBatches, works: list[Any], bucket: int) -> None:
        self._communicator.wait(works)
        for incoming in each.incoming:
            if bucket + 1 < len(incoming.parts):
                self._chunk_received(each.key, incoming.uid, last=False)
            elif bucket + 1 == len(incoming.parts):
                self._complete_payload(each, incoming)

    def _complete_launch(self, call: CollectiveCall, work: Any) -> None:
        self._communicator.wait([work])
        self._launch_completed(call)

    def _complete_payload(self, each: _RoundBatches, incoming: _IncomingPayload) -> None:
        self._count_received(incoming.uid, each.key[1], incoming.totals, len(incoming.parts))
        self._chunk_received(each.key, incoming.uid, last=True)
        incoming.buffers.release()
        self._count_receives(-1, incoming.uid)

    def _release_sent(self, each: _RoundBatches) -> None:
        for payload in each.outgoing:
            payload.release()
            for uid in payload.uids:
                self._send_completed(uid)

    # -- closing ----------------------------------------------------------------------------------------------

    def _end(self, clean: bool) -> None:
        self._rounds.put(None)
        if clean:
            for thread in self._threads:
                thread.join(1.0)
        self._communicator.leave(clean and not any(thread.is_alive() for thread in self._threads))
