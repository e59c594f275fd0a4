"""Predicts what the nodes of an experiment send in each round: edges from graph and rule, bytes from rule and codec."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from decentnode.build import SharedModel, shared_model
from decentnode.experiment import Experiment
from decentnode.experiment.initial_model import module_without_values
from decentnode.graph.base import Graph, RoundView
from decentnode.node.schedules.schedules import payload_schema, sent_dtype
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.rounds import LONGEST_REST, exchange_interval, rule_view
from decentnode.simulate.timeline.network import NO_TRANSFERS, Transfers

LONGEST_CYCLE = 1024
"""Greatest number of rounds after which edges are taken to repeat."""
UPDATE_SCALE = 1e-2
"""Size of the update, relative to the model, after which a rule's payload is measured; it matters for rules that send
differences."""
CACHED_TRANSFERS = 256
"""Number of sets of transfers that are cached; enough for the longest usual period of a graph."""


@dataclass(frozen=True)
class ExchangedFragment:
    """A fragment of the parameters, or all of them, with the rule that exchanges it and the size of its payloads."""

    fragment: Fragment
    rule: Sharing
    dtype: torch.dtype
    """Dtype of the model."""
    phase_bytes: tuple[float, ...]
    """Bytes of one payload in each phase."""
    is_shared: bool = False
    """Whether all neighbors get the same payload, judging by the first phase."""
    down: ServerBytes | None = None
    """What a server sends; None for rules without one."""


@dataclass(frozen=True)
class ServerBytes:
    """Bytes that a server sends to a client that takes part in a round, and to one that does not."""

    first: tuple[float, float]
    """In the first round, in which some rules send whole models."""
    later: tuple[float, float]
    phases: tuple[float, ...]
    """Bytes of a payload in each phase of a later round: to a client that takes part, from it, and between servers."""

    def to(self, takes_part: bool, round: int) -> float:
        """Returns the bytes for a client."""
        return (self.later if round else self.first)[0 if takes_part else 1]


class Traffic:
    """The transfers of every round of an experiment. A pure function of the experiment and the round."""

    def __init__(self, experiment: Experiment, module: torch.nn.Module | None = None) -> None:
        """Makes the rule and measures its payloads, which takes as long as a few rounds of one node's rule. module: the
        experiment's model, on any device; None: it is made. Raises what the experiment's parts raise."""
        self._experiment = experiment
        graph = experiment.make_graph()
        self.num_nodes = graph.num_nodes
        if module is None:
            module = module_without_values(experiment, experiment.open_data().spec)
        shared = shared_model(experiment, module)
        self.model_bytes = shared.model.num_parameters * shared.model.dtype.itemsize
        averaged = experiment.node.buffers == "average"
        self.buffer_bytes = float(shared.model.buffers.nbytes) if averaged else 0.0
        self._graph = graph
        self.exchanged = self._measure_payloads(shared, graph)
        self.phases = self.exchanged[0].rule.requirements.phases
        self.steps_before = self.exchanged[0].rule.requirements.steps_before
        self._servers = graph.servers if self.exchanged[0].rule.requirements.star else {}
        self._cache: dict[tuple[object, ...], tuple[Transfers, ...]] = {}

    @property
    def trains(self) -> Callable[[int], np.ndarray] | None:
        """Returns a function that tells which nodes make local steps in a round, bool [N]; None if all do."""
        if self._servers:
            return self._clients
        return None if self._experiment.node.training_rounds is None else self._trained

    @property
    def cycle(self) -> int:
        """The number of rounds after which the rounds with local steps and those with exchanges repeat, and also the
        edges if they do within LONGEST_CYCLE rounds."""
        rounds = self._experiment.node.training_rounds
        exchanges = [exchange_interval(each.rule) * each.fragment.every for each in self.exchanged]
        trained = 1 if rounds is None else rounds.train + rounds.mix
        periods = [each.fragment.graph.period or 1 for each in self.exchanged]
        with_edges = math.lcm(trained, *map(operator.mul, exchanges, periods))
        return with_edges if with_edges <= LONGEST_CYCLE else math.lcm(trained, *exchanges)

    def _clients(self, round: int) -> np.ndarray:
        found, (each, *_) = np.zeros(self.num_nodes, bool), self.exchanged
        for server in self._servers:
            found[list(self._active_clients(each, server, round))] = True
        return found

    def _trained(self, round: int) -> np.ndarray:
        rounds = self._experiment.node.training_rounds
        assert rounds is not None
        return np.array([rounds.trains(self._experiment.seed, uid, round) for uid in range(self.num_nodes)], bool)

    def _active_clients(self, each: ExchangedFragment, server: int, round: int) -> tuple[int, ...]:
        """Returns the clients of a server that take part in a round."""
        view = view_of(each.rule, each.fragment, server, round, self._experiment.seed)
        return each.rule.plan(replace(view, phase=self.steps_before)).sources

    def _measure_payloads(self, shared: SharedModel, graph: Graph) -> list[ExchangedFragment]:
        all_parameters = [Fragment(0, shared.model.num_parameters, graph)]
        fragments: Sequence[Fragment] = shared.fragments or all_parameters
        found = []
        for fragment, rule, fresh in zip(fragments, shared.make_rules(), shared.make_rules(), strict=True):
            schedule, model = self._experiment.node.schedule, shared.model.dtype
            for each in (rule, fresh):  # a rule sets up what it sends when its schema is computed
                payload_schema(schedule, each, fragment.elements, model)
            dtype = sent_dtype(schedule, rule, model)
            # `fresh`, which has sent nothing, plans the rounds; measuring changes the state of `rule`
            if rule.requirements.star:
                down = bytes_down(rule, fragment, self._experiment.seed, dtype)
                found.append(ExchangedFragment(fragment, fresh, model, down.phases, down=down))
            else:
                sizes, is_shared = payload_bytes(rule, fragment, self._experiment.seed, dtype)
                found.append(ExchangedFragment(fragment, fresh, model, sizes, is_shared))
        return found

    def due(self, round: int) -> list[tuple[ExchangedFragment, int]]:
        """Returns the fragments that a round exchanges, each with the number of the exchange in its graph."""
        found = []
        for each in self.exchanged:
            if each.fragment.is_due(round):
                number = each.rule.exchange_number(each.fragment.turn(round))
                if number is not None:
                    found.append((each, number))
        return found

    def __call__(self, round: int) -> tuple[Transfers, ...]:
        """Returns the transfers of each phase of a round; the same objects again if the edges are the same. Those of
        all fragments in one phase are in flight at the same time."""
        due = self.due(round)
        key: tuple[object, ...] = tuple((each.fragment.index, self._edges_key(each, number, round))
                                        for each, number in due)  # fmt: skip
        if self.buffer_bytes:
            number = self.exchanged[0].rule.exchange_number(round)
            key += (None if number is None else self._edges_key(self.exchanged[0], number, round, self._graph),)
        if key not in self._cache:
            if len(self._cache) >= CACHED_TRANSFERS:
                self._cache.clear()
            self._cache[key] = tuple(self._transfers(due, round, phase) for phase in range(self.phases))
        return self._cache[key]

    def _edges_key(self, each: ExchangedFragment, number: int, round: int, graph: Graph | None = None) -> object:
        """Returns a key on which the edges of an exchange depend. graph: None for that of the fragment."""
        period = (graph or each.fragment.graph).period
        if not follows_graph(each.rule):
            return ("round", round)  # the rule's edges may be different in every round
        return number if period is None else number % period

    def _transfers(self, due: list[tuple[ExchangedFragment, int]], round: int, phase: int) -> Transfers:
        total: dict[tuple[int, int], float] = {}
        for each, number in due:
            down = each.down if phase == 0 else None
            trains = None if down is None else self._clients(round)
            for edge in self._edges(each, number, round, phase):
                size = each.phase_bytes[phase]
                if down is not None and trains is not None:
                    size = down.to(bool(trains[edge[1]]), each.fragment.turn(round))
                total[edge] = total.get(edge, 0.0) + size
        if self.buffer_bytes and phase == self.phases - 1:
            rule, seed = self.exchanged[0].rule, self._experiment.seed
            for uid in range(self.num_nodes):
                for j in buffer_receivers(rule, self._graph, uid, round, seed):
                    total[uid, j] = total.get((uid, j), 0.0) + self.buffer_bytes
        if not total:
            return NO_TRANSFERS
        source, target = zip(*total, strict=True)
        return Transfers.of(source, target, list(total.values()))

    def _edges(self, each: ExchangedFragment, number: int, round: int, phase: int) -> list[tuple[int, int]]:
        graph, rule = each.fragment.graph, each.rule
        if follows_graph(rule):
            return [(uid, j) for uid in range(self.num_nodes) for j in graph.neighbors(uid, number)]
        found = []
        for uid in range(self.num_nodes):
            view = view_of(rule, each.fragment, uid, round, self._experiment.seed)
            found += [(uid, j) for j in rule.plan(replace(view, phase=phase)).neighbors]
        return found


def follows_graph(rule: Sharing) -> bool:
    """Returns whether a rule sends to all neighbors in the graph, instead of choosing its receivers itself."""
    return not (rule.requirements.overrides_topology or rule.requirements.star)


def view_of(rule: Sharing, fragment: Fragment, uid: int, round: int, seed: int) -> RoundView:
    """Returns a node's view of a round, before its rule plans it."""
    return replace(rule_view(rule, fragment.graph, uid, fragment.turn(round), seed), fragment=fragment.index)


