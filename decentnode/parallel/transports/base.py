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

FIRST_TAG = 1 << 20
"""gloo matches point-to-point operations by their tags. Those of exchanges differ from the tag 0 of a script, whose
`recv` from any rank would otherwise take a bucket."""


def _keep_waiting(peer: int, since: float, now: float) -> None:
    """Continues the wait for a rank: the default of `BucketExchange.interrupt`."""


@dataclass
class Flight:
    """The exchange of one bucket in flight."""

    bucket: Bucket
    step: int
    works: list[tuple[Any, list[int]]] = field(default_factory=list)
    """Operations, each with the ranks that it waits for."""
    deliveries: dict[int, Callable[[], object]] = field(default_factory=dict)
    """Rank -> a function that moves what arrived from it to its destination; removed once called. An all_reduce has an
    entry for this rank itself."""
    number: int = 0
    """The number of the exchange, in shared memory."""


class BucketExchange(abc.ABC):
    """The exchange of all buckets: a bucket arrives, is mixed part by part, and may depart again for the next step."""

    interrupt: Callable[[int, float, float], None] = staticmethod(_keep_waiting)
    """interrupt(rank, since, now): called periodically while this rank waits for another, if the transport can; raises
    PeerLost to end the wait."""
    is_paused = False
    """Whether nothing more is sent in this step (regrouping.py)."""

    def __init__(self, plan: Plan, timeout_seconds: float) -> None:
        self.plan, self.graph, self.rank, self.timeout_seconds = plan, plan.graph, plan.rank, timeout_seconds
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        """Exposed communication: the total time that this rank has waited, in seconds."""
        self._step = -1
        self._flights: dict[int, Flight] = {}

    # -- sending ----------------------------------------------------------------------------------------------

    def launch(self, buckets: Sequence[Bucket], step: int) -> None:
        """Sends the current values of every bucket; not blocking."""
        self.begin(step)
        for bucket in buckets:
            for part in bucket.parts:
                self.snapshot(bucket, part)
            self.depart(bucket)

    def begin(self, step: int) -> None:
        """Assigns the buckets that depart from now on to this step."""
        self._step = step

    def snapshot(self, bucket: Bucket, part: BucketPart, cached: bool = False) -> None:
        """Takes the snapshot of a part for its bucket's next departure. cached: the part is in the cache."""
        place = self._snapshot_target(bucket)
        if place is not None:
            bucket.snapshot_part(part, place, None, cached)

    def supports_one_pass(self, bucket: Bucket, flight: Flight | None) -> bool:
        """Returns whether `advance` can replace `mix`, the optimizer's step and `snapshot` for a bucket's parts."""
        return bucket.supports_one_pass(None if flight is None else self.plan.view(flight.step))

    def advance(self, bucket: Bucket, part: BucketPart, flight: Flight | None, factor: float, rows: Rows) -> None:
        """Mixes a part of an arrived bucket, takes the optimizer's step and the next snapshot, in one pass."""
        view = None if flight is None else self.plan.view(flight.step, factor)
        bucket.advance(part, view, rows, self._snapshot_target(bucket))

    def _snapshot_target(self, bucket: Bucket) -> Tensor | None:
        """Returns the tensor [S] that snapshots are written to; None in a step without neighbors."""
        view = self.plan.view(self._step)
        return bucket.send_buffer() if view.neighbors or view.sources else None

    def _begin_departure(self, bucket: Bucket) -> RoundView | None:
        """Makes the snapshot the bucket's `sent`, and returns the round of the departure; None without neighbors."""
        view = self.plan.view(self._step)
        if not view.neighbors and not view.sources:
            return None
        bucket.sent = bucket.send_buffer()
        return view

    @abc.abstractmethod
    def depart(self, bucket: Bucket) -> None:
        """Sends a bucket whose parts all have their snapshots; not blocking."""

    # -- receiving --------------------------------------------------------------------------------------------

    def finish(self, bucket: Bucket, factor: float = 1.0) -> None:
        """Waits for a bucket and mixes it. Blocking. Raises PeerLost naming the rank that did not answer."""
        flight = self.arrive(bucket)
        if flight is not None:
            for part in bucket.parts:
                self.mix(bucket, part, flight, factor)
            self.release(bucket)

    def arrive(self, bucket: Bucket) -> Flight | None:
        """Waits for a bucket to arrive. Returns None if it was not sent. Blocking. Raises PeerLost naming a rank that
        did not answer."""
        flight = self._flights.get(bucket.index)
        if flight is not None:
            self._await(flight)
        return flight

    def _await(self, flight: Flight) -> None:
        """Waits until all of a flight has arrived. Blocking. Raises PeerLost naming a rank that did not answer."""
        raise NotImplementedError

    def summed(self, bucket: Bucket, flight: Flight) -> Tensor | None:  # noqa: ARG002
        """Returns the sum [S] of all snapshots of a bucket that has arrived; None if they arrived one by one."""
        return None

    def mix(self, bucket: Bucket, part: BucketPart, flight: Flight, factor: float = 1.0, cached: bool = False) -> None:
        """Mixes a part of a bucket that has arrived."""
        bucket.mix(self.plan.view(flight.step, factor), part, cached)

    def release(self, bucket: Bucket) -> None:
        """Ends a bucket's exchange; to be called when all of its parts are mixed. Frees the received parameters."""
        del self._flights[bucket.index]

    def wait_for_free_slot(self, bucket: Bucket) -> None:  # noqa: B027  (most transports always have room)
        """Waits until the bucket's next snapshots can be written. Blocking."""

    def flight_of(self, bucket: Bucket) -> Flight | None:
        """Returns a bucket's exchange in flight; None if there is none."""
        return self._flights.get(bucket.index)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:
        """Waits for what these ranks alone have sent. Blocking. Raises PeerLost. Only with interruptible waits."""
        raise NotImplementedError

    def forget(self, bucket: Bucket) -> None:
        """Drops a bucket's exchange, even if parts of it have not arrived."""
        self._flights.pop(bucket.index, None)

    def _check_wait(self, peer: int, started: float, now: float, step: int, waiting: str = "") -> None:
        """Ends the wait for a rank, with PeerLost, if it is lost or the timeout has passed since `started`. To be
        called periodically by code that waits."""
        self.interrupt(peer, started, now)
        if now - started > self.timeout_seconds:
            raise PeerLost(f"rank {self.rank}: the exchange of step {step} with rank {peer} took longer than "
                           f"{self.timeout_seconds:g} s{waiting}{self._silence_hint(peer)}", [peer])  # fmt: skip

    def _silence_hint(self, peer: int) -> str:  # noqa: ARG002
        """Returns what to try if a rank that sends nothing runs, as the end of a sentence; "" for nothing."""
        return ""

    def drain(self) -> None:
        """Waits for all buckets in flight and discards them. Blocking. Raises PeerLost as `arrive`."""
        for flight in list(self._flights.values()):
            self._await(flight)
            self.release(flight.bucket)

    def finish_all(self, seconds: float) -> None:
        """Waits for all buckets in flight, at most so many seconds, as the process ends. Blocking."""
        self.timeout_seconds = seconds
        self.drain()

    # -- the end ----------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """Ends this rank's part; returns whether operations in flight still use the buckets' memory. Idempotent."""
        return bool(self._flights)

    def abandon(self) -> None:
        """Ends this rank's part once no other rank needs anything from it. Idempotent."""
        self.end()

    def average(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Wraps a collective of all ranks. Raises PeerLost if it fails and a rank is known not to take part in it.

        what: the operation's name, for messages.
        """
        return contextlib.nullcontext()

    def run_average(self, what: str, work: Callable[[Callable[[Tensor], Tensor]], T],
                    restart: Callable[[], None] | None = None) -> T:  # fmt: skip
        """Returns what `work` returns, a collective of all ranks that is given `mean_over_ranks`. Raises as `average`.

        restart: if given, what is in flight is discarded before, and `restart` starts a new exchange afterwards.
        """
        if restart is not None:
            self.drain()
        with self.average(what):
            found = work(mean_over_ranks)
        if restart is not None:
            restart()
        return found

    def gather_by_rank(self, text: str, what: str) -> dict[int, str]:
        """Returns the texts of all ranks, by rank; by uid if the membership may change. Blocking, on all ranks. Raises
        as `average`."""
        with self.average(what):
            texts = gather_texts(text, device_of_group(), what) if num_ranks() > 1 else [text]
        return dict(enumerate(texts))
