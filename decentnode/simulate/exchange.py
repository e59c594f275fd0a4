"""The exchange and mixing of all nodes: by one sparse product, or each node by its own rule."""

from __future__ import annotations

import abc
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from decentnode.build import schemas_of
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.graph.base import Entries, Graph, RoundView
from decentnode.mixing.rows import RowWeights
from decentnode.node.fragment_exchange import FragmentExchange, RoundTimes, Slice
from decentnode.node.plan import Planner, Planners
from decentnode.payload import SCALAR_BYTES
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.hooks import Hooks
from decentnode.sharing.stacked import has_stacked_form
from decentnode.sharing.weighed import Weighed
from decentnode.simulate.forward import Unsuitable
from decentnode.simulate.population import Population
from decentnode.training.base import Direction
from decentnode.wire.generation import Generation

KEPT_PLANS = 64
"""Rounds of a graph's period whose matrices are kept."""


@dataclass(frozen=True)
class Sent:
    """What went over the edges in one round."""

    data: np.ndarray  # [N] int64, bytes sent by each node
    metadata: np.ndarray  # [N] int64
    edges: list[str]
    """Per node the JSON of a round record's `edges`."""


class Exchange(abc.ABC):
    """Around the local steps of a round: what rules do before and after them, and the mixing."""

    name: str

    def __init__(self, population: Population) -> None:
        self.population = population

    @abc.abstractmethod
    def begin(self, round: int, lr: float) -> None:
        """A round begins; local steps follow. lr: their learning rate."""

    def directions(self) -> list[Direction] | None:
        """Returns each node's hook into its gradients; None where the rule has none."""
        return None

    @abc.abstractmethod
    def adjust(self, losses: np.ndarray) -> None:
        """After the local steps: the rules may change the models. losses: [N]."""

    @abc.abstractmethod
    def mix(self) -> Sent:
        """Exchange and mix, in all phases of the round."""


