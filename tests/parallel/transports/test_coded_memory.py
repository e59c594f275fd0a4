"""What ranks know of each other's models while exchanges are compressed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.differences import Differences
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import make_sharing
from decentnode.parallel.planning.topologies import make_topology
from decentnode.parallel.transports.base import BucketExchange, Flight
from decentnode.parallel.transports.coded_memory import CodedMemory
from decentnode.parallel.transports.regrouping import RegroupingExchange
from decentnode.parallel.transports.sockets import SocketExchange

INT8 = {"name": "int8"}
CHANGES = {"name": "choco", "choose": "all", "compression": INT8}


class Rank(BucketExchange):
    """A rank with one bucket, whose sends have arrived in memory that all ranks share."""

    def __init__(self, rank: int, n: int, topology: Any, sharing: Any, world: dict[tuple[int, int], Tensor]) -> None:
        plan = Plan(make_topology(topology, n, n), make_sharing(sharing), rank)
        if isinstance(plan.rule, Differences):
            plan.rule.choose_step(plan.graph)
        super().__init__(plan, 1.0)
        self.world = world
        draws = torch.Generator().manual_seed(rank)
        self.bucket = Bucket(0, [Parameter(torch.randn(40, generator=draws))], True, next(plan.rules()))
        assert plan.coding is not None
        self.memory = CodedMemory(plan, plan.coding, [self.bucket])

    def depart(self, bucket: Bucket) -> None:
        view = self._begin_departure(bucket)
        if view is None:
            return
        flight = self._flights[0] = Flight(bucket, self._step)
        self.world[self.rank, self._step] = self.memory.send_buffer(bucket, self._step).clone()
        self.buffers = self.memory.receive_buffers(bucket, flight, view.sources)

    def _await(self, flight: Flight) -> None:
        for peer, room in self.buffers.items():
            room.copy_(self.world[peer, flight.step])
        self.memory.deliver(flight)

    def drain(self) -> None:
        super().drain()
        self.memory.forget()

    @torch.no_grad()
    def take(self) -> None:
        self.finish(self.bucket)


def test_models_that_were_received_whole_are_kept_once() -> None:
    world: dict[tuple[int, int], Tensor] = {}
    ranks = [Rank(rank, 3, {"name": "ring"}, CHANGES, world) for rank in range(3)]
    for step in range(3):
        for each in ranks:
            each.take()
            each.launch([each.bucket], step)
    size = ranks[0].bucket.size_bytes
    for each in ranks:
        assert len(each.memory._own_copies) == 1 and len(each.memory._neighbor_copies) == 2
        held = {id(tensor): tensor for value in vars(each.memory).values() if isinstance(value, dict)
                for found in value.values() for tensor in (found if isinstance(found, list) else [found])
                if isinstance(tensor, Tensor)}  # fmt: skip
        assert sum(tensor.nbytes for tensor in held.values()) < 3 * size + 3 * 0.5 * size


def test_a_rank_that_exchanges_nothing_in_a_round_forgets_as_the_others_do() -> None:
    """Of three ranks one rests in each round: where a state is loaded then, the next exchanges are whole for all."""
    world: dict[tuple[int, int], Tensor] = {}
    ranks = [Rank(rank, 3, "one-peer-exp", CHANGES, world) for rank in range(3)]
    job: Any = SimpleNamespace(members=(0, 1, 2), control=SimpleNamespace(broken="", set_waiting=lambda _: None))
    outer = [RegroupingExchange(each, [each.bucket], job, lambda _: None) for each in ranks]
    for step in range(9):
        for each, inner in zip(outer, ranks, strict=True):
            if step == 5:
                each.drain()
            elif step:
                inner.take()
            each.launch([inner.bucket], step)
    assert all(inner.bucket.flat.isfinite().all() for inner in ranks)


def test_what_is_settled_leaves_alone_what_has_been_decoded() -> None:
    """A rank of five waits for rank 2, which is gone; of the others rank 1 has not mixed this rank's."""
    world: dict[tuple[int, int], Tensor] = {}
    ranks = [Rank(rank, 5, "complete", {"name": "full", "compression": INT8}, world) for rank in range(5)]
    for each in ranks:
        each.launch([each.bucket], 0)
    own: Any = object.__new__(SocketExchange)
    own.plan, own._host, own.wait_seconds, own._accepted = ranks[0].plan, ranks[0].memory, 0.0, set()
    own._inbox = {(peer, 0, 0): world[peer, 0] for peer in (1, 2, 3, 4)}
    bucket, flight = ranks[0].bucket, ranks[0].flight_of(ranks[0].bucket)
    SocketExchange.collect(own, bucket, flight, [1, 2])
    SocketExchange.collect(own, bucket, flight, [2, 4])
    for peer in (2, 4):
        assert bucket.received[peer] == pytest.approx(ranks[peer].bucket.sent, abs=1e-6)
