"""RegroupingExchange settles the unfinished exchanges of a generation so that the survivors keep their mean."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import make_sharing
from decentnode.parallel.planning.topologies import make_topology
from decentnode.parallel.transports.base import BucketExchange, Flight
from decentnode.parallel.transports.regrouping import RegroupingExchange


class InstantExchange(BucketExchange):
    """An exchange whose sends arrive at once, in a dictionary that all ranks share: world[rank, bucket, step]."""

    def __init__(self, plan: Plan, world: dict[tuple[int, int, int], torch.Tensor]) -> None:
        super().__init__(plan, 1.0)
        self.world = world

    def depart(self, bucket: Bucket) -> None:
        bucket.sent = bucket.send_buffer()
        self._flights[bucket.index] = Flight(bucket, self._step)
        self.world[self.rank, bucket.index, self._step] = bucket.sent.clone()

    def _await(self, flight: Flight) -> None:
        self.collect(flight.bucket, flight, self.plan.view(flight.step).sources)

    def collect(self, bucket: Bucket, flight: Flight, sources: Any) -> None:
        for peer in sources:
            bucket.received[peer] = self.world[peer, bucket.index, flight.step]


class Rank:
    """A rank with two buckets of one parameter each."""

    def __init__(self, rank: int, n: int, world: dict[tuple[int, int, int], torch.Tensor]) -> None:
        plan = Plan(make_topology({"name": "regular", "degree": 4}, n, n), make_sharing("full"), rank)
        rules = plan.rules()
        self.buckets = [Bucket(number, [Parameter(torch.full((6,), float(rank + 10 * number)))], True, next(rules))
                        for number in range(2)]  # fmt: skip
        control = SimpleNamespace(broken="", set_waiting=lambda _: None)
        job: Any = SimpleNamespace(members=tuple(range(n)), control=control)
        self.exchange = RegroupingExchange(InstantExchange(plan, world), self.buckets, job, lambda _: None)
        self.step = 0
        self.exchange.launch(self.buckets, 0)

    def may_mix(self, number: int) -> bool:
        """Returns whether all models were sent that the bucket waits for."""
        inner: Any = self.exchange.inner
        flight = inner.flight_of(self.buckets[number])
        return all((peer, number, flight.step) in inner.world for peer in inner.plan.view(flight.step).sources)

    def mix(self, number: int, dead: set[int]) -> float:
        """Mixes one bucket and sends it for the next step. Returns what ranks that will be dead add to each element."""
        bucket, inner = self.buckets[number], self.exchange.inner
        flight = inner.flight_of(bucket)
        assert flight is not None and isinstance(inner, InstantExchange)
        view, sent = inner.plan.view(flight.step), float(bucket.sent[0])
        from_dead = sum(view.weights[peer] * (float(inner.world[peer, number, flight.step][0]) - sent)
                        for peer in view.sources if peer in dead)  # fmt: skip
        with torch.no_grad():
            self.exchange.finish(bucket)
            self.exchange.begin(flight.step + 1)
            for part in bucket.parts:
                self.exchange.snapshot(bucket, part)
            self.exchange.depart(bucket)
        return from_dead


@pytest.mark.parametrize("seed", range(4))
def test_survivors_at_different_steps_keep_their_mean(seed: int) -> None:
    """Three of eight ranks die at random times, while the survivors are at different steps and in the middle of one."""
    draw, n, world = random.Random(seed), 8, dict[tuple[int, int, int], torch.Tensor]()
    ranks = [Rank(rank, n, world) for rank in range(n)]
    dead = set(draw.sample(range(n), 3))
    expected = [sum(float(ranks[r].buckets[k].flat[0]) for r in range(n) if r not in dead) for k in range(2)]
    moves = 0
    while moves < 60:
        ready = [(rank, number) for rank in range(n) for number in range(2)
                 if (rank not in dead or moves < 20) and ranks[rank].may_mix(number)]  # fmt: skip
        if not ready:
            break
        rank, number = draw.choice(ready)
        from_dead = ranks[rank].mix(number, dead)
        expected[number] += 0.0 if rank in dead else from_dead
        moves += 1
    survivors = [ranks[rank] for rank in range(n) if rank not in dead]
    reports = {rank: ranks[rank].exchange.report() for rank in range(n) if rank not in dead}
    assert len({tuple(report["mixed"]) for report in reports.values()}) > 1
    unsettled = [sum(float(survivor.buckets[number].flat[0]) for survivor in survivors) for number in range(2)]
    for survivor in survivors:
        survivor.exchange.settle(reports, 1.0)
    settled = [sum(float(survivor.buckets[number].flat[0]) for survivor in survivors) for number in range(2)]
    assert settled == pytest.approx(expected, abs=1e-3)
    assert unsettled != pytest.approx(expected, abs=1e-3)
    assert not any(survivor.exchange.flight_of(bucket) for survivor in survivors for bucket in survivor.buckets)


def test_an_average_that_runs_out_of_memory_raises_and_starts_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, recoveries = Rank(0, 8, {}).exchange, list[Any]()
    monkeypatch.setattr(exchange, "_recover", recoveries.append)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        exchange.run_average("the mean model", lambda _: torch.empty(1 << 50))
    assert not recoveries
