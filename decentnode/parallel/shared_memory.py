"""The exchange between ranks of one host: a neighbor's parameters are mixed straight from its memory.

Every rank has one file in /dev/shm (mode 0600, its name taken away once everybody has it mapped): a header of
counters, then two places for all buckets. A step's parameters go into one place while neighbors may still read the
step before from the other. Who waits looks from time to time whether all ranks still take part (presence.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import PeerLost
from decentnode.parallel.buckets import Bucket
from decentnode.parallel.exchange import BucketExchange, Flight
from decentnode.parallel.plan import Plan
from decentnode.parallel.presence import WORDS, Absence, Presence
from decentnode.parallel.process_group import check_alike, together

FOLDER = Path("/dev/shm")
SETTLE_SECONDS = 0.5
PLACES, ALIGNMENT, PAGE = 2, 128, 4096
MAX_NEIGHBORS = 8
POLL_SECONDS = (10e-6, 500e-6)
LOOK_SECONDS = 0.05
"""How often who waits looks whether the ranks still take part: a system call per rank, 0.5 us."""


def usable(buckets: Sequence[Bucket], plan: Plan, device: torch.device) -> bool:
    """Blocking, alike on all ranks: whether all of them are on one host with room, and share memory in order.

    Only where the processor keeps stores in order (x86), so that a counter is never seen before the bytes it counts.
    """
    most = plan.most_sources()
    need = PLACES * sum(b.size_bytes for b in buckets) + (1 << 20)
    try:
        free = os.statvfs(FOLDER)
        room = free.f_bavail * free.f_frsize > 2 * need * plan.graph.num_nodes
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.stat(FOLDER).st_dev} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        room, host = False, secrets.token_hex(8)
    fits = device.type == "cpu" and room and most <= MAX_NEIGHBORS and platform.machine() in ("x86_64", "AMD64")
    own = torch.frombuffer(bytearray(host.encode()[:128].ljust(128)), dtype=torch.uint8).to(device)
    hosts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(hosts, own)
    everybody = torch.tensor([int(fits and all(torch.equal(own, each) for each in hosts))], device=device)
    dist.all_reduce(everybody, op=dist.ReduceOp.MIN)
    return bool(everybody)


def _close(handles: Sequence[int]) -> None:
    for handle in handles:
        if handle >= 0:
            os.close(handle)


class SharedMemoryExchange(BucketExchange):
    """`BucketExchange` through shared memory; made by all ranks together."""

    def __init__(self, plan: Plan, timeout_seconds: float, buckets: Sequence[Bucket]) -> None:
        """Blocking. Raises OSError when the file cannot be made."""
        super().__init__(plan, timeout_seconds)
        n, rank = plan.graph.num_nodes, plan.rank
        self._count = len(buckets)
        header = 8 * (self._count + n + WORDS)
        at, self._offsets = -(-header // PAGE) * PAGE, []
        for _ in range(PLACES):
            starts = []
            for bucket in buckets:
                starts.append(at)
                at += -(-bucket.size_bytes // ALIGNMENT) * ALIGNMENT
            self._offsets.append(starts)
        self._size = max(at, PAGE)
        check_alike("layout of buckets", [str(self._offsets)], torch.device("cpu"))
        token = torch.tensor([secrets.randbits(62)])
        dist.broadcast(token, 0)
        handles = self._open_files([FOLDER / f"decentnode-ddp-{int(token):016x}-{r}" for r in range(n)])
        with together("map shared memory"):  # which all leave together: whose lock is not there from then on is gone
            self._maps = self._mapped(handles)
            words = [np.frombuffer(m, np.int64, WORDS, 8 * (self._count + n)) for m in self._maps]
            self._presence = Presence(handles, words, rank)
        self._published = [np.frombuffer(m, np.int64, self._count) for m in self._maps]
        """[rank][bucket]: 1 + the step that lies there."""
        self._read = [np.frombuffer(m, np.int64, n, 8 * self._count) for m in self._maps]
        """[rank][reader]: 1 + the step that the reader has done with."""
        self._tensors = [[[self._tensor(m, b, starts[b.index]) for b in buckets] for starts in self._offsets]
                         for m in self._maps]  # fmt: skip
        for place in self._tensors[rank]:
            for tensor in place:
                tensor.zero_()
        self._readers: list[tuple[int, tuple[int, ...]]] = [(0, ())] * PLACES
        """[place] the exchange that lies there, and who reads it."""
        self._held: tuple[int, tuple[int, ...]] = (0, ())
        """Who has to let go before the next place is written."""
        self._buckets = buckets
        self._use = 0

    def _open_files(self, paths: Sequence[Path]) -> list[int]:
        """Blocking: [rank] that rank's file, open; no file has a name any more. Raises OSError where this rank could
        not, AssemblyError where another one could not: all ranks go on, or none."""
        handles = [-1] * len(paths)
        try:
            with together("make shared memory"):
                handles[self.rank] = os.open(paths[self.rank], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                os.posix_fallocate(handles[self.rank], 0, self._size)
            with together("open shared memory"):
                for rank, path in enumerate(paths):
                    if rank != self.rank:
                        handles[rank] = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                    status = os.fstat(handles[rank])
                    if status.st_size != self._size or status.st_uid != os.geteuid():
                        raise OSError(f"the shared memory of rank {rank} is not what it should be: {status.st_size} "
                                      "bytes")  # fmt: skip
        except BaseException:
            _close(handles)
            raise
        finally:
            if handles[self.rank] >= 0:
                paths[self.rank].unlink(missing_ok=True)
        return handles

    def _mapped(self, handles: list[int]) -> list[mmap.mmap]:
        """Raises OSError; the files are closed then."""
        try:
            return [mmap.mmap(handle, self._size) for handle in handles]
        except OSError:
            _close(handles)
            raise

    @staticmethod
    def _tensor(memory: mmap.mmap, bucket: Bucket, offset: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.frombuffer(memory, dtype=bucket.flat.dtype, count=bucket.flat.numel(), offset=offset)

    def _open_groups(self) -> None:
        """None: everybody reads everybody's memory."""

    # -- one step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        super().begin(step)
        self._presence.at_step(step)
        self._use += 1
        self._held = self._readers[self._use % PLACES]
        self._readers[self._use % PLACES] = (self._use, self.plan.view(step).neighbors)

    def _place(self, bucket: Bucket) -> Tensor:
        """Blocking, for the first part of a step: until neighbors have let go of the place."""
        before, readers = self._held
        for reader in readers:
            # who has sent all of the step after has let go of it
            self._wait_for(partial(self._has_read, reader, before), reader, self._step, before + 1, "to let go of")
        self._held = (0, ())
        return self._home(bucket)

    def depart(self, bucket: Bucket) -> None:
        bucket.sent = self._home(bucket)
        self._flights[bucket.index] = Flight(self._step, use=self._use)
        self.bytes_sent += len(self._readers[self._use % PLACES][1]) * bucket.size_bytes
        self._published[self.rank][bucket.index] = self._use

    def arrive(self, bucket: Bucket) -> Flight | None:
        flight = self._flights.get(bucket.index)
        if flight is not None:
            use = flight.use
            for peer in self.plan.view(flight.step).sources:
                self._wait_for(partial(self._has_published, peer, bucket.index, use), peer, flight.step, use, "for")
                bucket.received[peer] = self._tensors[peer][use % PLACES][bucket.index]
        return flight

    def release(self, bucket: Bucket) -> None:
        flight = self._flights.pop(bucket.index)
        if all(other.use != flight.use for other in self._flights.values()):
            for peer in self.plan.view(flight.step).sources:
                self._read[peer][self.rank] = flight.use

    def drain(self) -> None:
        for bucket in [b for b in self._buckets if b.index in self._flights]:
            self.arrive(bucket)
            self.release(bucket)

    def end(self) -> bool:
        """Others have mapped this rank's memory themselves; they are told that no more comes into it."""
        self._presence.close()
        return False

    @contextlib.contextmanager
    def average(self, what: str) -> Iterator[None]:
        self._presence.enter_average()
        try:
            yield
        except RuntimeError as error:
            absence = self._who_left()
            if absence is None:
                raise
            raise PeerLost(f"rank {self.rank}: {what} failed: {absence.reason}", [absence.rank]) from error

    def _who_left(self) -> Absence | None:
        """Blocking for SETTLE_SECONDS at most: a process that ends may lose its connections before its lock."""
        others = [r for r in range(self.graph.num_nodes) if r != self.rank]
        until = time.perf_counter() + SETTLE_SECONDS
        while (absence := self._presence.absent(others)) is None and time.perf_counter() < until:
            time.sleep(POLL_SECONDS[1])
        return absence

    def _home(self, bucket: Bucket) -> Tensor:
        return self._tensors[self.rank][self._use % PLACES][bucket.index]

    def _has_published(self, peer: int, bucket: int, use: int) -> bool:
        return bool(self._published[peer][bucket] >= use)

    def _has_read(self, reader: int, use: int) -> bool:
        return bool(self._read[self.rank][reader] >= use)

    def _wait_for(self, done: Callable[[], bool], peer: int, step: int, use: int, what: str) -> None:
        """Blocking: until `done`, which it is once `peer` has sent all of exchange `use` at the latest.

        Raises PeerLost when the time is up, or when a rank that has not sent all of that exchange never will, be it
        `peer` or one that `peer` may wait for.
        """
        if done():
            return
        started, pause = time.perf_counter(), POLL_SECONDS[0]
        look, late = started + LOOK_SECONDS, f"rank {self.rank}: the exchange of step {step} with rank {peer}"
        while not done():
            now = time.perf_counter()
            if now > look:
                look = now + LOOK_SECONDS
                absence = self._absent(use)
                if absence is not None and not done():
                    raise PeerLost(f"{late} failed: {absence.reason}", [absence.rank])
            if now - started > self.timeout_seconds:
                raise PeerLost(f"{late} took longer than {self.timeout_seconds:g} s (waiting {what} its parameters)",
                               [peer])  # fmt: skip
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
        self.wait_seconds += time.perf_counter() - started

    def _absent(self, use: int) -> Absence | None:
        """Why a rank will never send all of exchange `use`; None if none is known."""
        def behind() -> set[int]:
            return {r for r, counters in enumerate(self._published) if r != self.rank and counters.min() < use}

        absence = self._presence.absent(sorted(behind()))
        return absence if absence is not None and absence.rank in behind() else None
