"""What a run will send, told before it starts: from the schemas of its rule and the neighbors that the rule plans."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from decentnode.build import machines_of
from decentnode.experiment import Experiment
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.rounds import exchange_rounds, rule_view

LOOKED_AT = 64
"""Exchanges that are searched for the first in which node 0 has neighbors."""


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes of payloads, without what the wire adds."""

    message: int
    """Of one payload."""
    sent: float
    """By a node in a round that has an exchange, mean over the nodes."""
    exact: bool
    """Otherwise these are the most there can be."""
    first: int
    """Round of the first exchange."""


def estimate_traffic(experiment: Experiment, module: nn.Module) -> TrafficEstimate:
    """Of the experiment's rule with the codec around it, float buffers included. Raises what making the rule raises."""
    graph = experiment.make_graph()
    parameters = [p for p in module.parameters() if p.requires_grad]
    elements, dtype = sum(p.numel() for p in parameters), parameters[0].dtype if parameters else torch.float32
    rule = make_sharing(experiment.sharing, machines_of(experiment.make_mapping()))
    rule.set_parameter_shapes([tuple(p.shape) for p in parameters])
    specs = rule.payload_schema(elements, dtype).values()
    message, buffers = sum(spec.max_elements * spec.dtype.itemsize for spec in specs), 0
    if experiment.node.buffers == "average":
        buffers = sum(b.numel() * b.element_size() for b in module.buffers() if b.is_floating_point())

    def messages(uid: int, round: int) -> int:
        seen = rule_view(rule, graph, uid, round, experiment.seed)
        return sum(len(rule.plan(replace(seen, phase=phase)).neighbors) for phase in range(rule.phases))

    nodes = range(graph.num_nodes)
    first = next((r for r in itertools.islice(exchange_rounds(rule), LOOKED_AT) if messages(0, r)), 0)
    edges = sum(len(rule_view(rule, graph, uid, first).neighbors) for uid in nodes)
    sent = message * sum(messages(uid, first) for uid in nodes) + buffers * edges
    return TrafficEstimate(message, sent / graph.num_nodes, all(spec.exact for spec in specs), first)