def buffer_receivers(rule: Sharing, graph: Graph, uid: int, round: int, seed: int) -> tuple[int, ...]:
    """Returns the nodes to which a node sends its float buffers in a round. rule: that of the first fragment. graph:
    that of the run."""
    view = rule_view(rule, graph, uid, round, seed)
    return (rule.plan(view) if rule.requirements.phases == 1 else rule.plan_buffers(view)).neighbors


def payload_bytes(
    rule: Sharing, fragment: Fragment, seed: int, dtype: torch.dtype
) -> tuple[tuple[float, ...], bool]:
    """Returns (mean bytes of a payload in each phase, whether all neighbors get the same payload in the first phase),
    for a model of normally distributed entries after an update.

    rule: a fresh one, whose state this changes. Payloads of later phases, which depend on
    what neighbors sent, are taken to be as large as those of the first unless the rule has sizes (`phase_bytes`). The
    payloads are those of the lowest node that sends anything in the first exchange.
    """
    draws = torch.Generator().manual_seed(seed)
    model = torch.randn(fragment.elements, generator=draws).to(dtype)
    first = next((r for r in range(4096) if fragment.is_due(r)
                  and rule.exchange_number(fragment.turn(r)) is not None), 0)  # fmt: skip
    with torch.no_grad():
        for uid in range(fragment.graph.num_nodes):
            view = view_of(rule, fragment, uid, first, seed)
            planned = [rule.plan(replace(view, phase=phase)) for phase in range(rule.requirements.phases)]
            if planned[0].neighbors:
                break
        each = []
        for view in rule.measured_views(planned[0]):
            rule.begin(model, view)
            model += UPDATE_SCALE * torch.randn(model.shape, generator=draws).to(dtype)
            if rule.requirements.sequential:
                rule.adjust(model, view, 1.0)
            payloads = rule.outgoing(model, view)
            each += [sum(payload.bytes()) for payload in payloads.values()]
    size = sum(each) / len(each) if each else 0.0
    sizes = rule.phase_bytes(planned[0], fragment.elements) or (size,) * len(planned)
    return sizes, len({id(payload) for payload in payloads.values()}) == 1


