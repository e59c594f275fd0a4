"""Predicts one candidate: the duration, traffic and consensus of its rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from decentnode.experiment import Experiment
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.graph.spectrum import mixing
from decentnode.sharing.rounds import LONGEST_REST, exchange_interval
from decentnode.simulate.cliques import calls_of
from decentnode.simulate.data_parallel import BUCKET_BYTES, all_reduce_clock
from decentnode.simulate.planner.consensus import Consensus, rule_consensus
from decentnode.simulate.timeline.network import Transfers
from decentnode.simulate.timeline.rounds import time_line
from decentnode.simulate.traffic import ExchangedFragment, Traffic
from decentnode.simulate.virtual import local_steps, make_clock, make_compute, make_network

LEAST_ROUNDS, MAX_ROUNDS = 16, 2 * LONGEST_REST
"""Least and greatest number of rounds whose means are a candidate's figures: two cycles in between."""
DRAWN_ROUNDS, DRAWN_NODES = 128, 128
"""Least number of rounds if the edges of at most this many nodes are drawn anew in each: with matcha, which has no more
nodes, the bytes of a round differ much."""
ALL_REDUCE_STEPS = 128
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "accum_adam": 3, "accum_adamw": 3}
"""Copies of the parameters that optimizers keep. Other optimizers keep 1 if they have momentum, else 0."""


@dataclass(frozen=True)
class Prediction:
    """The predicted figures of a candidate."""

    graph: str
    sharing: str
    compression: str
    local_steps: int
    batch_size: int
    round_seconds: float
    compute_seconds: float
    """Duration of a round's local steps, mean over the nodes."""
    bytes_per_node: float
    """Bytes sent per round, mean over the nodes."""
    busiest_link: str
    """The connection that is busy for the largest share of the time; empty if no connection has a bandwidth limit."""
    busiest_seconds: float
    """Seconds for which it is busy in a round, mean."""
    busiest_bytes: float
    """Bytes that pass it in a round, mean."""
    busiest_share: float
    """Share of the time for which it is busy, from the start of the rounds until all transfers are over."""
    consensus_rate: float | None
    """Factor per round by which the distance to the mean shrinks; None if it is not known."""
    consensus_rounds: int | None
    consensus_seconds: float | None
    """Seconds until the distance to the mean is `target` of its first value; None for never, or not known."""
    consensus_measured: bool
    memory_bytes: float
    """Memory of a node for parameters, gradients, optimizer and payloads in flight; activations and data are not
    included."""
    samples_per_second: float
    """Samples per second that all nodes together train on."""
    overrides: tuple[str, ...] = ()
    """The changes to the config that make it this candidate, as arguments of `--set`."""

    @property
    def name(self) -> str:
        parts = [self.graph, self.sharing, *([self.compression] if self.compression != "none" else [])]
        return f"{' '.join(parts)} H={self.local_steps} batch={self.batch_size}"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def predict_memory(experiment: Experiment, model: float, transfers: Iterable[Transfers]) -> float:
    """Returns the bytes of a node's tensors: parameters, gradients and optimizer, two publish slots (one of which is
    the parameters themselves), the update that the overlapped schedule keeps, and the payloads that neighbors may have
    sent.

    model: its bytes. transfers: those of a round with an exchange.
    """
    optimizer = getattr(getattr(experiment.training, "optimizer", None), "name", "")
    momentum = getattr(getattr(experiment.training, "optimizer", None), "momentum", 0.0)
    copies = 3 + OPTIMIZER_STATES.get(optimizer, 1 if momentum else 0)
    copies += experiment.node.schedule == "overlapped"
    window = getattr(experiment.communication, "window_bytes", 64 << 20)
    received = 0.0
    for each in transfers:
        for uid in set(each.target.tolist()[:64]):
            sizes = each.mixed[each.target == uid]
            received = max(received, float(sum(min(size, window) for size in sizes.tolist())))
    return float(copies * model + received)


def predict_consensus(experiment: Experiment, traffic: Traffic, target: float) -> Consensus:
    """Returns how fast nodes reach consensus: from the spectrum for linear rules, else measured, or from the spectrum
    if the graph is too large to measure. With fragments, that of the slowest one."""
    parts = {(id(each.fragment.graph), each.fragment.every): each for each in traffic.exchanged}
    found = [_consensus_of(experiment, each, target) for each in parts.values()]
    return max(found, key=lambda each: (math.inf if each.rounds is None else each.rounds, each.rate or 0.0))


