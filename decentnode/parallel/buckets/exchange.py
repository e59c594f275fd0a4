"""The exchange of buckets between ranks: launched without blocking, waited for with a deadline that names a peer.

Every rank launches the same buckets in the same order, peers ascending. The common order keeps the point-to-point
operations of one communicator from deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode import clock
from decentnode.errors import PeerLost
from decentnode.graph.base import RoundView
from decentnode.parallel.buckets.advance import Rows
from decentnode.parallel.buckets.bucket import Bucket, BucketPart
from decentnode.parallel.buckets.host_memory import HostCopies
from decentnode.parallel.plan import Plan
from decentnode.parallel.process_group import backend_of, device_of_group, gather_texts, num_ranks, wait

T = TypeVar("T")


def _go_on(peer: int, since: float, now: float) -> None:
    """Waits on for a rank."""


@dataclass
class Flight:
    """The exchange of one bucket in flight."""

    step: int
    works: list[tuple[Any, list[int]]] = field(default_factory=list)
    """Operations, each with the ranks that it waits for."""
    landings: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Slots of a bucket, and where in host memory their content arrives."""
    use: int = 0
    """The number of the exchange, in shared memory."""


class BucketExchange:
    """The exchange of all buckets: a bucket arrives, is mixed part by part, and may depart again for the next step."""

    interrupt: Callable[[int, float, float], None] = staticmethod(_go_on)
    """interrupt(rank, since, now): called from time to time while a rank is waited for, where a transport can; raises
    PeerLost to end the wait."""
    over = False
    """Whether nothing is sent any more in this step (membership/exchange.py)."""

    def __init__(self, plan: Plan, timeout_seconds: float) -> None:
        """Blocking: all ranks make the process groups of the topology's cliques, in the same order."""
        self.plan, self.graph, self.rank, self.timeout_seconds = plan, plan.graph, plan.rank, timeout_seconds
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        """Exposed communication: the seconds that all waits have taken."""
        self._step = -1
        self._flights: dict[int, Flight] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._copies: dict[int, HostCopies] = {}
        """Of the buckets that the process group cannot send from where they lie."""
        self._open_groups()

    def _open_groups(self) -> None:
        everybody = tuple(range(self.graph.num_nodes))
        timeout = timedelta(seconds=self.timeout_seconds)
        for members in self.plan.cliques():
            self._groups[members] = None if members == everybody else dist.new_group(list(members), timeout=timeout)

    # -- sending ----------------------------------------------------------------------------------------------

    def launch(self, buckets: Sequence[Bucket], step: int) -> None:
        """Sends every bucket as it is now; not blocking."""
        self.begin(step)
        for bucket in buckets:
            for part in bucket.parts:
                self.snapshot(bucket, part)
            self.depart(bucket)

    def begin(self, step: int) -> None:
        """Buckets that depart from now on belong to this step."""
        self._step = step

    def snapshot(self, bucket: Bucket, part: BucketPart, cached: bool = False) -> None:
        """Takes the snapshot of a part that its bucket will send. cached: the part is in the cache."""
        place = self._place(bucket)
        if place is not None:
            copy = None if self._mean_group(self._step) is None else bucket.slot(0)
            bucket.snapshot_part(part, place, copy, cached)

    def one_pass(self, bucket: Bucket, flight: Flight | None) -> bool:
        """Whether `advance` can replace `mix`, the optimizer's step and `snapshot` for the parts of a bucket."""
        groups = [self._step] if flight is None else [self._step, flight.step]
        view = None if flight is None else self.plan.view(flight.step)
        return bucket.one_pass(view) and all(self._mean_group(step) is None for step in groups)

    def advance(self, bucket: Bucket, part: BucketPart, flight: Flight | None, factor: float, rows: Rows) -> None:
        """Mixes a part of a bucket that has arrived, takes the optimizer's step and the next snapshot, in one pass."""
        view = None if flight is None else self.plan.view(flight.step, factor)
        bucket.advance(part, view, rows, self._place(bucket))

    def _place(self, bucket: Bucket) -> Tensor | None:
        """The tensor [S] that snapshots are written to; None in a step without neighbors."""
        view = self.plan.view(self._step)
        return bucket.sent_buffer() if view.neighbors or view.sources else None

    def _departing(self, bucket: Bucket) -> RoundView | None:
        """The round in which a bucket departs, whose snapshot is `sent` from now on; None without neighbors."""
        view = self.plan.view(self._step)
        if not view.neighbors and not view.sources:
            return None
        bucket.sent = bucket.sent_buffer()
        return view

    def depart(self, bucket: Bucket) -> None:
        """Sends a bucket of which all parts have their snapshots; not blocking."""
        view = self._departing(bucket)
        if view is None:
            return
        flight = self._flights[bucket.index] = Flight(self._step)
        members = self._mean_group(self._step)
        if members is not None:
            others, total = [peer for peer in members if peer != self.rank], self._leaving(bucket, bucket.slot(0))
            if total is not bucket.slot(0):
                flight.landings.append((bucket.slot(0), total))
            with self._blamed(self._step, others):
                work = dist.all_reduce(total, group=self._groups[members], async_op=True)
            flight.works.append((work, others))
            self.bytes_sent += 2 * bucket.size_bytes * (len(members) - 1) // len(members)
            return
        operations, whom = [], []
        sent, landing = self._leaving(bucket, bucket.sent), self._landing(bucket, flight, view.sources)
        for peer in sorted({*view.neighbors, *view.sources}):
            if peer in view.neighbors:
                operations.append(dist.P2POp(dist.isend, sent, peer))
                whom.append([peer])
                self.bytes_sent += bucket.size_bytes
            if peer in view.sources:
                operations.append(dist.P2POp(dist.irecv, landing[peer], peer))
                whom.append([peer])
        everybody = sorted({*view.neighbors, *view.sources})
        with self._blamed(self._step, everybody):  # torch raises here already for a connection that it knows is broken
            works = dist.batch_isend_irecv(operations)
        flight.works = list(zip(works, whom if len(works) == len(whom) else [everybody] * len(works), strict=True))

    def _host_copies(self, bucket: Bucket) -> HostCopies | None:
        """None where the process group sends a bucket from where it lies. gloo sums what lies on a GPU, but does not
        send it from rank to rank; of all that passes, the copies are made here."""
        device = bucket.flat.device
        if device.type == "cpu" or backend_of(device) == "nccl":
            return None
        return self._copies.setdefault(bucket.index, HostCopies(bucket))

    def _leaving(self, bucket: Bucket, tensor: Tensor) -> Tensor:
        """A tensor [S] of a bucket, or its copy, where the process group can send it. Blocking for a copy."""
        copies = self._host_copies(bucket)
        return tensor if copies is None else copies.of_sent(tensor)

    def _landing(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> dict[int, Tensor]:
        """Gives a bucket its slots for what comes from these ranks. By rank: the tensor [S] that the process group
        receives into, the slot or one that `_land` copies there."""
        copies, found = self._host_copies(bucket), {}
        for number, peer in enumerate(sources):
            found[peer] = bucket.received[peer] = bucket.slot(number)
            if copies is not None:
                found[peer] = copies.of_slot(number)
                flight.landings.append((bucket.received[peer], found[peer]))
        return found

    @staticmethod
    def _land(flight: Flight) -> None:
        """Blocking: copies what has arrived in host memory to where it belongs."""
        for slot, arrived in flight.landings:
            slot.copy_(arrived)

    def _mean_group(self, step: int) -> tuple[int, ...] | None:
        """The ranks that average with one all_reduce in a step; None if payloads are sent from rank to rank."""
        clique = self.plan.clique(step)
        return clique.members if clique is not None and clique.members in self._groups else None

    # -- receiving --------------------------------------------------------------------------------------------

    def finish(self, bucket: Bucket, factor: float = 1.0) -> None:
        """Blocking: waits for a bucket and mixes it. Raises PeerLost naming the rank that did not answer."""
        flight = self.arrive(bucket)
        if flight is not None:
            for part in bucket.parts:
                self.mix(bucket, part, flight, factor)
            self.release(bucket)

    def arrive(self, bucket: Bucket) -> Flight | None:
        """Blocking: waits for a bucket; None if it was not sent. Raises PeerLost naming a rank that did not answer."""
        flight = self._flights.get(bucket.index)
        if flight is not None:
            self._wait(flight)
        return flight

    def summed(self, bucket: Bucket, flight: Flight) -> Tensor | None:
        """The sum [S] of all snapshots of a bucket that has arrived; None where they came one by one."""
        return None if self._mean_group(flight.step) is None else bucket.slot(0)

    def mix(self, bucket: Bucket, part: BucketPart, flight: Flight, factor: float = 1.0, cached: bool = False) -> None:
        """Mixes a part of a bucket that has arrived."""
        if self._mean_group(flight.step) is not None:
            clique = self.plan.clique(flight.step)
            assert clique is not None
            n = len(clique.members)
            bucket.mix_mean(bucket.slot(0), n, factor * clique.strength, part, cached)
        else:
            bucket.mix(self.plan.view(flight.step, factor), part, cached)

    def release(self, bucket: Bucket) -> None:
        """To be called when all parts of a bucket are mixed: the received parameters are no longer needed."""
        del self._flights[bucket.index]

    def make_room(self, bucket: Bucket) -> None:
        """Blocking until the bucket's next snapshots can be written."""

    def flight_of(self, bucket: Bucket) -> Flight | None:
        """The exchange of a bucket that is under way."""
        return self._flights.get(bucket.index)

    def in_flight(self) -> bool:
        """Whether any exchange is under way."""
        return bool(self._flights)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:
        """Blocking: waits for what these ranks alone have sent. Raises PeerLost. Only where waits can be broken off."""
        raise NotImplementedError

    def forget(self, bucket: Bucket) -> None:
        """Takes a bucket's exchange for over, whatever has not arrived."""
        self._flights.pop(bucket.index, None)

    def _wait(self, flight: Flight) -> None:
        started = clock.now()
        for work, peers in flight.works:
            with self._blamed(flight.step, peers):
                if dist.get_backend() == "nccl":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.timeout_seconds))
        self._land(flight)
        self.wait_seconds += clock.now() - started

    def _look_for(self, peer: int, started: float, now: float, step: int, waiting: str = "") -> None:
        """Called from time to time by what waits for a rank since `started`: raises PeerLost once that is in vain."""
        self.interrupt(peer, started, now)
        if now - started > self.timeout_seconds:
            raise PeerLost(f"rank {self.rank}: the exchange of step {step} with rank {peer} took longer than "
                           f"{self.timeout_seconds:g} s{waiting}", [peer])  # fmt: skip

    @contextlib.contextmanager
    def _blamed(self, step: int, peers: list[int]) -> Iterator[None]:
        """Turns what torch.distributed raises inside into PeerLost, with the ranks that may be the cause."""
        try:
            yield
        except RuntimeError as error:
            who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(map(str, peers))}"
            raise PeerLost(
                f"rank {self.rank}: the exchange of step {step} with {who} failed or took longer than "
                f"{self.timeout_seconds:g} s: {error}", peers,
            ) from error

    def drain(self) -> None:
        """Blocking: waits for all buckets in flight and discards them."""
        for flight in self._flights.values():
            self._wait(flight)
        self._flights.clear()

    def finish_all(self, seconds: float) -> None:
        """Blocking for so long at most: waits for all buckets in flight, as the process ends."""
        self.timeout_seconds = seconds
        self.drain()

    # -- the end ----------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """Ends this rank's part; returns whether operations in flight still use the buckets' memory. Idempotent."""
        self._groups.clear()
        return bool(self._flights)

    def abandon(self) -> None:
        """Ends this rank's part once nobody needs anything of it. Idempotent."""
        self.end()

    def average(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context for an operation of all ranks. Raises PeerLost if it fails and a rank is known not to come to it.

        what: the operation's name, for messages.
        """
        return contextlib.nullcontext()

    def run_average(self, what: str, work: Callable[[Callable[[Tensor], Tensor]], T],
                    restart: Callable[[], None] | None = None) -> T:  # fmt: skip
        """What `work` returns, an operation of all ranks that is given `mean_over_ranks`. Raises as `average`.

        restart: given, what is in flight is discarded before, and `restart` begins the exchange anew afterwards.
        """
        if restart is not None:
            self.drain()
        with self.average(what):
            found = work(mean_over_ranks)
        if restart is not None:
            restart()
        return found

    def tell(self, text: str, what: str) -> dict[int, str]:
        """Blocking, on all ranks: by rank, the text that each gives; by uid where ranks come and go. Raises as
        `average`."""
        with self.average(what):
            told = gather_texts(text, device_of_group(), what) if num_ranks() > 1 else [text]
        return dict(enumerate(told))


def mean_over_ranks(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Blocking: replaces a tensor by its mean over all ranks, or over those of a group."""
    count = dist.get_world_size(group)
    if count > 1:
        wait(dist.all_reduce(tensor, group=group, async_op=True))
        tensor.div_(count)
    return tensor
