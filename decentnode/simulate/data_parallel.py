"""Seconds of an iteration of data-parallel training: all-reduce of gradients beside averages over a graph.

From link data alone: machines of a few accelerators each, joined by links of one bandwidth. Gradients are reduced by
all nodes while the backward pass goes on. Over a graph whose rounds are groups that average
(alternating_exponential_ring), the average of the models is under way for a whole iteration
(docs/explanation/round.rst, "Overlapped").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.graph.base import Graph, averaging_group_of
from decentnode.graph.schedules import AlternatingExponentialRing, AlternatingExponentialRingConfig
from decentnode.simulate.timeline.collectives import group_transfers
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Network
from decentnode.simulate.timeline.rounds import Clock, time_line

FORWARD_SHARE = 1 / 3
"""Share of an iteration's compute time before the first gradients are there."""
ROUNDS = 120


@dataclass(frozen=True)
class Cluster:
    """Machines of equal nodes."""

    nodes: int
    nodes_per_machine: int
    gbit_per_second: float
    """What each machine sends, and what it receives."""

    @property
    def machine_of(self) -> list[int]:
        return [uid // self.nodes_per_machine for uid in range(self.nodes)]


def groups_of(graph: Graph, round: int) -> list[tuple[int, ...]]:
    """Returns the groups of a round whose members all average with each other and with nobody else, ascending."""
    return sorted({group for uid in range(graph.num_nodes) if (group := averaging_group_of(graph, uid, round))})


def iteration_seconds(
    cluster: Cluster, model_bytes: float, compute_seconds: float, *, spread: float = 0.0,
    method: Literal["all_reduce", "alternating_exponential_ring"] = "all_reduce",
) -> float:
    """Returns the mean seconds of an iteration. compute_seconds: of a node alone. spread: deviation of its compute time
    from iteration to iteration, by the mean. Raises GraphError where the cluster has no such graph."""
    where = cluster.machine_of
    config = ComputeConfig.model_validate({"step_seconds": compute_seconds, "spread": spread})
    compute = Compute(config, where, step_seconds=compute_seconds)
    links = LinksConfig.model_validate({"uplink_mbit_per_second": 1000 * cluster.gbit_per_second})
    network = Network(links, where)
    if method == "all_reduce":
        everybody = [group_transfers([range(cluster.nodes)], where, model_bytes)]
        return time_line(Clock(compute, network, lambda _: everybody, leaves_after=FORWARD_SHARE),
                         ROUNDS).steady_seconds()  # fmt: skip
    section = {"name": method, "nodes": cluster.nodes, "nodes_per_machine": cluster.nodes_per_machine}
    graph = AlternatingExponentialRing(AlternatingExponentialRingConfig.model_validate(section), seed=1)
    period = graph.period or 1
    rounds = [[group_transfers(groups_of(graph, r), where, model_bytes)] for r in range(period)]
    return time_line(Clock(compute, network, lambda r: rounds[r % period], overlapped=True), ROUNDS).steady_seconds()
