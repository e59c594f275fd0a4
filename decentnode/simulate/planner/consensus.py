"""Predicts how fast nodes reach consensus: for a graph from its spectrum, for a rule by letting it mix random
models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from decentnode.graph.base import Graph
from decentnode.graph.spectrum import EXACT, deviations
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.decoding import decode
from decentnode.sharing.rounds import exchange_interval, rule_view

MATRIX_SIDE = 16
"""Rules are measured on models of one MATRIX_SIDE x MATRIX_SIDE matrix."""
MEASURED_EXCHANGES, MAX_MEASURED_ROUNDS = 60, 3000
"""Number of exchanges that a rule makes to be measured, but at least two, and the most rounds for more than these."""
STALL_RATIO = 1 / 3
"""If the logarithm of the distance falls in the second half of the rounds by less than this share of its fall in the
first half, the distance has reached the error that the codec leaves. int8 on a ring of 8 has a share of .22, choco at a
tenth of the entries .53."""
FILTER_ROUNDS, FILTER_DOUBLINGS = 128, 5
"""The differences of models are filtered with the matrices of so many rounds, and with this power of 2 of their
product, until only the slowest are left."""
MEASURED_NODES = 32
"""A rule is measured on graphs of at most this many nodes; the measured rounds then take about a second."""


@dataclass(frozen=True)
class Consensus:
    """How fast the distance to the mean shrinks while nothing is learned."""

    rate: float | None
    """Factor per round, rounds without an exchange included; 0 if a period averages exactly, None if it is not known.
    """
    rounds: int | None
    """Number of rounds until the distance is `target` of its first value, whatever the models are; None if it never is,
    or if the rate is not known."""
    measured: bool
    """Whether the figures were measured by letting the rule mix models of 256 entries; else they follow from the
    product of the mixing matrices."""


def slow_models(graph: Graph, columns: int, draws: torch.Generator) -> torch.Tensor:
    """Returns random models, one per node, whose differences shrink as slowly as any do on the graph, so that the
    distance of a few rounds tells that of later ones. [n, columns] float32."""
    n = graph.num_nodes
    found = torch.randn(n, columns, generator=draws)
    product = np.eye(n)
    for round in range(FILTER_ROUNDS):
        longer = deviations(graph.matrix(round) @ product)
        if (norm := float(np.linalg.norm(longer))) < EXACT:
            break  # an exact average, before which no difference is slower than others
        product = longer / norm
    else:
        gram = product.T @ product
        for _ in range(FILTER_DOUBLINGS):
            gram = gram @ gram
            gram /= np.linalg.norm(gram)
        mean = found.double().mean(dim=0)
        slow = torch.from_numpy(gram) @ (found.double() - mean)
        found = (mean + slow * ((found.double() - mean).norm() / slow.norm())).float()
    return found


class _Mixer:
    """Runs the rules of all nodes on models of one small matrix each, with nothing learned between exchanges."""

    def __init__(self, sharing: object, machines: list[tuple[int, ...]], graph: Graph, seed: int) -> None:
        self._graph, self._seed = graph, seed
        draws = torch.Generator().manual_seed(seed)
        self.models = list(slow_models(graph, MATRIX_SIDE * MATRIX_SIDE, draws))
        self.rules = [make_sharing(sharing, machines) for _ in self.models]
        for rule in self.rules:
            rule.set_parameter_shapes([(MATRIX_SIDE, MATRIX_SIDE)])
            rule.payload_schema(MATRIX_SIDE * MATRIX_SIDE, torch.float32)

    def distance(self) -> float:
        models = torch.stack(self.models).double()
        return float((models - models.mean(dim=0)).norm())

    def round(self, number: int) -> None:
        rules, models = self.rules, self.models
        views = [rule_view(rule, self._graph, uid, number, self._seed) for uid, rule in enumerate(rules)]
        plans = [[rule.plan(replace(view, phase=phase)) for phase in range(rule.requirements.phases)]
                 for rule, view in zip(rules, views, strict=True)]  # fmt: skip
        for rule, model, plan in zip(rules, models, plans, strict=True):
            rule.begin(model, plan[0])
            rule.adjust(model, plan[0], 1.0)
        if rules[0].exchange_number(number) is None:
            return
        for phase in range(rules[0].requirements.phases):
            sent = [_snapshot(rule.outgoing(model, plan[phase]))
                    for rule, model, plan in zip(rules, models, plans, strict=True)]  # fmt: skip
            for uid, (rule, model, plan) in enumerate(zip(rules, models, plans, strict=True)):
                view = plan[phase]
                received = {j: self._decoded(rule, sent[j][uid], j, view) for j in view.sources if uid in sent[j]}
                rule.mix(model, received, view)
        for rule, model, plan in zip(rules, models, plans, strict=True):
            rule.finish(model, plan[-1])

    @staticmethod
    def _decoded(rule: Sharing, payload: Payload, uid: int, view: object) -> Payload:
        return payload if rule.requirements.elementwise else decode(rule, payload, uid, view)  # type: ignore[arg-type]


def _snapshot(payloads: dict[int, Payload]) -> dict[int, Payload]:
    """Copies payloads, which may be views of models that are about to be mixed. A payload shared by several neighbors
    stays shared."""
    copies: dict[int, Payload] = {}
    for payload in payloads.values():
        if id(payload) not in copies:
            tensors = {name: tensor.clone() for name, tensor in payload.tensors.items()}
            copies[id(payload)] = replace(payload, tensors=tensors)
    return {uid: copies[id(payload)] for uid, payload in payloads.items()}


def rule_consensus(
    sharing: object, machines: list[tuple[int, ...]], graph: Graph, target: float, seed: int
) -> Consensus | None:
    """Returns the measured consensus of a rule with its codec; None for graphs of more than MEASURED_NODES nodes.

    If the target is not reached within the rounds tried, the rate of their second half is extrapolated. If the distance
    stops shrinking, as it does with lossy codecs, the target is never reached. Raises what the rule raises.
    """
    if graph.num_nodes > MEASURED_NODES:
        return None
    with torch.no_grad():
        mixer = _Mixer(sharing, machines, graph, seed)
        first = mixer.distance()
        distances = [1.0]
        interval = exchange_interval(mixer.rules[0])
        halves = max(1, min(MEASURED_EXCHANGES, MAX_MEASURED_ROUNDS // interval) // 2)
        while len(distances) <= 2 * halves * interval:
            mixer.round(len(distances) - 1)
            distances.append(mixer.distance() / first)
            if distances[-1] <= target:
                rate = 0.0 if distances[-1] < 1e-9 else distances[-1] ** (1 / (len(distances) - 1))
                return Consensus(rate, len(distances) - 1, True)
    tried = len(distances) - 1
    half = tried // 2
    rate = (distances[-1] / distances[half]) ** (1 / (tried - half))
    is_stalled = rate > 0 and math.log(rate) > STALL_RATIO * math.log(distances[half]) / half
    if not 0 < rate**interval < 1 - 1e-3 or is_stalled:
        return Consensus(min(max(rate, 0.0), 1.0) if math.isfinite(rate) else 1.0, None, True)
    more = math.ceil(math.log(target / distances[-1]) / math.log(rate))
    return Consensus(rate, tried + more, True)
