"""Buckets: flat tensors that hold parameters, with their snapshots for the exchange and their mixing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter

from decentnode.graph.base import RoundView
from decentnode.mixing import mix_into, passes, uses_fewest_passes
from decentnode.parallel.buckets.advance import GRAIN_BYTES, MAX_ARRIVALS, Marks, Mixing, Rows, loops
from decentnode.parallel.planning.plan import Plan
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing

BLOCK_BYTES = 1 << 20
"""On a CPU parameters are copied and mixed in blocks of this size, so that consecutive operations find a block in the
cache. The calls for one block cost 30 us."""
PART_BYTES = 1 << 22
"""On a CPU the parameters of a bucket are mixed, updated by the optimizer and copied in parts of about this size. A
part costs one call of the optimizer's step, 0.2 ms; for 10 M parameters 4 MB was faster than 1, 2 and 8."""
CACHED_BYTES = 1 << 23
"""Parts up to this size are assumed to stay in a cache from their mixing to their snapshot."""


@dataclass(frozen=True, eq=False)
class BucketPart:
    """Some parameters of a bucket that are adjacent in it."""

    params: tuple[Parameter, ...]
    start: int
    stop: int
    """Their elements are flat[start:stop]."""
    small: bool
    """Whether the part is small enough that consecutive operations on it find it in a cache."""
    mark: int
    """The index of its first mark (advance.py)."""


class _BlockPosition(NamedTuple):
    part: BucketPart
    at: int
    """The element of `flat` where a block starts."""