def bytes_down(rule: Sharing, fragment: Fragment, seed: int, dtype: torch.dtype) -> ServerBytes:
    """Returns what a server sends. What clients send up is taken to be as large as what those that take part get
    later. rule: a fresh one, whose state this changes."""
    draws = torch.Generator().manual_seed(seed)
    model = torch.randn(fragment.elements, generator=draws).to(dtype)
    server, needs = min(fragment.graph.servers), rule.requirements
    view, last = rule.plan(view_of(rule, fragment, server, 0, seed)), needs.phases - 1
    found: list[tuple[float, float]] = []
    between: list[float] = []
    with torch.no_grad():
        rule.begin(model, view)
        for _ in range(2):
            sizes = [float(sum(payload.bytes())) for payload in rule.outgoing(model, view).values()]
            found.append((max(sizes, default=0.0), min(sizes, default=0.0)))
            model += UPDATE_SCALE * torch.randn(model.shape, generator=draws).to(dtype)
        if last > needs.steps_before:
            rounds = (view_of(rule, fragment, server, round, seed) for round in range(LONGEST_REST))
            plans = (rule.plan(replace(each, phase=last)) for each in rounds)
            planned = next((plan for plan in plans if plan.neighbors), None)
            payloads = () if planned is None else rule.outgoing(model, planned).values()
            between = [max((float(sum(payload.bytes())) for payload in payloads), default=0.0)]
    first, later = found
    return ServerBytes(first, later, (*(later[:1] * (needs.phases - len(between))), *between))
