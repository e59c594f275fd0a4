"""Predicts which payloads of a round go by torch.distributed, by which of its operations, and what these cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from decentnode.communication.base import AveragingGroup
from decentnode.communication.hybrid.config import TorchConfig
from decentnode.communication.parts import Schema
from decentnode.communication.torch_distributed.communicator import MAX_CTAS
from decentnode.communication.torch_distributed.group_collective import kind_of
from decentnode.experiment import Experiment
from decentnode.experiment.virtual_time import CallCostsConfig
from decentnode.graph.base import RoundView, averaging_group_of
from decentnode.node.schedules.schedules import payload_schema, sent_dtype
from decentnode.payload import Payload
from decentnode.simulate.timeline.collectives import CallCosts, Calls, Kind, PhaseBuilder
from decentnode.simulate.timeline.network import MESSAGE, Network, Transfers
from decentnode.simulate.traffic import CACHED_TRANSFERS, ExchangedFragment, Traffic, view_of

MULTIPROCESSORS = 132
"""Number of streaming multiprocessors of an H100 or H200."""
COSTS = {
    "nccl": CallCosts(8.4e-6, 0.0, 3.4e-6, 14e-6, MAX_CTAS / MULTIPROCESSORS, trees=True),
    "gloo": CallCosts(5e-5, 0.0, 1.35e-4, 1.35e-4),
}
"""Default costs of each backend's calls. nccl: the latencies by which NCCL 2.30 chooses its algorithms
(src/graph/tuning.cc, ncclTunerConstantsDefaults: protocol Simple, rings, NVLink within a machine, a network between
machines); no run of decentnode has measured them. gloo: measured with two processes on two cores (docs/benchmarks.rst,
"Costs of calls")."""


def costs_of(backend: str, config: CallCostsConfig) -> CallCosts:
    """Returns the costs of a backend's calls: those that the config gives, and the others from COSTS."""
    given = {key: value for key, value in config.model_dump().items() if value is not None}
    return replace(COSTS[backend], **given)


def gpus_of(experiment: Experiment) -> dict[int, int]:
    """Returns the nodes whose models are on a GPU according to the config, each with a number that identifies the GPU.
    The device `cuda`, and if the config asks for NCCL also `auto`, means a GPU of its own for every node of a
    machine."""
    mapping = experiment.make_mapping()
    wants_nccl = getattr(experiment.communication, "backend", "auto") == "nccl"
    found: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    for uid in range(mapping.num_nodes):
        place = mapping.place(uid)
        if place.device.startswith("cuda") or (place.device == "auto" and wants_nccl):
            number = int(place.device.partition(":")[2] or place.rank)
            found[uid] = numbers.setdefault((place.machine, number), len(numbers) + 1)
    return found


def backend_of(experiment: Experiment, members: Sequence[int]) -> str:
    """Returns the backend of a clique of these nodes. If the config leaves it open, it is NCCL if each node has its own
    GPU, else gloo."""
    wanted = str(getattr(experiment.communication, "backend", "auto"))
    if wanted != "auto":
        return wanted
    gpus = gpus_of(experiment)
    return "nccl" if len({gpus[uid] for uid in members if uid in gpus}) == len(members) else "gloo"


def calls_of(experiment: Experiment, network: Network, members: Sequence[int], chunk_bytes: float) -> Calls:
    """Returns the operations between these nodes, with the costs of their backend."""
    return Calls(costs_of(backend_of(experiment, members), network.config.calls), network, chunk_bytes)


