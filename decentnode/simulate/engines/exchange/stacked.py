"""The exchange of all nodes at once: one rule holds their states, and mixing is one sparse matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from decentnode.node.schedules.plan import Planner
from decentnode.payload import SCALAR_BYTES
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.hooks import Hooks
from decentnode.sharing.stacked import has_stacked_form
from decentnode.simulate.engines.exchange.base import PopulationExchange, RoundTraffic, edges_as_json
from decentnode.simulate.engines.exchange.round_edges import RoundEdges, TableEdges, count_edges
from decentnode.simulate.engines.forward import Unsuitable
from decentnode.simulate.engines.population import Population
from decentnode.wire.generation import Generation

CACHED_EDGES = 64
"""Number of rounds of a graph's period whose matrices are cached."""


class _Mixing:
    """The edges of a phase in the form in which rules get them."""

    def __init__(self, plan: RoundEdges) -> None:
        self._plan = plan

    def __call__(self, x: Tensor) -> Tensor:
        return self._plan(x)

    def shares(self, x: Tensor) -> Tensor:
        return x if self._plan.is_empty else self._plan.shares.mixed(x)


class StackedExchange(PopulationExchange):
    """Exchanges the models of all nodes at once: one rule holds the state of all nodes, and mixing is W X."""

    name = "stacked"

    def __init__(self, population: Population, *, overlapped: bool, buffers: bool) -> None:
        """overlapped: the schedule. buffers: whether float buffers are averaged. Raises Unsuitable if the rule has no
        stacked form."""
        super().__init__(population)
        shared = population.shared[0]
        self._rule = rule = shared.make_rules()[0]
        name = population.experiment.sharing.name
        if shared.fragments:
            raise Unsuitable("parameters are exchanged in fragments")
        if not has_stacked_form(rule):
            raise Unsuitable(f"rule {name} has no form for all nodes at once")
        if rule.requirements.gradient:
            raise Unsuitable(f"rule {name} changes every gradient")
        self._overlapped, self._buffers = overlapped, buffers and population.buffers.numel() > 0
        self._phases = rule.requirements.phases
        schema = rule.payload_schema(population.num_parameters, population.rows.dtype)
        self._data_bytes = sum(spec.max_elements * spec.dtype.itemsize for spec in schema.values())
        self._metadata_bytes = SCALAR_BYTES * len(rule.requirements.scalars)
        graph, seed = population.graph, population.experiment.seed
        all_parameters = Fragment(0, population.num_parameters, graph)
        self._planners = [
            Planner(uid, seed, all_parameters, rule, averaging_groups=False) for uid in range(graph.num_nodes)
        ]
        self._generation = Generation(0, tuple(range(graph.num_nodes)))
        self._changes_edges = type(rule).plan is not Hooks.plan or type(rule).plan_buffers is not Hooks.plan_buffers
        self._period = None if self._changes_edges else graph.period
        self._cached_edges: dict[int | None, tuple[list[RoundEdges], RoundTraffic]] = {}
        self._before: Tensor | None = None

    def begin(self, round: int, lr: float) -> None:
        views = self._planners[0].views(round, self._generation, lr)
        self._views = views[: self._phases]
        self._round, self._lr = round, lr
        if self._overlapped:
            self._before = self.population.rows.clone()
        else:
            self._rule.begin(self.population.rows, self._views[0])

    def adjust(self, losses: np.ndarray) -> None:
        if not self._overlapped:
            self._rule.adjust(self.population.rows, self._views[0], float(losses.mean()))

    def mix(self) -> RoundTraffic:
        population, rule = self.population, self._rule
        plans, sent = self._round_edges()
        rows = population.rows
        mixed = rows if self._before is None else self._before
        delta = None if self._before is None else rows - self._before
        for plan, view in zip(plans, self._views, strict=False):
            mixed = rule.mix_stacked(mixed, _Mixing(plan), view)
        if delta is not None:
            rule.advance(mixed, delta, self._views[-1])
            self._before = None
        else:
            rule.finish(mixed, self._views[-1])
        population.take(mixed)
        if self._buffers and not plans[-1].is_empty:
            population.buffers = plans[-1].weights.mixed(population.buffers)
        return sent

    def _round_edges(self) -> tuple[list[RoundEdges], RoundTraffic]:
        """Returns (the edges of the round's phases, then those of the buffers; the traffic of the round)."""
        number = self._rule.exchange_number(self._round)
        key = number if number is None or self._period is None else number % self._period
        if self._period is None and number is not None:
            self._cached_edges.clear()
        if number is not None and self._period is None and not self._changes_edges:
            targets = self.population.graph.targets_table(number)
            if targets is not None:
                plan = TableEdges(self.population.graph, number, targets)
                return [plan] * (self._phases + 1), self._table_traffic(plan)
        if key not in self._cached_edges:
            while len(self._cached_edges) >= CACHED_EDGES:
                del self._cached_edges[next(iter(self._cached_edges))]
            views = [each.views(self._round, self._generation, self._lr) for each in self._planners]
            plans = [RoundEdges(phase) for phase in zip(*views, strict=True)]
            if self._phases == 1:
                plans[1] = plans[0]
            self._cached_edges[key] = plans, self._count_traffic(plans)
        return self._cached_edges[key]

    def _table_traffic(self, plan: TableEdges) -> RoundTraffic:
        """Returns the traffic of a round whose phases and float buffers all use the same table of edges."""
        buffers = self.population.buffers.shape[1] * 4 if self._buffers else 0
        data, metadata = self._phases * self._data_bytes + buffers, self._phases * self._metadata_bytes
        return RoundTraffic(plan.degrees * data, plan.degrees * metadata, plan.edges(data, metadata))

    def _count_traffic(self, plans: Sequence[RoundEdges]) -> RoundTraffic:
        count = self.population.num_nodes
        metadata, edges = np.zeros(count, np.int64), [dict[int, list[int]]() for _ in range(count)]
        data = metadata.copy()
        for plan in plans[: self._phases]:
            data += plan.degrees * self._data_bytes
            metadata += plan.degrees * self._metadata_bytes
            count_edges(edges, plan, self._data_bytes, self._metadata_bytes)
        if self._buffers:
            size = self.population.buffers.shape[1] * 4
            data += plans[-1].degrees * size
            count_edges(edges, plans[-1], size, 0)
        return RoundTraffic(data, metadata, [edges_as_json(each) for each in edges])