class Plan:
    """The edges of one round in one phase, of all nodes."""

    def __init__(self, views: Sequence[RoundView]) -> None:
        self.views = views
        self.at_rest = not any(view.neighbors or view.sources for view in views)

    @functools.cached_property
    def weights(self) -> RowWeights:
        return RowWeights([view.weights for view in self.views])

    @functools.cached_property
    def shares(self) -> RowWeights:
        rows: list[dict[int, float]] = [{} for _ in self.views]
        for view in self.views:
            for target, share in view.out_weights.items():
                rows[target][view.uid] = share
        return RowWeights(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.at_rest else self.weights.mixed(x)

    @property
    def degrees(self) -> np.ndarray:
        """[N] to how many nodes each sends."""
        return np.array([len(view.neighbors) for view in self.views])


class TablePlan(Plan):
    """As `Plan`, of a graph that has the edges of all nodes in one table, and of a rule that changes none: made without
    a view per node, which for thousands of nodes costs more than the mixing."""

    def __init__(self, graph: Graph, round: int, targets: np.ndarray) -> None:
        """targets: [N, degree] as `Graph.targets_table` gives it for this round."""
        self._graph, self._round, self.targets, self.at_rest = graph, round, targets, False

    @functools.cached_property
    def _entries(self) -> Entries:
        return self._graph.entries(self._round)

    @functools.cached_property
    def weights(self) -> RowWeights:
        return RowWeights.of_entries(self._entries.starts, self._entries.sources, self._entries.weights)

    @functools.cached_property
    def shares(self) -> RowWeights:
        starts, sources, _ = self._entries
        return RowWeights.of_entries(starts, sources, np.full(len(sources), 1.0 / (self.targets.shape[1] + 1)))

    @property
    def degrees(self) -> np.ndarray:
        return np.full(len(self.targets), self.targets.shape[1])

    def edges(self, data: int, metadata: int) -> list[str]:
        """Returns per node the JSON of a record's edges, where each carries so many bytes: as `_count` and `_as_json`,
        for thousands of nodes a hundred times in the time."""
        def keys(sent: int, received: int) -> list[str]:
            if not sent and not received:
                return [""] * len(self.targets)
            return [f'"{uid}":[{sent},{received},0,0,0.0]' for uid in range(len(self.targets))]

        both, out, into = keys(data + metadata, data), keys(data + metadata, 0), keys(0, data)
        if not self._graph.directed:
            return ["{" + ",".join(map(both.__getitem__, row)) + "}" for row in self.targets.tolist()]
        entries, found = self._entries, []
        starts, sources = [*entries.starts.tolist(), len(entries.sources)], entries.sources.tolist()
        for uid, targets in enumerate(self.targets.tolist()):
            rest = sources[starts[uid] : starts[uid + 1]]
            rest.remove(uid)
            if mutual := {*targets} & {*rest}:
                pieces = [both[to] if to in mutual else out[to] for to in targets]
                rest = [of for of in rest if of not in mutual]
            else:
                pieces = list(map(out.__getitem__, targets))
            pieces += map(into.__getitem__, rest)
            found.append("{" + ",".join(pieces) + "}")
        return found


class _Mixing:
    """A plan as rules get it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self, x: Tensor) -> Tensor:
        return self._plan(x)

    def shares(self, x: Tensor) -> Tensor:
        return x if self._plan.at_rest else self._plan.shares.mixed(x)


class StackedExchange(Exchange):
    """One rule holds the state of all nodes, and mixing is W X."""

    name = "stacked"

    def __init__(self, population: Population, *, overlapped: bool, buffers: bool) -> None:
        """overlapped: the schedule. buffers: whether float buffers are averaged. Raises Unsuitable where the rule has
        no stacked form."""
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
        whole = Fragment(0, population.num_parameters, graph)
        self._planners = [Planner(uid, seed, whole, rule, averaging_groups=False) for uid in range(graph.num_nodes)]
        self._generation = Generation(0, tuple(range(graph.num_nodes)))
        self._own_plan = type(rule).plan is not Hooks.plan or type(rule).plan_buffers is not Hooks.plan_buffers
        self._period = None if self._own_plan else graph.period
        self._plans: dict[int | None, tuple[list[Plan], Sent]] = {}
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

    def mix(self) -> Sent:
        population, rule = self.population, self._rule
        plans, sent = self._planned()
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
        if self._buffers and not plans[-1].at_rest:
            population.buffers = plans[-1].weights.mixed(population.buffers)
        return sent

    def _planned(self) -> tuple[list[Plan], Sent]:
        """Returns the plans of the round's phases and that of the buffers, and what they send."""
        number = self._rule.exchange_number(self._round)
        key = number if number is None or self._period is None else number % self._period
        if self._period is None and number is not None:
            self._plans.clear()
        if number is not None and self._period is None and not self._own_plan:
            targets = self.population.graph.targets_table(number)
            if targets is not None:
                plan = TablePlan(self.population.graph, number, targets)
                return [plan] * (self._phases + 1), self._of_table(plan)
        if key not in self._plans:
            while len(self._plans) >= KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            views = [each.views(self._round, self._generation, self._lr) for each in self._planners]
            plans = [Plan(phase) for phase in zip(*views, strict=True)]
            if self._phases == 1:
                plans[1] = plans[0]
            self._plans[key] = plans, self._counted(plans)
        return self._plans[key]

    def _of_table(self, plan: TablePlan) -> Sent:
        """What goes over the edges of a round in which all phases, and the float buffers, have the same."""
        buffers = self.population.buffers.shape[1] * 4 if self._buffers else 0
        data, metadata = self._phases * self._data_bytes + buffers, self._phases * self._metadata_bytes
        return Sent(plan.degrees * data, plan.degrees * metadata, plan.edges(data, metadata))

    def _counted(self, plans: Sequence[Plan]) -> Sent:
        count = self.population.num_nodes
        metadata, edges = np.zeros(count, np.int64), [dict[int, list[int]]() for _ in range(count)]
        data = metadata.copy()
        for plan in plans[: self._phases]:
            data += plan.degrees * self._data_bytes
            metadata += plan.degrees * self._metadata_bytes
            _count(edges, plan, self._data_bytes, self._metadata_bytes)
        if self._buffers:
            size = self.population.buffers.shape[1] * 4
            data += plans[-1].degrees * size
            _count(edges, plans[-1], size, 0)
        return Sent(data, metadata, [_as_json(each) for each in edges])


def _count(edges: list[dict[int, list[int]]], plan: Plan, data: int, metadata: int) -> None:
    """Add what a phase moves to [bytes sent, bytes received] per edge."""
    for view, own in zip(plan.views, edges, strict=True):
        for uid in view.neighbors:
            own.setdefault(uid, [0, 0])[0] += data + metadata
        for uid in view.sources:
            own.setdefault(uid, [0, 0])[1] += data


def _as_json(edges: dict[int, list[int]]) -> str:
    found = {str(uid): [*both, 0, 0, 0.0] for uid, both in edges.items() if any(both)}
    return json.dumps(found, separators=(",", ":"))


class RowExchange(Exchange):
    """Every node by its own rule, on its row, over the in-process transport."""

    name = "rows"

    def __init__(self, population: Population, *, overlapped: bool, buffers: bool) -> None:
        """Raises Unsuitable for an overlapped schedule."""
        super().__init__(population)
        if overlapped:
            raise Unsuitable("schedule: overlapped needs a rule that has a form for all nodes at once")
        if isinstance(population.shared[0].make_rules()[0], Weighed):
            raise Unsuitable("weights follow from what each node has trained on in the round")
        experiment, shared = population.experiment, population.shared[0]
        hub, config = Hub(population.num_nodes), InprocConfig.model_validate({"name": "inproc"})
        fragments = shared.fragments or (Fragment(0, population.num_parameters, population.graph),)
        whole = Fragment(0, population.num_parameters, population.graph)
        self._generation, self._nodes = hub.generation, [
            _Node(uid, population, shared.make_rules(), fragments, whole if shared.fragments else None,
                  experiment.seed, hub, config)
            for uid in range(population.num_nodes)
        ]  # fmt: skip
        self._buffers = buffers and population.buffers.numel() > 0
        self._phases = self._nodes[0].fragments[0].rule.requirements.phases

    def begin(self, round: int, lr: float) -> None:
        for node, row in zip(self._nodes, self.population.parameters, strict=True):
            node.enter(round, self._generation, lr)
            for fragment in node.fragments:
                fragment.begin_turn(row)

    def directions(self) -> list[Direction] | None:
        if not self._nodes[0].fragments[0].rule.requirements.gradient:
            return None
        return [node.direct for node in self._nodes]

    def adjust(self, losses: np.ndarray) -> None:
        for node, row, loss in zip(self._nodes, self.population.parameters, losses.tolist(), strict=True):
            for fragment in node.fragments:
                fragment.adjust(row, loss)

    def mix(self) -> Sent:
        rows = list(self.population.parameters)
        for phase in range(self._phases):
            for node, row in zip(self._nodes, rows, strict=True):
                if phase:
                    node.mix(row)
                for fragment in node.due:
                    for wait in fragment.send(row, phase):
                        raise AssertionError(f"nothing waits in one process, got {wait}")
        for node, row in zip(self._nodes, rows, strict=True):
            node.mix(row)
            for fragment in node.due:
                fragment.finish_turn(row)
        if self._buffers:
            views = [node.buffer_view for node in self._nodes]
            self.population.buffers = RowWeights([view.weights for view in views]).mixed(self.population.buffers)
            for node in self._nodes:
                node.count_buffers(self.population.buffers.shape[1] * 4)
        return self._sent()

    def _sent(self) -> Sent:
        found = [node.sent() for node in self._nodes]
        return Sent(np.array([each[0] for each in found]), np.array([each[1] for each in found]),
                    [each[2] for each in found])  # fmt: skip


class _Node:
    """The rules and the exchanges of one node."""

    def __init__(
        self, uid: int, population: Population, rules: Sequence[Sharing], fragments: Sequence[Fragment],
        buffers: Fragment | None, seed: int, hub: Hub, config: InprocConfig,
    ) -> None:
        schemas = schemas_of(rules, population.model, population.shared[0].fragments)
        self._communication = Inproc(config, uid=uid, hub=hub, schemas=schemas)
        pairs = list(zip(fragments, rules, strict=True))
        self._planners = Planners(uid, seed, pairs, buffers=buffers, averaging_groups=False)
        self.fragments = [FragmentExchange(*pair, self._communication, num_fragments=len(pairs)) for pair in pairs]
        self.due: list[FragmentExchange] = []
        self._times = RoundTimes()
        self._before: dict[int, tuple[int, int]] = {}
        self._totals = (0, 0)

    def enter(self, round: int, generation: Generation, lr: float) -> None:
        views, self.buffer_view = self._planners.views(round, generation, lr)
        for fragment, each in zip(self.fragments, views, strict=True):
            fragment.enter(round, each)
        self.due = [fragment for fragment in self.fragments if fragment.is_due]

    def direct(self, gradient: Tensor) -> Tensor:
        for fragment in self.fragments:
            fragment.direct(gradient)
        return gradient

    def mix(self, row: Tensor) -> None:
        for fragment in self.due:
            part = fragment.part(row)
            for each in fragment.slices(self._communication.config.timeout_seconds, self._times):
                assert isinstance(each, Slice), "all payloads are there: every node has sent"
                each.mix(fragment.rule, part)
            fragment.settle(self._times)

    def count_buffers(self, size: int) -> None:
        """Count the float buffers, of so many bytes, that went to the neighbors and came from the sources."""
        for uid in self.buffer_view.neighbors:
            self._communication.counters.edge(uid).data_bytes_sent += size
        for uid in self.buffer_view.sources:
            self._communication.counters.edge(uid).payload_bytes_received += size

    def sent(self) -> tuple[int, int, str]:
        """Returns data and metadata bytes of the round, and the JSON of its edges."""
        known = self._communication.counters.known()
        edges = {}
        for uid, edge in known:
            now = edge.payload_bytes_sent, edge.payload_bytes_received
            then = self._before.get(uid, (0, 0))
            self._before[uid] = now
            edges[uid] = [now[0] - then[0], now[1] - then[1]]
        totals = sum(edge.data_bytes_sent for _, edge in known), sum(edge.metadata_bytes_sent for _, edge in known)
        data, metadata = totals[0] - self._totals[0], totals[1] - self._totals[1]
        self._totals = totals
        return data, metadata, _as_json(edges)


def make_exchange(population: Population) -> tuple[Exchange, str]:
    """Returns the exchange for a run, and why it is not the stacked one; "" where it is. Raises Unsuitable."""
    node = population.experiment.node
    options = {"overlapped": node.schedule == "overlapped", "buffers": node.buffers == "average"}
    try:
        return StackedExchange(population, **options), ""
    except Unsuitable as reason:
        return RowExchange(population, **options), str(reason)
