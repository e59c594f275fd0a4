"""Exchanges that survive the death of ranks: what a generation leaves unfinished is settled among the survivors.

When a generation ends, some survivors have mixed what they received in a step, and others, which waited for a dead
rank, have not. An edge that is mixed at one end alone would change the mean of the models. So every survivor reports
how far it has mixed each bucket, and a rank that still waits takes exactly the snapshots of those that have mixed its
own; the weights of all other edges are added to its own weight. These snapshots have already been sent, so no rank
waits for anything new.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import PeerLost
from decentnode.parallel.buckets.advance import Rows
from decentnode.parallel.buckets.bucket import Bucket, BucketPart
from decentnode.parallel.membership.control import PROBE_AFTER_SECONDS, ConnectionBroken
from decentnode.parallel.membership.job import MAX_ATTEMPTS, Job
from decentnode.parallel.process_group.collectives import failure_reason, gather_texts, mean_over_ranks
from decentnode.parallel.process_group.shutdown import new_group
from decentnode.parallel.transports.base import BucketExchange, Flight
from decentnode.tensors import is_own_fault

T = TypeVar("T")


class RegroupingExchange(BucketExchange):
    """A `BucketExchange` whose waits end with a generation of ranks, and which then takes part in the next one.

    After `recover` nothing is in flight, and nothing is sent until `resume`: the rest of the current step continues
    without an exchange.
    """

    def __init__(self, inner: BucketExchange, buckets: Sequence[Bucket], job: Job,
                 recover: Callable[[PeerLost | None], None]) -> None:  # fmt: skip
        """recover: regroups, and calls `settle` and `replace`."""
        self._job, self._buckets, self._recover = job, list(buckets), recover
        self.timeout_seconds = inner.timeout_seconds
        self.is_paused = False
        """Whether a new generation has begun whose first exchange has not departed yet."""
        self.mixed = [-1] * len(self._buckets)
        """[bucket] the last step whose exchange was mixed."""
        self.averages_begun = self.averages_finished = 0
        """The numbers of averages over all ranks that this rank has begun and finished."""
        self._averages_before = 0
        """The number of averages that were finished, or begun by some rank, when this generation began: ranks that
        joined later count from there."""
        self._unfinished_averages: dict[int, Any] = {}
        """Averages begun by some ranks but not finished by all then -> the group of ranks that finish it; None: all."""
        self._earlier_bytes_sent, self._earlier_wait_seconds = 0, 0.0
        """Bytes sent and seconds waited in earlier generations."""
        self._set_inner(inner)

    def _set_inner(self, inner: BucketExchange) -> None:
        self.inner = inner
        inner.interrupt = self._check_peer
        self.members = self._job.members
        """[rank] its uid, in the generation of `inner`."""

    def _check_peer(self, peer: int, since: float, now: float) -> None:
        """Raises PeerLost if a wait for a rank is in vain; called periodically while waiting."""
        control, waited = self._job.control, now - since
        if control.broken:
            raise PeerLost(f"rank {self.inner.rank}: the generation is over: {control.broken}")
        if control.has_left(self.members[peer], waited):
            raise PeerLost(f"rank {self.inner.rank}: rank {peer} has ended its training", [peer])
        if waited > PROBE_AFTER_SECONDS:
            control.set_waiting(since)
            if control.is_gone(self.members[peer]):
                raise PeerLost(f"rank {self.inner.rank}: the process of rank {peer} is gone", [peer])

    # -- what the training sees -------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self._earlier_bytes_sent + self.inner.bytes_sent

    @property
    def wait_seconds(self) -> float:  # type: ignore[override]
        return self._earlier_wait_seconds + self.inner.wait_seconds

    def launch(self, buckets: Sequence[Bucket], step: int) -> None:
        if not self.is_paused:
            self._guarded(lambda: self.inner.launch(buckets, step))

    def begin(self, step: int) -> None:
        if not self.is_paused:
            self.inner.begin(step)

    def snapshot(self, bucket: Bucket, part: BucketPart, cached: bool = False) -> None:
        if not self.is_paused:
            self.inner.snapshot(bucket, part, cached)

    def supports_one_pass(self, bucket: Bucket, flight: Flight | None) -> bool:
        return bucket.supports_one_pass(None) if self.is_paused else self.inner.supports_one_pass(bucket, flight)

    def advance(self, bucket: Bucket, part: BucketPart, flight: Flight | None, factor: float, rows: Rows) -> None:
        if self.is_paused:
            bucket.advance(part, None, rows, None)
        else:
            self.inner.advance(bucket, part, flight, factor, rows)

    def depart(self, bucket: Bucket) -> None:
        if not self.is_paused:
            self._guarded(lambda: self.inner.depart(bucket))

    def arrive(self, bucket: Bucket) -> Flight | None:
        if self.is_paused:
            return None

        def arrived() -> Flight | None:
            self.inner.wait_for_free_slot(bucket)  # before any part is mixed, so that no bucket is half mixed
            return self.inner.arrive(bucket)

        return self._guarded(arrived)

    def summed(self, bucket: Bucket, flight: Flight) -> Tensor | None:
        return self.inner.summed(bucket, flight)

    def mix(self, bucket: Bucket, part: BucketPart, flight: Flight, factor: float = 1.0, cached: bool = False) -> None:
        self.inner.mix(bucket, part, flight, factor, cached)

    def release(self, bucket: Bucket) -> None:
        flight = self.inner.flight_of(bucket)
        if flight is not None:
            self.mixed[bucket.index] = flight.step
            self.inner.release(bucket)

    def flight_of(self, bucket: Bucket) -> Flight | None:
        return self.inner.flight_of(bucket)

    def drain(self) -> None:
        def drained() -> bool:
            self.inner.drain()  # also if nothing is in flight here: the others drop their public copies, too
            return True

        while not self._guarded(drained):
            pass

    def check(self) -> None:
        """Takes part in the next generation if the current one has ended; then blocking."""
        if self._job.control.broken and not self.is_paused:
            self._recover(None)

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """Returns what `work` returns; None if the generation ended meanwhile."""
        try:
            return work()
        except PeerLost as error:
            self._recover(error)
            return None
        finally:
            self._job.control.set_waiting(None)

    def finish_all(self, seconds: float) -> None:
        self.inner.finish_all(seconds)

    def end(self) -> bool:
        ended = self.inner.end()
        self._job.leave()
        return ended

    def run_average(self, what: str, work: Callable[[Callable[[Tensor], Tensor]], T],
                    restart: Callable[[], None] | None = None) -> T:  # fmt: skip
        """Does the same as in the base class. If a generation ends meanwhile, `work` is called again with those ranks
        that had not finished the average. Ranks that joined since take no part, and what they have in flight with the
        others is then not discarded."""
        self.averages_begun += 1
        anew = restart is not None and self.averages_begun not in self._unfinished_averages
        for attempt in itertools.count():
            try:
                if anew:
                    self.inner.drain()
                # A rank that joined since waits for this rank's next step; `inner.average` would make it give up.
                known = self.averages_begun in self._unfinished_averages
                with contextlib.nullcontext() if known else self.inner.average(what):
                    found = work(self._mean)
                break
            except (PeerLost, RuntimeError) as error:
                if attempt >= MAX_ATTEMPTS or is_own_fault(error):  # the cause is not a lost rank
                    raise
                anew = False
                if not isinstance(error, PeerLost):
                    error = ConnectionBroken(f"{what} failed: {failure_reason(error)}")
                self._recover(error)
            finally:
                self._job.control.set_waiting(None)
        self.averages_begun = self.averages_finished = max(self.averages_begun, self._averages_before)
        if anew and restart is not None:
            restart()
        return found

    @property
    def averaging(self) -> Sequence[int]:
        """The ranks that take part in the average in progress."""
        group = self._unfinished_averages.get(self.averages_begun)
        return range(len(self.members)) if group is None else dist.get_process_group_ranks(group)

    def _mean(self, tensor: Tensor) -> Tensor:
        return mean_over_ranks(tensor, self._unfinished_averages.get(self.averages_begun))

    def gather_by_rank(self, text: str, what: str) -> dict[int, str]:
        def gather(_: object) -> dict[int, str]:
            texts = gather_texts(text, torch.device("cpu"), what, self._unfinished_averages.get(self.averages_begun))
            return dict(zip((self.members[rank] for rank in self.averaging), texts, strict=True))

        return self.run_average(what, gather)

    # -- another generation -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        averages = [self.averages_begun, self.averages_finished]
        return {"mixed": list(self.mixed), "of": list(self.members), "average": averages}

    @torch.no_grad()
    def settle(self, reports: Mapping[int, Mapping[str, Any]], factor: float) -> None:
        """Mixes what is in flight with the snapshots of those that have mixed this rank's (see above). Blocking."""
        mine = list(self.members)
        for bucket in self._buckets:
            flight = self.inner.flight_of(bucket)
            if flight is None:
                continue
            view = self.inner.plan.view(flight.step, factor)
            both = [
                source for source in view.sources
                if (found := reports.get(mine[source])) and found["of"] == mine
                and found["mixed"][bucket.index] >= flight.step
            ]  # fmt: skip
            bucket.gather()
            self.inner.collect(bucket, flight, both)
            bucket.mix(view.without(set(view.sources).difference(both)))
            bucket.scatter()
            self.inner.forget(bucket)

    def release_old(self) -> None:
        """Drops the old exchange, which no rank needs any more."""
        self._earlier_bytes_sent, self._earlier_wait_seconds = self.bytes_sent, self.wait_seconds
        self.inner.abandon()
        for bucket in self._buckets:
            bucket.drop_buffers()  # interrupted operations may still write into their old buffers

    def replace(
        self, inner: BucketExchange, buckets: Sequence[Bucket], first_step: int,
        reports: Mapping[int, Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Continues with another exchange, of these buckets, whose first step is `first_step`. Blocking."""
        inner.bytes_sent, inner.wait_seconds = 0, 0.0
        self._set_inner(inner)
        self._buckets = list(buckets)
        self.mixed = [first_step - 1] * len(self._buckets)
        self.is_paused = True
        self._assign_averages(reports)

    def _assign_averages(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Assigns averages that some ranks have begun to all ranks that have not finished them, except for new ranks.
        Blocking."""
        averages = [(*reports[uid]["average"], reports[uid]["fresh"]) for uid in self.members]
        self._averages_before, self._unfinished_averages = max(entered for entered, _, _ in averages), {}
        waiting = False
        for number in sorted({entered for entered, left, _ in averages if entered > left}):
            ranks = [rank for rank, (entered, left, fresh) in enumerate(averages)
                     if left < number and (entered == number or not fresh)]  # fmt: skip
            group = None if len(ranks) == len(averages) else new_group(ranks)
            if self.inner.rank in ranks:
                self._unfinished_averages[number], waiting = group, True
        if not waiting:
            self.averages_begun = self.averages_finished = self._averages_before

    def resume(self, step: int) -> None:
        """Sends the buckets' current values as the first exchange of the generation."""
        self.is_paused = False
        self.launch(self._buckets, step)
