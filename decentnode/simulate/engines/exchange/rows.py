"""The exchange of all nodes one by one: by each node's own rule, on its row, over the in-process transport."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from decentnode.build import schemas_of
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.mixing.rows import RowWeights
from decentnode.node.schedules.fragment_exchange import FragmentExchange, RoundTimes, Slice
from decentnode.node.schedules.plan import Planners
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.weighted_by_training import WeightedByTraining
from decentnode.simulate.engines.exchange.base import PopulationExchange, RoundTraffic, edges_as_json
from decentnode.simulate.engines.forward import Unsuitable
from decentnode.simulate.engines.population import Population
from decentnode.training.base import Direction
from decentnode.wire.generation import Generation


class RowExchange(PopulationExchange):
    """Runs every node's own rule on its row, over the in-process transport."""

    name = "rows"

    def __init__(self, population: Population, *, overlapped: bool, buffers: bool) -> None:
        """Raises Unsuitable for the overlapped schedule, and for rules whose weights depend on the samples trained
        on."""
        super().__init__(population)
        if overlapped:
            raise Unsuitable("schedule: overlapped needs a rule that has a form for all nodes at once")
        if isinstance(population.shared[0].make_rules()[0], WeightedByTraining):
            raise Unsuitable("weights follow from what each node has trained on in the round")
        experiment, shared = population.experiment, population.shared[0]
        hub, config = Hub(population.num_nodes), InprocConfig.model_validate({"name": "inproc"})
        fragments = shared.fragments or (Fragment(0, population.num_parameters, population.graph),)
        all_parameters = Fragment(0, population.num_parameters, population.graph)
        self._generation, self._nodes = hub.generation, [
            _Node(uid, population, shared.make_rules(), fragments, all_parameters if shared.fragments else None,
                  seed=experiment.seed, hub=hub, config=config)
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
        return [node.change_gradient for node in self._nodes]

    def adjust(self, losses: np.ndarray) -> None:
        for node, row, loss in zip(self._nodes, self.population.parameters, losses.tolist(), strict=True):
            for fragment in node.fragments:
                fragment.adjust(row, loss)

    def mix(self) -> RoundTraffic:
        rows = list(self.population.parameters)
        for phase in range(self._phases):
            for node, row in zip(self._nodes, rows, strict=True):
                if phase:
                    node.mix(row)
                for fragment in node.due:
                    for wait in fragment.send(row, phase):
                        raise AssertionError(f"in one process nothing may wait, got {wait}")
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

    def _sent(self) -> RoundTraffic:
        found = [node.sent() for node in self._nodes]
        return RoundTraffic(np.array([each[0] for each in found]), np.array([each[1] for each in found]),
                    [each[2] for each in found])  # fmt: skip


class _Node:
    """The rules and the exchanges of one node."""

    def __init__(
        self, uid: int, population: Population, rules: Sequence[Sharing], fragments: Sequence[Fragment],
        buffers: Fragment | None, *, seed: int, hub: Hub, config: InprocConfig,
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

    def change_gradient(self, gradient: Tensor) -> Tensor:
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
        """Counts float buffers of `size` bytes as sent to every neighbor and received from every source."""
        for uid in self.buffer_view.neighbors:
            self._communication.counters.edge(uid).data_bytes_sent += size
        for uid in self.buffer_view.sources:
            self._communication.counters.edge(uid).received(size)

    def sent(self) -> tuple[int, int, str]:
        """Returns the data bytes and metadata bytes sent in the round, and the JSON of its edges."""
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
        return data, metadata, edges_as_json(edges)
