"""Payloads over gloo, every piece with a tag of its own: nodes may be rounds apart, a late one delays nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decentnode.communication.clique import CliquePath
from decentnode.communication.gloo import Clique
from decentnode.communication.inbox import Key
from decentnode.communication.landing import HEADER_BYTES, Buffers, Pool, pack, pieces, unpack
from decentnode.payload import Payload


class TaggedPath(CliquePath):
    """Every payload is a send matched by its receive: a header of fixed size, then the tensors in the schema's order.

    Both ends derive tags and sizes from (round, phase) and the schema (R1). Sizes that the schema leaves open travel in
    the header. A receive is posted by `begin`, waited for on a thread per peer.
    """

    def __init__(self, clique: Clique, *parts: Any) -> None:
        """parts: CliquePath's."""
        super().__init__(*parts)
        self.peers = clique.peers
        self._clique, self._pool = clique, Pool(torch.device("cpu"))
        per_phase = [sum(plan.count(plan.spec.max_elements) for plan in plans) for plans in self._inbox.plans]
        self._slots = 1 + max(per_phase)

    def begin(
        self, key: Key, outgoing: Sequence[tuple[Payload, list[int]]], sources: Sequence[int]
    ) -> frozenset[int]:
        for uid in sorted(sources):
            self._receive(uid, key)
        dropped: set[int] = set()
        for payload, uids in outgoing:
            open_ = [uid for uid in sorted(uids) if self._may_send(uid, key[0])]
            dropped |= set(uids) - set(open_)
            if open_:
                self._send(payload, open_, key)
        return frozenset(dropped)

    def leave(self, clean: bool) -> None:
        self._clique.close(clean)

    def _tag(self, key: Key) -> int:
        return (key[0] * len(self._inbox.plans) + key[1]) * self._slots

    def _send(self, payload: Payload, uids: list[int], key: Key) -> None:
        plans = self._inbox.plans[key[1]]
        tensors = [payload.tensors[plan.name] for plan in plans]
        totals = [tensor.numel() for tensor in tensors]
        header = pack(*key, totals, payload.scalars)
        lease = self._lease_of(tensors[0]) if len(tensors) == 1 else None
        buffers = None
        if lease is None:
            buffers = Buffers(self._pool, plans, len(uids))
            for copy, tensor in zip(buffers.cut(totals), tensors, strict=True):
                copy.copy_(tensor)
            tensors = buffers.cut(totals)
        parts = [header, *pieces(plans, tensors)]
        for uid in uids:
            waits = [self._clique.send(uid, part, self._tag(key) + slot) for slot, part in enumerate(parts)]
            self._count_sent(uid, payload, plans, totals, len(parts))
            self._clique.line(uid, out=True).put(_Over(self._sent, uid, waits, buffers, lease))

    def _receive(self, uid: int, key: Key) -> None:
        """Post what is known to come; the peer's line waits for it and posts the rest."""
        clique, plans, tag = self._clique, self._inbox.plans[key[1]], self._tag(key)
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        head = clique.receive(uid, header, tag)
        buffers = Buffers(self._pool, plans, users=2)

        def post(totals: list[int]) -> list[Callable[[], object]]:
            parts = pieces(plans, buffers.cut(totals))
            return [clique.receive(uid, part, tag + 1 + slot) for slot, part in enumerate(parts)]

        exact = all(plan.spec.exact for plan in plans)
        posted = post([plan.spec.max_elements for plan in plans]) if exact else []

        def take() -> None:
            head()
            try:
                totals, scalars = unpack(header, *key, plans)
            except ValueError as error:
                self._counters.fault("malformed", uid, str(error))
                return
            waits = posted if exact else post(totals)
            self._inbox.put_landing(key, uid, buffers.cut(totals), dict(scalars), buffers.done)
            for wait in waits[:-1]:
                wait()
                self._inbox.landed(key, uid, last=False)
            if waits:
                waits[-1]()
            self._count_received(uid, plans, totals, 1 + len(waits))
            self._inbox.landed(key, uid, last=True)
            buffers.done()
            self._expecting(-1)

        self._expecting(1)
        clique.line(uid, out=False).put(take)


class _Over:
    """What a peer's line does about a payload on its way: wait until it has left, then let go of its memory."""

    def __init__(
        self, sent: Callable[[int], None], uid: int, waits: list[Callable[[], object]], buffers: Buffers | None,
        lease: object,
    ) -> None:
        self._sent, self._uid, self._waits, self._buffers, self._lease = sent, uid, waits, buffers, lease

    def __call__(self) -> None:
        for wait in self._waits:
            wait()
        if self._buffers is not None:
            self._buffers.done()
        self._lease, self._waits = None, []
        self._sent(self._uid)
