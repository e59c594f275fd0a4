"""CodedMemory: the copies that ranks keep of each other's models while exchanges are compressed."""

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
CHOCO = {"name": "choco", "choose": "all", "compression": INT8}


class OneBucketExchange(BucketExchange):
    """The exchange of a rank with one bucket. What it sends arrives at once, in a dictionary that all ranks share:
    world[rank, step]."""

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
        for peer, buffer in self.buffers.items():
            buffer.copy_(self.world[peer, flight.step])
        self.memory.deliver(flight)

    def drain(self) -> None:
        super().drain()
        self.memory.forget()

    @torch.no_grad()
    def finish_exchange(self) -> None:
        """Mixes with the models of the exchange in flight."""
        self.finish(self.bucket)


def test_each_rank_keeps_one_copy_of_each_neighbor_and_of_itself() -> None:
    world: dict[tuple[int, int], Tensor] = {}
    ranks = [OneBucketExchange(rank, 3, {"name": "ring"}, CHOCO, world) for rank in range(3)]
    for step in range(3):
        for rank in ranks:
            rank.finish_exchange()
            rank.launch([rank.bucket], step)
    size = ranks[0].bucket.size_bytes
    for rank in ranks:
        assert len(rank.memory._own_copies) == 1 and len(rank.memory._neighbor_copies) == 2
        held = {id(tensor): tensor for table in vars(rank.memory).values() if isinstance(table, dict)
                for value in table.values() for tensor in (value if isinstance(value, list) else [value])
                if isinstance(tensor, Tensor)}  # fmt: skip
        # three copies of the model, and encoded ones (int8 and scales: less than half the size) to send and receive
        assert sum(tensor.nbytes for tensor in held.values()) < 3 * size + 3 * 0.5 * size


def test_a_rank_without_a_partner_in_a_round_forgets_its_copies_when_the_others_do() -> None:
    """Of three ranks, one has no partner in each round. If a state is loaded then, it too must send its next model
    whole: the others have forgotten the copy to which a difference would be added."""
    world: dict[tuple[int, int], Tensor] = {}
    ranks = [OneBucketExchange(rank, 3, "one-peer-exp", CHOCO, world) for rank in range(3)]
    job: Any = SimpleNamespace(members=(0, 1, 2), control=SimpleNamespace(broken="", set_waiting=lambda _: None))
    exchanges = [RegroupingExchange(rank, [rank.bucket], job, lambda _: None) for rank in ranks]
    for step in range(9):
        for exchange, rank in zip(exchanges, ranks, strict=True):
            if step == 5:
                exchange.drain()
            elif step:
                rank.finish_exchange()
            exchange.launch([rank.bucket], step)
    assert all(rank.bucket.flat.isfinite().all() for rank in ranks)


def test_models_collected_twice_are_decoded_once() -> None:
    """Rank 0 of five collects from ranks 1 and 2, then from 2 and 4, as when it settles a generation in which rank 2 is
    gone: the model of rank 2 must be the same after both."""
    world: dict[tuple[int, int], Tensor] = {}
    rule = {"name": "full", "compression": INT8}
    ranks = [OneBucketExchange(rank, 5, "complete", rule, world) for rank in range(5)]
    for rank in ranks:
        rank.launch([rank.bucket], 0)
    own: Any = object.__new__(SocketExchange)
    own.plan, own._host, own.wait_seconds, own._accepted = ranks[0].plan, ranks[0].memory, 0.0, set()
    own._inbox = {(peer, 0, 0): world[peer, 0] for peer in (1, 2, 3, 4)}
    bucket, flight = ranks[0].bucket, ranks[0].flight_of(ranks[0].bucket)
    SocketExchange.collect(own, bucket, flight, [1, 2])
    SocketExchange.collect(own, bucket, flight, [2, 4])
    for peer in (2, 4):
        assert bucket.received[peer] == pytest.approx(ranks[peer].bucket.sent, abs=1e-6)