def _consensus_of(experiment: Experiment, part: ExchangedFragment, target: float) -> Consensus:
    rule, graph, every = part.rule, part.fragment.graph, part.fragment.every
    needs = rule.requirements
    measured = None
    if not needs.linear or needs.overrides_topology:
        machines = experiment.make_mapping().nodes_by_machine()
        measured = rule_consensus(experiment.sharing, machines, graph, target, experiment.seed)
    if measured is None:
        every *= exchange_interval(rule)
    found = measured or Consensus(*mixing(graph, target), False)
    rate = None if found.rate is None else found.rate ** (1 / every)
    return replace(found, rate=rate, rounds=None if found.rounds is None else every * found.rounds)


def predict(
    experiment: Experiment, *, links: LinksConfig | None, step_seconds: float | None, target: float,
    module: torch.nn.Module | None = None, overrides: Sequence[str] = (), labels: Mapping[str, str] | None = None,
) -> Prediction:
    """Returns the prediction of one experiment. step_seconds: duration of a local step with its batch size; None: as
    the experiment says. module: its model, on any device. labels: names of graph, sharing and compression. Raises what
    its parts raise."""
    traffic = Traffic(experiment, module)
    made = make_clock(experiment, links=links, step_seconds=step_seconds, traffic=traffic)
    is_drawn = any(each.fragment.graph.period is None for each in traffic.exchanged)
    least = DRAWN_ROUNDS if is_drawn and traffic.num_nodes <= DRAWN_NODES else LEAST_ROUNDS
    rounds = min(max(2, -(-least // traffic.cycle)) * traffic.cycle, MAX_ROUNDS)
    found = time_line(made, rounds)
    loads: dict[str, list[float]] = {}
    sent = 0.0
    for r in range(rounds):
        for transfers in made.transfers(r):
            sent += float(transfers.sizes.sum()) / rounds / traffic.num_nodes
            for name, (size, seconds) in made.network.loads(transfers).items():
                total = loads.setdefault(name, [0.0, 0.0])
                total[0] += size / rounds
                total[1] += seconds / rounds
    busiest = max(loads, key=lambda name: loads[name][1], default="")
    consensus = predict_consensus(experiment, traffic, target)
    exchanged = made.transfers(next(r for r in range(4096) if traffic.due(r)))
    round_seconds, steps = found.steady_seconds(), local_steps(experiment)
    batch = int(getattr(experiment.training, "batch_size", 1))
    compression = getattr(experiment.sharing, "compression", None)
    names = labels or {}
    trained = 1.0 if traffic.trains is None else sum(float(traffic.trains(r).mean()) for r in range(rounds)) / rounds
    return Prediction(
        names.get("graph", experiment.graph.name), names.get("sharing", experiment.sharing.name),
        names.get("compression", compression.name if compression is not None else "none"), steps, batch,
        round_seconds, float((found.computed - found.steps_began).mean()), sent,
        busiest, loads[busiest][1] if busiest else 0.0, loads[busiest][0] if busiest else 0.0,
        rounds * loads[busiest][1] / made.over if busiest else 0.0,
        consensus.rate, consensus.rounds, None if consensus.rounds is None else consensus.rounds * round_seconds,
        consensus.measured, predict_memory(experiment, traffic.model_bytes, exchanged),
        trained * traffic.num_nodes * steps * batch / round_seconds if round_seconds else 0.0, tuple(overrides),
    )  # fmt: skip


@dataclass(frozen=True)
class AllReduce:
    """The predicted figures of data-parallel training with the same model, samples, batches and links: in every step
    all nodes average their gradients, as PyTorch's DistributedDataParallel does."""

    step_seconds: float
    compute_seconds: float
    """Duration of a step's computation, mean over the nodes."""
    bytes_per_node: float
    """Bytes sent per step, mean over the nodes."""
    samples_per_second: float
    """Samples per second that all nodes together train on."""


def predict_all_reduce(
    experiment: Experiment, *, links: LinksConfig | None, step_seconds: float | None,
    module: torch.nn.Module | None = None,
) -> AllReduce:
    """Returns the prediction of data-parallel training on all nodes of an experiment. Parameters as for `predict`."""
    section = experiment.simulate
    compute = make_compute(experiment, section.compute or ComputeConfig.model_validate({}), step_seconds, steps=1)
    network = make_network(experiment, links or section.links or LinksConfig.model_validate({}), compute)
    size = Traffic(experiment, module).model_bytes
    calls = calls_of(experiment, network, range(compute.num_nodes), BUCKET_BYTES)
    clock = all_reduce_clock(compute, calls, network, size)
    found, batch = time_line(clock, ALL_REDUCE_STEPS), int(getattr(experiment.training, "batch_size", 1))
    seconds, n = found.steady_seconds(), compute.num_nodes
    sent = sum(float(each.sizes.sum()) for each in clock.transfers(0)) / n
    return AllReduce(seconds, float((found.computed - found.steps_began).mean()), sent,
                     n * batch / seconds if seconds else 0.0)  # fmt: skip
