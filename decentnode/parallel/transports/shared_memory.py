"""The exchange of buckets between ranks of one host: a rank mixes its neighbors' parameters directly from their memory.

Every rank makes one segment of shared memory (communication/shared_memory/segment.py), which all ranks map, and which
is unlinked as soon as they have. Its header has the counters, its body two slots, each with room for all buckets: a
rank writes the parameters of a step into one slot while its neighbors may still read those of the step before from the
other. A rank that waits for a counter polls it, with growing pauses, and periodically checks whether all ranks still
take part (presence.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode import clock, entropy
from decentnode.communication.shared_memory.segment import (
    FOLDER,
    PAGE,
    Backoff,
    Segment,
    free_bytes,
    placed,
    remove_stale,
    rounded,
    stores_in_order,
)
from decentnode.errors import PeerLost
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.membership.control import ConnectionBroken
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.agreement import (
    check_same_on_all_ranks,
    collective_operation,
    succeed_on_all_ranks,
)
from decentnode.parallel.process_group.collectives import wait
from decentnode.parallel.process_group.default_group import device_of_group
from decentnode.parallel.transports.base import BucketExchange, Flight
from decentnode.parallel.transports.presence import WORDS, Absence, Presence
from decentnode.system import boot_id
from decentnode.tensors import is_own_fault

SLOTS = 2
MAX_NEIGHBORS = 8
POLL_SECONDS = (10e-6, 500e-6)
"""Shortest and longest pause between two polls of a counter."""
CHECK_SECONDS = 0.05
"""How often a waiting rank checks whether the others still take part: one system call per rank, 0.5 us."""
SETTLE_SECONDS = 0.5
"""How long the system may take to release the locks of a process that has ended, after closing its connections."""
NAMES = re.compile(r"decentnode-ddp-[0-9a-f]{16}-\d+")
"""The names of segments: a number of the wrapper, drawn by rank 0, and the rank."""


def can_share_memory(buckets: Sequence[Bucket], plan: Plan) -> bool:
    """Returns whether all ranks are on one host that has room for their segments; the same answer on all ranks.
    Blocking.

    Requires a processor that keeps stores in order, because a rank polls nothing but counters: it must never see one
    before the parameters that it counts.
    """
    most = plan.most_sources()
    need = SLOTS * sum(b.size_bytes for b in buckets) + (1 << 20)
    try:
        room = free_bytes() > 2 * need * plan.graph.num_nodes
        host = f"{boot_id()} {os.stat(FOLDER).st_dev} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        room, host = False, entropy.word(8)
    on_cpu = all(bucket.flat.device.type == "cpu" for bucket in buckets)
    fits = on_cpu and room and most <= MAX_NEIGHBORS and stores_in_order()
    device = device_of_group()
    own = torch.frombuffer(bytearray(host.encode()[:128].ljust(128)), dtype=torch.uint8).to(device)
    hosts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    with collective_operation("look for shared memory"):
        wait(dist.all_gather(hosts, own, async_op=True))
        everybody = torch.tensor([int(fits and all(torch.equal(own, each) for each in hosts))], device=device)
        wait(dist.all_reduce(everybody, op=dist.ReduceOp.MIN, async_op=True))
    return bool(everybody)


class SharedMemoryExchange(BucketExchange):
    """`BucketExchange` through shared memory; made by all ranks together.

    Exchanges are numbered from 1 on (`number`); number u is in slot u % SLOTS. Counters only grow.
    """

    def __init__(self, plan: Plan, timeout_seconds: float, buckets: Sequence[Bucket]) -> None:
        """Blocking. Raises OSError if this rank cannot make shared memory, AssemblyError if another rank cannot."""
        super().__init__(plan, timeout_seconds)
        n, rank, count = plan.graph.num_nodes, plan.rank, len(buckets)
        end = header_bytes = rounded(8 * (count + n + WORDS), PAGE)
        starts: list[list[int]] = []
        """[slot][bucket]: its first byte in the segment."""
        for _ in range(SLOTS):
            found, end = placed([bucket.size_bytes for bucket in buckets], end)
            starts.append(found)
        check_same_on_all_ranks("layout of buckets", [str(starts)], torch.device("cpu"))
        segments = self._make_segments(max(end, header_bytes + PAGE), header_bytes)
        self._published = [each.words(0, count) for each in segments]
        """[rank][bucket]: the last exchange for which the rank has written it. Written by that rank."""
        self._read = [each.words(count, n) for each in segments]
        """[rank][reader]: the last exchange of the rank that the reader has completely mixed. Written by the reader."""
        self._presence = Presence(segments, [each.words(count + n, WORDS) for each in segments], rank)
        self._tensors = [
            [[each.tensor(b.flat.dtype, b.flat.numel(), slot[b.index]) for b in buckets] for slot in starts]
            for each in segments
        ]
        """[rank][slot][bucket]: [S] parameters."""
        for slot in self._tensors[rank]:
            for tensor in slot:
                tensor.zero_()  # touches every page before the first step
        self._readers: list[tuple[int, tuple[int, ...]]] = [(0, ())] * SLOTS
        """[slot]: the exchange in this rank's slot, and its readers."""
        self._awaited_release: tuple[int, tuple[int, ...]] = (0, ())
        """The exchange, and its readers, that must be released before the next slot can be written."""
        self._number = 0
        """The number of the exchange that departs, or departed last."""

    def _make_segments(self, size: int, header_bytes: int) -> list[Segment]:
        """Returns [rank] its segment, already unlinked. All ranks succeed, or none. Blocking."""
        remove_stale(NAMES)
        token = torch.tensor([int.from_bytes(entropy.draw(8), "little") >> 2], device="cpu")
        with collective_operation("name their shared memory"):
            wait(dist.broadcast(token, 0, async_op=True))
        paths = [FOLDER / f"decentnode-ddp-{int(token):016x}-{rank}" for rank in range(self.graph.num_nodes)]
        own, segments = None, []
        try:
            # All ranks leave this together, holding their locks: from then on an owner without a lock is gone.
            with succeed_on_all_ranks("make shared memory"):
                own = Segment.create(paths[self.rank], size, header_bytes, watched=True)
            with succeed_on_all_ranks("map shared memory"):
                for rank, path in enumerate(paths):
                    mapped = own if rank == self.rank else Segment.attach(path, size, header_bytes, watched=True)
                    segments.append(mapped)
        except BaseException:
            for each in segments if own is None else [own, *segments]:
                each.close_file()
            for path in paths:  # a rank may have been killed before it unlinked its own; this attempt has failed
                path.unlink(missing_ok=True)
            raise
        finally:
            if own is not None:
                own.unlink()
        return segments

    # -- one step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        super().begin(step)
        self._number += 1
        self._awaited_release = self._readers[self._number % SLOTS]
        self._readers[self._number % SLOTS] = (self._number, self.plan.view(step).neighbors)

    def _snapshot_target(self, bucket: Bucket) -> Tensor:
        """Returns this rank's slot; before the first part of a step, waits until the neighbors have released it."""
        before, readers = self._awaited_release
        for reader in readers:
            # A rank releases an exchange before it has sent all of the next one: `before + 1` is enough for presence.
            self._wait_for(partial(self._has_read, reader, before), reader, self._step, before + 1, "to release")
        self._awaited_release = (0, ())
        return self._own_slot(bucket)

    def depart(self, bucket: Bucket) -> None:
        bucket.sent = self._own_slot(bucket)
        self._flights[bucket.index] = Flight(bucket, self._step, number=self._number)
        self.bytes_sent += len(self._readers[self._number % SLOTS][1]) * bucket.size_bytes
        self._published[self.rank][bucket.index] = self._number
        if bucket.index == len(self._published[self.rank]) - 1:  # buckets depart in order: this one ends the step
            self._presence.at_step(self._step)

    def _await(self, flight: Flight) -> None:
        self.collect(flight.bucket, flight, self.plan.view(flight.step).sources)

    def wait_for_free_slot(self, bucket: Bucket) -> None:
        self._snapshot_target(bucket)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:
        number = flight.number
        for peer in sources:
            self._wait_for(partial(self._has_published, peer, bucket.index, number), peer, flight.step, number, "for")
            bucket.received[peer] = self._tensors[peer][number % SLOTS][bucket.index]

    def release(self, bucket: Bucket) -> None:
        flight = self._flights.pop(bucket.index)
        if all(other.number != flight.number for other in self._flights.values()):
            for peer in self.plan.view(flight.step).sources:
                self._read[peer][self.rank] = flight.number

    def end(self) -> bool:
        """Tells the other ranks that this one sends no more. They have their own mappings of its memory."""
        self._presence.close()
        return False

    @contextlib.contextmanager
    def average(self, what: str) -> Iterator[None]:
        self._presence.enter_average()
        try:
            yield
        except ConnectionBroken:
            raise
        except (PeerLost, RuntimeError) as error:
            absence = None if is_own_fault(error) else self._find_absent()
            if absence is None:
                raise
            raise PeerLost(f"rank {self.rank}: {what} failed: {absence.reason}", [absence.rank]) from error

    def _find_absent(self) -> Absence | None:
        """Returns a rank that is known not to take part any more, or None. Blocking for SETTLE_SECONDS at most, because
        a process that ends may lose its connections before its lock."""
        others = [r for r in range(self.graph.num_nodes) if r != self.rank]
        until = clock.now() + SETTLE_SECONDS
        while (absence := self._presence.absent(others)) is None and clock.now() < until:
            clock.sleep(POLL_SECONDS[1])
        return absence

    def _own_slot(self, bucket: Bucket) -> Tensor:
        return self._tensors[self.rank][self._number % SLOTS][bucket.index]

    def _has_published(self, peer: int, bucket: int, number: int) -> bool:
        return self._published[peer][bucket] >= number

    def _has_read(self, reader: int, number: int) -> bool:
        return self._read[self.rank][reader] >= number

    def _wait_for(self, done: Callable[[], bool], peer: int, step: int, number: int, what: str) -> None:
        """Waits until `done()` is true, which is the case at the latest when `peer` has sent all of exchange `number`.
        Blocking.

        Raises PeerLost after the timeout, or when a rank that has not sent all of that exchange never will: `peer`, or
        one that `peer` may wait for.
        """
        if done():
            return
        started, backoff = clock.now(), Backoff(POLL_SECONDS)
        next_check, exchange = started + CHECK_SECONDS, f"the exchange of step {step} with rank {peer}"
        while not done():
            now = clock.now()
            if now > next_check:
                next_check = now + CHECK_SECONDS
                self.interrupt(peer, started, now)
                absence = self._absent(number)
                if absence is not None and not done():
                    raise PeerLost(f"rank {self.rank}: {exchange} failed: {absence.reason}", [absence.rank])
            if now - started > self.timeout_seconds:
                raise PeerLost(f"rank {self.rank}: {exchange} took longer than {self.timeout_seconds:g} s (waiting "
                               f"{what} its parameters)", [peer])  # fmt: skip
            backoff.sleep()
        self.wait_seconds += clock.now() - started

    def _absent(self, number: int) -> Absence | None:
        """Returns a rank that will never send all of exchange `number`, and why; None if none is known."""
        def behind() -> set[int]:
            return {r for r, counters in enumerate(self._published) if r != self.rank and min(counters) < number}

        absence = self._presence.absent(sorted(behind()))
        return absence if absence is not None and absence.rank in behind() else None
