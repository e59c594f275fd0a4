"""Point-to-point payloads over gloo with a tag for every piece: nodes may be rounds apart, and a late node delays no
other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.absences import SUM
from decentnode.communication.torch_distributed.buffers import (
    HEADER_BYTES,
    Buffers,
    Pool,
    pack_header,
    pieces,
    unpack_header,
)
from decentnode.communication.torch_distributed.clique_path import CliquePath, NodeSide
from decentnode.communication.torch_distributed.gloo import GlooClique
from decentnode.communication.torch_distributed.group_collective import CollectiveCall
from decentnode.payload import Payload

MAX_RECEIVES = 10_000
"""Most payloads of one peer that may be outstanding, all but `CliquePath.window` of them without memory; if a peer is
further behind, further payloads are not received."""


class TaggedPath(CliquePath):
    """Sends every payload to a matching receive: the tensors in the schema's order, cut into chunks.

    Both ends derive tags and sizes from (round, phase) and the schema (R1). Sizes that the schema leaves open, and
    scalars, are sent first in a header of fixed size. `begin` posts a receive, and a thread per peer waits for it.
    """

    def __init__(self, clique: GlooClique, node: NodeSide, *, pinned: bool = False) -> None:
        """pinned: whether models lie on a GPU."""
        super().__init__(clique.calls, Pool(torch.device("cpu"), pinned=pinned), node)
        self.peers = clique.peers
        self._clique = clique
        per_phase = [sum(plan.count(plan.spec.max_elements) for plan in plans) for plans in self._inbox.plans]
        self._tags_per_payload = 1 + max(per_phase)

    def begin(
        self, key: ExchangeKey, outgoing: Sequence[tuple[Payload, list[int]]], sources: Sequence[int]
    ) -> frozenset[int]:
        for uid in sorted(sources):
            self._receive(uid, key)
        full = {uid for _, uids in outgoing for uid in uids if not self._has_room(uid)}
        dropped: set[int] = set()
        for has_room in (True, False):  # peers with room first, so that none waits for one whose window is full
            for payload, uids in outgoing:
                peers = [uid for uid in sorted(uids) if (uid not in full) == has_room]
                reached = [uid for uid in peers if self._may_send(uid, key[0])]
                dropped |= set(peers) - set(reached)
                if reached:
                    self._send(payload, reached, key)
        return frozenset(dropped)

    def _launch_call(self, call: CollectiveCall) -> None:
        thread = self._clique.thread_for(self._clique.uid, out=False)
        for launch in call.launches:
            wait = self._clique.call(launch)

            def complete(wait: Callable[[], object] = wait) -> None:
                wait()
                self._launch_completed(call)

            thread.put(complete, lambda error: self._mark_broken({SUM, *self.peers}, call.operation, error))

    def _end(self, clean: bool) -> None:
        self._clique.close(clean)

    def _tag(self, key: ExchangeKey) -> int:
        return (key[0] * len(self._inbox.plans) + key[1]) * self._tags_per_payload

    def _send(self, payload: Payload, uids: list[int], key: ExchangeKey) -> None:
        plans = self._inbox.plans[key[1]]
        tensors = [payload.tensors[plan.name] for plan in plans]
        totals = [tensor.numel() for tensor in tensors]
        lease = self._lease_of(tensors[0]) if len(tensors) == 1 else None
        buffers = None
        if lease is None:
            buffers = Buffers(self._pool, plans, len(uids))
            for copy, tensor in zip(buffers.trimmed(totals), tensors, strict=True):
                copy.copy_(tensor)
            tensors = buffers.trimmed(totals)
        parts = pieces(plans, tensors)
        header = pack_header(*key, totals, payload.scalars) if self._has_header(key[1]) else None
        tag = self._tag(key)
        for uid in uids:
            waits = [] if header is None else [self._clique.send(uid, header, tag)]
            waits += [self._clique.send(uid, part, tag + 1 + slot) for slot, part in enumerate(parts)]
            self._count_sent(uid, key[1], len(parts))
            operation = f"the send of round {key[0]} to node {uid}"
            self._clique.thread_for(uid, out=True).put(
                _SendCompletion(self._send_completed, uid, waits, buffers, lease),
                functools.partial(self._mark_broken, {uid}, operation),
            )

    def _receive(self, uid: int, key: ExchangeKey) -> None:
        """Posts what is known to arrive; the peer's thread waits for it and posts the rest. If `window` receives of a
        peer are in flight, which is as many as the peer itself sends at a time, the peer's thread posts this one after
        them."""
        if uid in self._run_state.broken:
            return
        outstanding = self._outstanding.get(uid, 0)
        if outstanding >= MAX_RECEIVES:
            self._counters.fault("receive_window", uid, f"round {key[0]}")
            return
        self._count_receives(1, uid)
        job = self._post_receive(uid, key) if outstanding < self.window else lambda: self._post_receive(uid, key)()
        operation = f"the receive of round {key[0]} from node {uid}"
        self._clique.thread_for(uid, out=False).put(job, functools.partial(self._mark_broken, {uid}, operation))

    def _post_receive(self, uid: int, key: ExchangeKey) -> Callable[[], None]:
        """Posts a receive. Returns the job of the peer's thread, which blocks until the whole payload has arrived."""
        plans, buffers = self._inbox.plans[key[1]], Buffers(self._pool, self._inbox.plans[key[1]], num_users=2)
        totals = [plan.spec.max_elements for plan in plans]
        if not self._has_header(key[1]):
            waits = self._post_pieces(uid, key, buffers, totals)
            self._start_receive(key, uid, buffers.trimmed(totals), {}, buffers.release)
            return lambda: self._receive_pieces(uid, key, buffers, totals, waits)
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        header_wait = self._clique.receive(uid, header, self._tag(key))
        posted = self._post_pieces(uid, key, buffers, totals) if self._is_exact(key[1]) else None

        def receive_header() -> None:
            header_wait()
            try:
                totals, scalars = unpack_header(header, *key, plans)
            except ValueError as error:
                self._counters.fault("malformed", uid, str(error))
                return
            self._counters.edge(uid).received(0, scalars)
            waits = self._post_pieces(uid, key, buffers, totals) if posted is None else posted
            self._start_receive(key, uid, buffers.trimmed(totals), dict(scalars), buffers.release)
            self._receive_pieces(uid, key, buffers, totals, waits)

        return receive_header

    def _post_pieces(
        self, uid: int, key: ExchangeKey, buffers: Buffers, totals: list[int]
    ) -> list[Callable[[], object]]:
        parts = pieces(self._inbox.plans[key[1]], buffers.trimmed(totals))
        return [self._clique.receive(uid, part, self._tag(key) + 1 + slot) for slot, part in enumerate(parts)]

    def _receive_pieces(
        self, uid: int, key: ExchangeKey, buffers: Buffers, totals: list[int], waits: list[Callable[[], object]]
    ) -> None:
        """Blocks until every piece has arrived, and announces each to the inbox. Runs on the peer's thread."""
        for wait in waits[:-1]:
            wait()
            self._chunk_received(key, uid, last=False)
        if waits:
            waits[-1]()
        self._count_received(uid, key[1], totals, len(waits))
        self._chunk_received(key, uid, last=True)
        buffers.release()
        self._count_receives(-1, uid)


class _SendCompletion:
    """The job of a peer's thread for a payload in flight: waits until it was sent, then releases its memory."""

    def __init__(
        self, on_sent: Callable[[int], None], uid: int, waits: list[Callable[[], object]], buffers: Buffers | None,
        lease: object,
    ) -> None:
        self._on_sent, self._uid, self._waits, self._buffers, self._lease = on_sent, uid, waits, buffers, lease

    def __call__(self) -> None:
        for wait in self._waits:
            wait()
        if self._buffers is not None:
            self._buffers.release()
        self._lease, self._waits = None, []
        self._on_sent(self._uid)
