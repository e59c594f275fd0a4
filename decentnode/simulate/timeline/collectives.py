"""Operations of torch.distributed as transfers of virtual time: batches of sends and receives, and averages of groups.

The cost of a call apart from its bytes is linear in the number of calls, steps and neighbors (the usual alpha-beta
model; Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section 3).
NCCL chooses among its algorithms by the same kind of sum (its src/graph/tuning.cc), and so does `average`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from decentnode.simulate.timeline.network import BATCH, NO_TRANSFERS, RENDEZVOUS, Dependencies, Network, Transfers

TREE_BYTES = 2 / 0.92
"""Bytes that pass the busiest machine for each byte of an all-reduce along trees of three machines or more, by NCCL's
own estimate (half of .92 of the bandwidth)."""
Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class CallCosts:
    """The costs of operations apart from their bytes on the links (`simulate.links.calls`)."""

    call_seconds: float
    peer_seconds: float
    hop_seconds: float
    network_hop_seconds: float
    busy_share: float = 0.0
    trees: bool = False
    """Whether the backend has a tree all-reduce besides the ring all-reduce; gloo has not."""


@dataclass(frozen=True)
class CallTransfers:
    """One call as concurrent transfers, and the seconds that it takes apart from their bytes."""

    edges: list[tuple[int, int, float]]
    """(sender, receiver, bytes) of each transfer."""
    seconds: float


class Calls:
    """Makes the transfers of operations between nodes on given machines."""

    def __init__(self, costs: CallCosts, network: Network, chunk_bytes: float = math.inf) -> None:
        """chunk_bytes: the largest part of a payload that one call carries."""
        self.costs, self._network, self._chunk_bytes = costs, network, chunk_bytes

    def num_calls(self, size: float) -> int:
        """Returns the number of calls that a payload of `size` bytes takes."""
        return max(1, math.ceil(size / self._chunk_bytes))

    # -- point to point

    def point_to_point(
        self, edges: Sequence[tuple[int, int]], sizes: Sequence[float], *, batched: bool
    ) -> tuple[list[int], list[float]]:
        """Returns (modes, seconds apart from the bytes) of payloads that nodes send each other, one of each per edge.
        batched: whether all payloads of a node are one operation per chunk (NCCL) instead of separate operations."""
        out, into = Counter(i for i, _ in edges), Counter(j for _, j in edges)
        degree = {uid: max(out[uid], into[uid]) for uid in out.keys() | into.keys()}
        found = []
        for (i, j), size in zip(edges, sizes, strict=True):
            peers = max(degree[i], degree[j])
            one = self.costs.call_seconds + self.costs.peer_seconds * peers + self._hop(i, j)
            found.append(self.num_calls(size) * one)
        return [BATCH if batched else RENDEZVOUS] * len(edges), found

    def _hop(self, i: int, j: int) -> float:
        where = self._network.machine_of
        return self.costs.hop_seconds if where[i] == where[j] else self.costs.network_hop_seconds

    # -- groups

    def average(self, group: Sequence[int], size: float, kind: Kind = "all_reduce") -> CallTransfers:
        """Returns the transfers of a collective call of the whole group, with the algorithm that is fastest on idle
        links.

        size: bytes of one payload; for reduce_scatter and all_gather, a payload is one of n parts.
        """
        found = [self._ring(group, size, kind)]
        if self.costs.trees and kind == "all_reduce" and len(self._machines(group)) > 1:
            found.append(self._tree(group, size))
        return min(found, key=self._idle_seconds) if len(found) > 1 else found[0]

    def _idle_seconds(self, flows: CallTransfers) -> float:
        source, target, sizes = zip(*flows.edges, strict=True)
        count = len(source)
        seconds, zeros = np.full(count, flows.seconds), np.zeros(count)
        dependencies = Dependencies(np.zeros(count, int), seconds, zeros, zeros)
        return self._network.idle_seconds(Transfers.of(source, target, sizes, dependencies=dependencies))

    def _machines(self, group: Sequence[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for uid in sorted(group):
            found.setdefault(int(self._network.machine_of[uid]), []).append(uid)
        return found

    def _ring(self, group: Sequence[int], size: float, kind: Kind) -> CallTransfers:
        """Returns the ring algorithm: every node passes on n - 1 parts, in each of the two halves of an all-reduce, and
        each step waits for the one before."""
        order = [uid for members in self._machines(group).values() for uid in members]
        pairs = list(zip(order, order[1:] + order[:1], strict=True))
        rounds_of_parts = (2 if kind == "all_reduce" else 1) * (len(order) - 1) / len(order)
        passed = rounds_of_parts * size * (1 if kind == "all_reduce" else len(order))
        seconds_around = sum(self._hop(i, j) + self._network.latency(i, j) for i, j in pairs)
        seconds = self.num_calls(size) * (self.costs.call_seconds + rounds_of_parts * seconds_around)
        return CallTransfers([(i, j, passed) for i, j in pairs], seconds)

    def _tree(self, group: Sequence[int], size: float) -> CallTransfers:
        """Returns the tree algorithm: sums go along a chain to one node of each machine, from there up two trees of
        machines with half of the bytes each, and the same way back (NCCL's double binary trees)."""
        machines = self._machines(group)
        edges: list[tuple[int, int, float]] = []
        inside = 0.0
        for members in machines.values():
            chain = list(itertools.pairwise(members))
            edges += [pair for i, j in chain for pair in ((i, j, size), (j, i, size))]
            inside = max(inside, sum(self._hop(i, j) + self._network.latency(i, j) for i, j in chain))
        heads = [members[0] for members in machines.values()]
        count = len(heads)
        share = 1.0 if count == 2 else TREE_BYTES
        crossing = list(zip(heads, heads[1:] + heads[:1], strict=True))
        edges += [(i, j, share * size) for i, j in crossing]
        between = max(self._hop(i, j) + self._network.latency(i, j) for i, j in crossing)
        steps = 2 * (inside + math.ceil(math.log2(count)) * between)
        return CallTransfers(edges, self.num_calls(size) * (self.costs.call_seconds + steps))


class PhaseBuilder:
    """Collects the transfers of one phase of a round."""

    def __init__(self) -> None:
        self._edges: list[tuple[int, int]] = []
        self._sizes: list[float] = []
        self._modes: list[int] = []
        self._seconds: list[float] = []
        self._mixed: list[float] = []
        self._busy: list[float] = []
        self._calls = 0

    def add(
        self, edges: Sequence[tuple[int, int]], sizes: Sequence[float], modes: Sequence[int], seconds: Sequence[float],
        busy_share: float = 0.0,
    ) -> None:
        """Adds payloads that are mixed as they arrive."""
        self._edges += edges
        self._sizes += sizes
        self._mixed += sizes
        self._modes += modes
        self._seconds += seconds
        self._busy += [busy_share] * len(edges)

    def add_call(self, flows: CallTransfers, mixed: float, busy_share: float = 0.0) -> None:
        """Adds a collective call. mixed: bytes that each member mixes at the end."""
        receivers = [j for _, j, _ in flows.edges]
        incoming = Counter(receivers)
        self._edges += [(i, j) for i, j, _ in flows.edges]
        self._sizes += [size for _, _, size in flows.edges]
        self._mixed += [mixed / incoming[j] for j in receivers]
        self._modes += [self._calls] * len(receivers)
        self._seconds += [flows.seconds] * len(receivers)
        self._busy += [busy_share] * len(receivers)
        self._calls += 1

    def transfers(self) -> Transfers:
        if not self._edges:
            return NO_TRANSFERS
        source, target = zip(*self._edges, strict=True)
        dependencies = Dependencies(np.array(self._modes, int), np.array(self._seconds), np.array(self._mixed),
                          np.array(self._busy))  # fmt: skip
        return Transfers.of(source, target, self._sizes, dependencies=dependencies)


def group_averages(calls: Calls, groups: Sequence[Sequence[int]], size: float) -> Transfers:
    """Returns the transfers of disjoint groups that average at the same time, `size` bytes per node."""
    phase = PhaseBuilder()
    for group in groups:
        if len(group) > 1:
            phase.add_call(calls.average(group, size), size, calls.costs.busy_share)
    return phase.transfers()
