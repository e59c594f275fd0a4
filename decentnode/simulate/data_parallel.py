"""Predicts the duration of an iteration of data-parallel training: with all-reduce of gradients, or with averaging over
a graph.

Gradients are reduced among all nodes during the backward pass, as PyTorch's DistributedDataParallel does. Over a graph
whose rounds are groups that average (alternating_exponential_ring), the models are averaged during a whole iteration
(docs/explanation/round.rst, "Overlapped").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.graph.base import Graph, averaging_group_of
from decentnode.graph.schedules import AlternatingExponentialRing, AlternatingExponentialRingConfig
from decentnode.simulate.timeline.collectives import CallCosts, Calls, group_averages
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Network
from decentnode.simulate.timeline.rounds import Clock, time_line

FORWARD_SHARE = 1 / 3
"""Share of an iteration's compute time before the first gradients are available."""
BUCKET_BYTES = 25 << 20
"""Bytes of gradients that DistributedDataParallel reduces in one call by default."""
ROUNDS = 120
FREE = CallCosts(0.0, 0.0, 0.0, 0.0, trees=True)
"""Costs of calls that take no time apart from the bytes on the links."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of machines with equal nodes."""

    nodes: int
    nodes_per_machine: int
    gbit_per_second: float
    """Bandwidth of each machine, for sending and for receiving."""

    @property
    def machine_of(self) -> list[int]:
        return [uid // self.nodes_per_machine for uid in range(self.nodes)]


def groups_of(graph: Graph, round: int) -> list[tuple[int, ...]]:
    """Returns, ascending, the groups of a round whose members all average with each other and with no other node."""
    return sorted({group for uid in range(graph.num_nodes) if (group := averaging_group_of(graph, uid, round))})


def all_reduce_clock(compute: Compute, calls: Calls, network: Network, gradient_bytes: float) -> Clock:
    """Returns the clock of data-parallel training. compute: times of one local step. gradient_bytes: of one node."""
    everybody = [group_averages(calls, [range(compute.num_nodes)], gradient_bytes)]
    return Clock(compute, network, lambda _: everybody, leaves_after=FORWARD_SHARE)


def iteration_seconds(
    cluster: Cluster, model_bytes: float, compute_seconds: float, *, spread: float = 0.0,
    method: Literal["all_reduce", "alternating_exponential_ring"] = "all_reduce", costs: CallCosts = FREE,
) -> float:
    """Returns the mean seconds of an iteration. compute_seconds: of a node, without communication. spread: standard
    deviation of its compute time from iteration to iteration, relative to the mean. Raises GraphError if the cluster
    has no such graph."""
    where = cluster.machine_of
    config = ComputeConfig.model_validate({"step_seconds": compute_seconds, "spread": spread})
    compute = Compute(config, where, step_seconds=compute_seconds)
    links = LinksConfig.model_validate({"uplink_mbit_per_second": 1000 * cluster.gbit_per_second})
    network = Network(links, where)
    calls = Calls(costs, network, BUCKET_BYTES)
    if method == "all_reduce":
        return time_line(all_reduce_clock(compute, calls, network, model_bytes), ROUNDS).steady_seconds()
    section = {"name": method, "nodes": cluster.nodes, "nodes_per_machine": cluster.nodes_per_machine}
    graph = AlternatingExponentialRing(AlternatingExponentialRingConfig.model_validate(section), seed=1)
    period = graph.period or 1
    rounds = [[group_averages(calls, groups_of(graph, r), model_bytes)] for r in range(period)]
    return time_line(Clock(compute, network, lambda r: rounds[r % period], overlapped=True), ROUNDS).steady_seconds()
