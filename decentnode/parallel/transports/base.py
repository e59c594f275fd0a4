"""The contract of a transport: buckets depart without blocking; waits for them have a deadline, and name a peer."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from decentnode.errors import PeerLost
from decentnode.graph.base import RoundView
from decentnode.parallel.buckets.advance import Rows
from decentnode.parallel.buckets.bucket import Bucket, BucketPart
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.collectives import gather_texts, mean_over_ranks
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks

T = TypeVar("T")


def _go_on(peer: int, since: float, now: float) -> None:
    """Waits on for a rank."""


@dataclass
class Flight:
    """The exchange of one bucket in flight."""

    bucket: Bucket
    step: int
    works: list[tuple[Any, list[int]]] = field(default_factory=list)
    """Operations, each with the ranks that it waits for."""
    landings: dict[int, Callable[[], object]] = field(default_factory=dict)
    """Rank -> brings what arrived from it to where it belongs; of those of which that has not been done yet. An
    all_reduce has this rank's."""
    use: int = 0
    """The number of the exchange, in shared memory."""


class BucketExchange(abc.ABC):
    """The exchange of all buckets: a bucket arrives, is mixed part by part, and may depart again for the next step."""

    interrupt: Callable[[int, float, float], None] = staticmethod(_go_on)
    """interrupt(rank, since, now): called from time to time while a rank is waited for, where a transport can; raises
    PeerLost to end the wait."""
    over = False
    """Whether nothing is sent any more in this step (regrouping.py)."""

    def __init__(self, plan: Plan, timeout_seconds: float) -> None:
        self.plan, self.graph, self.rank, self.timeout_seconds = plan, plan.graph, plan.rank, timeout_seconds
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        """Exposed communication: the seconds that all waits have taken."""
        self._step = -1
        self._flights: dict[int, Flight] = {}

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
            bucket.snapshot_part(part, place, None, cached)

    def one_pass(self, bucket: Bucket, flight: Flight | None) -> bool:
        """Whether `advance` can replace `mix`, the optimizer's step and `snapshot` for the parts of a bucket."""
        return bucket.one_pass(None if flight is None else self.plan.view(flight.step))

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

    @abc.abstractmethod
    def depart(self, bucket: Bucket) -> None:
        """Sends a bucket of which all parts have their snapshots; not blocking."""

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
            self._await(flight)
        return flight

    def _await(self, flight: Flight) -> None:
        """Blocking until all of a flight has arrived. Raises PeerLost naming a rank that did not answer."""
        raise NotImplementedError

    def summed(self, bucket: Bucket, flight: Flight) -> Tensor | None:  # noqa: ARG002
        """The sum [S] of all snapshots of a bucket that has arrived; None where they came one by one."""
        return None

    def mix(self, bucket: Bucket, part: BucketPart, flight: Flight, factor: float = 1.0, cached: bool = False) -> None:
        """Mixes a part of a bucket that has arrived."""
        bucket.mix(self.plan.view(flight.step, factor), part, cached)

    def release(self, bucket: Bucket) -> None:
        """To be called when all parts of a bucket are mixed: the received parameters are no longer needed."""
        del self._flights[bucket.index]

    def make_room(self, bucket: Bucket) -> None:  # noqa: B027  (most transports always have room)
        """Blocking until the bucket's next snapshots can be written."""

    def flight_of(self, bucket: Bucket) -> Flight | None:
        """The exchange of a bucket that is under way."""
        return self._flights.get(bucket.index)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:
        """Blocking: waits for what these ranks alone have sent. Raises PeerLost. Only where waits can be broken off."""
        raise NotImplementedError

    def forget(self, bucket: Bucket) -> None:
        """Takes a bucket's exchange for over, whatever has not arrived."""
        self._flights.pop(bucket.index, None)

    def _look_for(self, peer: int, started: float, now: float, step: int, waiting: str = "") -> None:
        """Called from time to time by what waits for a rank since `started`: raises PeerLost once that is in vain."""
        self.interrupt(peer, started, now)
        if now - started > self.timeout_seconds:
            raise PeerLost(f"rank {self.rank}: the exchange of step {step} with rank {peer} took longer than "
                           f"{self.timeout_seconds:g} s{waiting}", [peer])  # fmt: skip

    def drain(self) -> None:
        """Blocking: waits for all buckets in flight and discards them. Raises PeerLost as `arrive`."""
        for flight in list(self._flights.values()):
            self._await(flight)
            self.release(flight.bucket)

    def finish_all(self, seconds: float) -> None:
        """Blocking for so long at most: waits for all buckets in flight, as the process ends."""
        self.timeout_seconds = seconds
        self.drain()

    # -- the end ----------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """Ends this rank's part; returns whether operations in flight still use the buckets' memory. Idempotent."""
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