class CliqueTransfers:
    """The transfers of an experiment with cliques: those of `Traffic`, with payloads inside a clique sent by operations
    of torch.distributed. A pure function of the experiment and the round."""

    def __init__(self, experiment: Experiment, traffic: Traffic, network: Network) -> None:
        communication = experiment.communication
        assert isinstance(communication, TorchConfig)
        self._config, self._experiment, self._traffic = communication, experiment, traffic
        where = dict(enumerate(network.machine_of.tolist()))
        self.routing = dataclasses.replace(communication.routing(where), gpu=gpus_of(experiment))
        self._cliques = [joined for clique in self.routing.cliques if (joined := self.routing.joined(clique))]
        self._backends = [backend_of(experiment, clique) for clique in self._cliques]
        self._calls = [calls_of(experiment, network, clique, communication.chunk_bytes) for clique in self._cliques]
        compute = experiment.simulate.compute
        skips = compute is not None and compute.when_away == "skip" and bool(compute.availability or compute.churn)
        self._allows_collectives = communication.use_collectives and experiment.node.missing == "fail" and not skips
        """Whether the members of a clique may exchange by one collective call; not if rounds may proceed without some
        of them."""
        self._is_complete: dict[int, bool] = {}
        """For each clique: whether all edges between its members use torch.distributed."""
        self._clique_index = {uid: index for index, clique in enumerate(self._cliques) for uid in clique}
        self._cache: dict[int, tuple[tuple[Transfers, ...], tuple[Transfers, ...]]] = {}

    def __call__(self, round: int) -> tuple[Transfers, ...]:
        """Returns the transfers of each phase of a round; the same objects again if the edges are the same."""
        plain = self._traffic(round)
        if not self._cliques:
            return plain
        known = self._cache.get(id(plain))  # `Traffic` returns the same object for all rounds with the same edges
        if known is None:
            if len(self._cache) >= CACHED_TRANSFERS:
                self._cache.clear()
            due = self._traffic.due(round)
            made = tuple(
                self._phase_transfers(each, [self._collective_of_clique(index, due, round, phase)
                                             for index in range(len(self._cliques))])
                for phase, each in enumerate(plain)
            )
            known = self._cache[id(plain)] = plain, made  # `plain` is kept, so that its id is not reused
        return known[1]

    def _phase_transfers(self, plain: Transfers, kinds: Sequence[Kind | None]) -> Transfers:
        phase = PhaseBuilder()
        inside: list[list[tuple[tuple[int, int], float]]] = [[] for _ in self._cliques]
        outside: list[tuple[tuple[int, int], float]] = []
        for i, j, size in zip(plain.source.tolist(), plain.target.tolist(), plain.sizes.tolist(), strict=True):
            by_clique = self.routing.path(i, j) == "collective"
            (inside[self._clique_index[i]] if by_clique else outside).append(((i, j), size))
        if outside:
            edges, sizes = map(list, zip(*outside, strict=True))
            phase.add(edges, sizes, [MESSAGE] * len(edges), [0.0] * len(edges))
        for index, found in enumerate(inside):
            calls, kind = self._calls[index], kinds[index]
            if not found:
                continue
            edges, sizes = map(list, zip(*found, strict=True))
            if kind is not None:
                mixed = sum(size for (_, j), size in found if j == edges[0][1]) if kind == "all_gather" else sizes[0]
                flows = calls.average(self._cliques[index], sizes[0], kind)
                phase.add_call(flows, mixed, calls.costs.busy_share)
            else:
                batched = self._backends[index] == "nccl" or self._config.batched
                modes, seconds = calls.point_to_point(edges, sizes, batched=batched)
                phase.add(edges, sizes, modes, seconds, calls.costs.busy_share)
        return phase.transfers()

    # -- calls of a whole clique

    def _collective_of_clique(
        self, index: int, due: Sequence[tuple[ExchangedFragment, int]], round: int, phase: int
    ) -> Kind | None:
        """Returns the collective call by which a clique exchanges all fragments of a round; None if they, or some of
        them, are sent point to point."""
        clique = self._cliques[index]
        if not due or not self._allows_collectives or len(clique) < 3:
            return None
        kinds = {self._collective_of_fragment(each, number, clique, round, phase, self._backends[index] == "nccl")
                 for each, number in due}  # fmt: skip
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is not None and index not in self._is_complete:
            self._is_complete[index] = all(self.routing.path(a, b) == "collective" for a, b in combinations(clique, 2))
        return kind if kind is None or self._is_complete[index] else None

    def _collective_of_fragment(
        self, each: ExchangedFragment, number: int, clique: tuple[int, ...], round: int, phase: int, scatters: bool
    ) -> Kind | None:
        rule, elements = each.rule, each.fragment.elements
        if rule.requirements.scalars:
            return None
        first = averaging_group_of(each.fragment.graph, clique[0], number)  # the same for all members of a group
        view = self._planned_view(each, first, clique[0], round, phase)
        if any(self._planned_view(each, first, uid, round, phase).averaging != clique for uid in clique):
            return None
        schedule, dtype = self._experiment.node.schedule, each.dtype
        tensors = payload_schema(schedule, rule, elements, dtype)
        schema = Schema(elements, tensors, rule.requirements.elementwise)
        model = torch.empty(elements, dtype=sent_dtype(schedule, rule, dtype), device="meta")
        own = rule.own_contribution(model, view)
        if own is not None and self._config.non_finite == "reject":
            return None
        if rule.requirements.linear or (own is None and (each.is_shared or phase)):  # later phases: taken as shared
            outgoing = dict.fromkeys(view.neighbors, Payload({}))
        elif own is None:
            return None
        else:
            outgoing = rule.outgoing(model, view)
        return kind_of(AveragingGroup(clique, own), outgoing, schema, scatters)

    def _planned_view(
        self, each: ExchangedFragment, group: tuple[int, ...], uid: int, round: int, phase: int
    ) -> RoundView:
        """Returns a node's view of the round, as planned by its rule. group: the graph's averaging group, given to its
        members."""
        view = view_of(each.rule, each.fragment, uid, round, self._experiment.seed)
        return each.rule.plan(replace(view, averaging_group=group if uid in group else (), phase=phase))