def _dense(tensor: Tensor) -> Tensor:
    """Returns the same values without gaps in memory, with the dimensions in the same order."""
    if torch.empty_like(tensor).stride() == tensor.stride():
        return tensor
    return torch.empty_like(tensor).copy_(tensor)


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype and device, whose values are in the tensor `flat` [S].

    A snapshot of the bucket is sent to the neighbors. If a script changes the parameters between the snapshot and the
    mixing, its change is kept: x <- mixed snapshot + (x - snapshot). On a CPU a hash of each block detects every
    changed bit, whoever changed it (two different blocks have the same hash once in 2^64). On other devices, where a
    comparison would block the host, only those changes are noticed that torch counts: in-place operations on a
    parameter, load_state_dict and `p.data = other` are counted, in-place operations on `p.data` are not.

    With a C compiler, float32 on a CPU is mixed by compiled loops (advance.c), with bitwise the same result.
    """

    index: int
    params: list[Parameter]
    views: bool
    """Whether the parameters are views of `flat`; otherwise they are copied there and back."""
    rule: Sharing
    """The sharing rule, an object used by this bucket alone."""
    flat: Tensor = field(init=False)
    sent: Tensor = field(init=False)
    """The snapshot that was sent last; it stays unchanged until its exchange is finished."""
    received: dict[int, Tensor] = field(default_factory=dict)
    """Peer -> [S] the parameters received from it."""
    moved_bytes: int = 0
    """Bytes that snapshots and mixing have read from and written to memory so far. On a CPU a block counts once per
    tensor and direction, because later operations find it in the cache; elsewhere every operation counts. Bytes that
    the optimizer and transports move are not counted."""

    def __post_init__(self) -> None:
        total = sum(p.numel() for p in self.params)
        self.flat = torch.empty(total, dtype=self.params[0].dtype, device=self.params[0].device)
        self._param_views, offset = [], 0
        for p in self.params:
            values = _dense(p.data)
            param_view = self.flat[offset : offset + p.numel()].as_strided(values.shape, values.stride())
            param_view.copy_(values)
            if self.views:
                p.data = param_view
            self._param_views.append(param_view)
            offset += p.numel()
        self._addresses = [view.data_ptr() for view in self._param_views]
        self._strides = [view.stride() for view in self._param_views]
        self._hashes = self.flat.device.type == "cpu"
        self._loops = loops() if self._hashes else None
        block = BLOCK_BYTES if self._loops is None else -(-BLOCK_BYTES // GRAIN_BYTES) * GRAIN_BYTES
        self._block = block // self.flat.element_size() if self._hashes else max(1, total)
        self._hash_of: dict[int, int] = {}
        """Without compiled loops: the first element of a block -> the block's hash in the last snapshot."""
        self._sent_versions: list[int] | None = None
        """On other devices: `_versions` at the last snapshot; None if what was sent differs from the parameters."""
        self._receive_buffers: list[Tensor] = []
        self.parts = list(self._make_parts(PART_BYTES // self.flat.element_size() if self._hashes else max(1, total)))
        self._marks: Marks = np.zeros((self._mark_index(total) + len(self.parts), 2), np.uint64)

    def _make_parts(self, elements: int) -> Iterator[BucketPart]:
        """Yields parts of whole parameters with `elements` or more elements; the last part may have fewer."""
        number = start = stop = 0
        kept: list[Parameter] = []
        for p in self.params:
            kept.append(p)
            stop += p.numel()
            if stop - start >= elements or p is self.params[-1]:
                small = (stop - start) * p.element_size() <= CACHED_BYTES
                yield BucketPart(tuple(kept), start, stop, small, self._mark_index(start) + number)
                kept, start, number = [], stop, number + 1

    def _mark_index(self, elements: int) -> int:
        return elements * self.flat.element_size() // GRAIN_BYTES

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def gather(self) -> None:
        """Copies the parameters' values to `flat`, where a script has moved them elsewhere."""
        addresses, strides = [p.data_ptr() for p in self.params], [p.stride() for p in self.params]
        if addresses == self._addresses and strides == self._strides:
            return
        for p, param_view in zip(self.params, self._param_views, strict=True):
            if p.data_ptr() != param_view.data_ptr() or p.stride() != param_view.stride():
                if (p.shape, p.dtype, p.device) != (param_view.shape, param_view.dtype, param_view.device):
                    wrapped = f"{param_view.dtype} {tuple(param_view.shape)} on {param_view.device}"
                    raise ValueError(f"parameters must stay as they were when wrapped, got {p.dtype} {tuple(p.shape)} "
                                     f"on {p.device} in place of {wrapped}: wrap the model after "
                                     "converting it")  # fmt: skip
                param_view.copy_(p.data)
                self._count(param_view, 2)
                if self.views:
                    p.data = param_view

    def scatter(self) -> None:
        """Copies `flat` back to the parameters, if they are not views of it."""
        if not self.views:
            for p, param_view in zip(self.params, self._param_views, strict=True):
                p.data.copy_(param_view)
                self._count(param_view, 2)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Returns views of a tensor [S] like `flat`: the parameters' values in it, in their shapes."""
        return [flat.as_strided(view.shape, view.stride(), view.storage_offset()) for view in self._param_views]

    def receive_buffer(self, number: int) -> Tensor:
        """Returns the receive buffer [S] of this number, allocated at its first use."""
        while len(self._receive_buffers) <= number:
            self._receive_buffers.append(torch.empty_like(self.flat))
        return self._receive_buffers[number]

    def send_buffer(self) -> Tensor:
        """Returns a send buffer [S] for snapshots that the transport has no memory for, allocated at its first use."""
        if not hasattr(self, "_send_buffer"):
            self._send_buffer = torch.empty_like(self.flat)
        return self._send_buffer

    def drop_buffers(self) -> None:
        """Drops the send and receive buffers, because operations in flight may still write into them."""
        self._receive_buffers.clear()
        self.received.clear()
        for name in ("_send_buffer", "sent"):
            self.__dict__.pop(name, None)

    def snapshot(self, into: Tensor, copy: Tensor | None = None) -> None:
        """Copies the parameters to `into` [S], from which they are sent, and to `copy` [S], if given."""
        for part in self.parts:
            self.snapshot_part(part, into, copy)
        self.sent = into

    def snapshot_part(self, part: BucketPart, into: Tensor, copy: Tensor | None = None, cached: bool = False) -> None:
        """Does the same as `snapshot` for one part, but leaves `sent` as it is. cached: the part is in the cache."""
        if not self._hashes:
            self._sent_versions = self._versions()
        piece = slice(part.start, part.stop)
        self._count(self.flat[piece], (1 if copy is None else 2) + (not cached))
        if self._loops is not None:
            second = None if copy is None else copy[piece]
            self._loops.snapshot(self.flat[piece], into[piece], second, self._marks[part.mark :])
            return
        for where, flat, sent, second in self._blocks(part, self.flat, into, into if copy is None else copy):
            sent.copy_(flat)
            if copy is not None:
                second.copy_(flat)
            if self._hashes:
                self._hash_of[where.at] = self._hash(flat)

    def record_sent(self, sent: Tensor) -> None:
        """Records that the neighbors have `sent` [S], which differs from the parameters: mixing keeps the difference,
        as it keeps a script's changes. No snapshot is compared with any more."""
        self.sent = sent
        self._marks.fill(0)  # the hash of no block
        self._hash_of.clear()
        self._sent_versions = None

    def advance(self, part: BucketPart, view: RoundView | None, rows: Rows, place: Tensor | None) -> None:
        """Mixes a part as `mix` does, takes the optimizer's step and copies it to `place` [S], in one pass over memory.

        Only if `supports_one_pass` is true. view: None for no mixing. rows: of `advance.AdamSteps`. place: None for no
        snapshot.
        """
        assert self._loops is not None
        sources = () if view is None else view.sources
        piece = slice(part.start, part.stop)
        mixing = self._mixing(piece, view) if view is not None and sources else None
        snapshot = None if place is None else place[piece]
        self._loops.advance(self.flat[piece], mixing, rows, snapshot, self._marks[part.mark :])
        self._count(self.flat[piece], len(sources) + (place is not None))

    def supports_one_pass(self, view: RoundView | None) -> bool:
        """Returns whether the compiled loops can mix the payloads of `view`."""
        is_supported = self._loops is not None and self.flat.dtype == torch.float32 and self.rule.requirements.linear
        return is_supported and (view is None or len(view.sources) <= MAX_ARRIVALS)

    def _mixing(self, piece: slice, view: RoundView) -> Mixing:
        arrived = [(self.received[uid][piece], view.weights[uid]) for uid in view.sources]
        return Mixing(self.sent[piece], view.weights[view.uid], arrived)

    def mix(self, view: RoundView, part: BucketPart | None = None, cached: bool = False) -> None:
        """Mixes the payloads of `view.sources` in `received` by the sharing rule, and keeps a script's changes.

        part: mixes this part alone. cached: the part then stays in the cache until it is written again.
        """
        if not view.sources:
            return
        if self.supports_one_pass(view):
            assert self._loops is not None
            for each in self.parts if part is None else [part]:
                piece = slice(each.start, each.stop)
                self._loops.advance(self.flat[piece], self._mixing(piece, view), None, None, self._marks[each.mark :])
                self._count(self.flat[piece], 2 + len(view.sources) - cached)
            return
        received = [self.received[uid] for uid in view.sources]
        for where, flat, sent, *theirs in self._blocks(part, self.flat, self.sent, *received):
            written = self._is_modified(where, flat, sent)
            arrived = dict(zip(view.sources, theirs, strict=True))
            if self.rule.requirements.linear:
                taken = self._mix_linearly(flat, sent if written else None, arrived, view.weights, view.uid)
                self._count(flat, taken - cached)
                continue
            in_one = self._hashes or (len(theirs) == 1 and not written)
            self._count(flat, 2 + len(theirs) + written - cached if in_one else 2 + written + 3 * len(theirs))
            if not written:
                self.rule.mix(flat, {uid: Payload({"x": x}) for uid, x in arrived.items()}, view)
            else:
                mixed = sent.clone()
                self.rule.mix(mixed, {uid: Payload({"x": x}) for uid, x in arrived.items()}, view)
                flat.add_(mixed.sub_(sent))

    def mix_mean(
        self, total: Tensor, n: int, strength: float, part: BucketPart | None = None, cached: bool = False
    ) -> None:
        """Does the same as `mix`, for x <- x + strength (total / n - x). total: [S] sum of n snapshots, overwritten."""
        for where, flat, sent, mean in self._blocks(part, self.flat, self.sent, total):
            written = self._is_modified(where, flat, sent)
            if strength == 1.0 and not written:
                torch.div(mean, n, out=flat)
                self._count(flat, 3 - cached if self._hashes else 2)
            else:
                flat.add_(mean.div_(n), alpha=strength).add_(sent, alpha=-strength)
                self._count(flat, 5 - cached if self._hashes else 8)

    def next_round(self, plan: Plan, step: int, lr: float) -> None:
        """Ends a round and begins the next one, between mixing and the optimizer's step, for sequential rules.

        step: -1 before the first exchange. lr: of the optimizer's last step, whose result was mixed.
        """
        if self.rule.requirements.sequential and step >= 0:
            self.rule.finish(self.flat, replace(plan.view(step), lr=lr))
        self.begin_round(plan, step + 1, lr)

    def begin_round(self, plan: Plan, step: int, lr: float) -> None:
        """Begins the round of a step, for sequential rules."""
        if self.rule.requirements.sequential:
            self.rule.begin(self.flat, replace(plan.view(step), lr=lr))

    def _mix_linearly(
        self, flat: Tensor, sent: Tensor | None, arrived: Mapping[int, Tensor], weights: Mapping[int, float], uid: int
    ) -> int:
        """Sets flat <- own weight flat + sum of weight * arrived, by ascending uid. sent: given if a script changed
        flat. Returns how often S elements were read or written."""
        if sent is None and len(arrived) == 1 and not self._hashes:
            ((peer, x),) = arrived.items()
            flat.lerp_(x, weights[peer])
            return 3
        own, weighted = weights[uid], [(x, weights[peer]) for peer, x in arrived.items()]
        if sent is not None:
            own, weighted = 1.0, [(sent, own - 1.0), *weighted]
        mix_into(flat, flat, own, weighted)
        return 2 + len(weighted) if self._hashes else passes(len(weighted), uses_fewest_passes(flat, weighted))

    def _is_modified(self, where: _BlockPosition, flat: Tensor, sent: Tensor) -> bool:
        if self._loops is not None:
            first = where.part.mark + self._mark_index(where.at - where.part.start)
            return not self._loops.unchanged(flat, self._marks[first:])
        if self._hashes:
            return self._hash(flat) != self._hash_of.get(where.at)
        return self._sent_versions is None or (self._versions() != self._sent_versions and not torch.equal(flat, sent))

    @staticmethod
    def _hash(block: Tensor) -> int:
        """Returns a 64-bit hash of the bytes of a block, on a CPU."""
        return xxhash.xxh3_64_intdigest(block.view(torch.uint8).numpy().data)

    def _versions(self) -> list[int]:
        """Returns torch's version counters, which every change that torch knows of increases."""
        return [self.flat._version, *(p._version for p in self.params)]

    def _blocks(self, part: BucketPart | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yields for every block its place, and the block of every tensor [S]."""
        for each in self.parts if part is None else [part]:
            for at in range(each.start, each.stop, self._block):
                end = min(at + self._block, each.stop)
                yield _BlockPosition(each, at), *(tensor[at:end] for tensor in tensors)

    def _count(self, tensor: Tensor, passes: int) -> None:
        self.moved_bytes += passes * tensor.numel() * tensor.element_size()


def make_buckets(
    params: Sequence[Parameter], bytes_per_bucket: int, views: bool, rules: Iterator[Sharing], first: int = 0
) -> list[Bucket]:
    """Fills buckets with parameters in reverse order, the order of their gradients, split by dtype, device and size.

    rules: yields the rule of every bucket. first: the number of the first one.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for p in reversed(params):
        groups.setdefault((p.dtype, p.device), []).append(p)
    buckets: list[Bucket] = []

    def make(filled: list[Parameter]) -> None:
        buckets.append(Bucket(first + len(buckets), filled, views, next(rules)))

    for group in groups.values():
        filled: list[Parameter] = []
        size = 0
        for p in group:
            filled.append(p)
            size += p.numel() * p.element_size()
            if size >= bytes_per_bucket:
                make(filled)
                filled, size = [], 0
        if filled:
            make(filled)
    return buckets
