"""bash eval/bench.sh secure_aggregation: the CPU time of a node's rule in one round, with whole models and with parts,
beside that of full.

All take turns in one process with one thread, without a network; the least time of the turns counts.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from common import machine
from torch import Tensor

from decentnode.config.component import load_class, section
from decentnode.graph import GRAPHS, WEIGHTS, build
from decentnode.graph.base import Graph, view
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing

NODES, TURNS = 9, 7
FRACTIONS = (1.0, 0.7, 0.3, 0.1)


class Nodes:
    """The rules and models of all nodes."""

    def __init__(self, name: str, graph: Graph, parameters: int, **options: float) -> None:
        config = load_class(name, SHARINGS, "sharing").Config.model_validate({"name": name, **options})
        self.rules: list[Sharing] = [load_class(name, SHARINGS, "sharing")(config) for _ in range(NODES)]
        self.models, self.graph, self.seconds = [torch.randn(parameters) for _ in range(NODES)], graph, [float("inf")]
        for each in self.rules:
            each.set_parameter_shapes([(parameters,)])
            each.payload_schema(parameters, torch.float32)

    def round(self, number: int) -> None:
        """Makes one round and notes its CPU seconds per node."""
        started = time.process_time()
        for phase in range(self.rules[0].requirements.phases):
            self._exchange(number, phase)
        self.seconds.append((time.process_time() - started) / NODES)

    def _exchange(self, number: int, phase: int) -> None:
        views = [each.plan(replace(view(self.graph, uid, number), phase=phase)) for uid, each in enumerate(self.rules)]
        nodes: list[tuple[Sharing, Tensor]] = list(zip(self.rules, self.models, strict=True))
        sent = [each.outgoing(model, seen) for (each, model), seen in zip(nodes, views, strict=True)]
        for uid, ((each, model), seen) in enumerate(zip(nodes, views, strict=True)):
            each.mix(model, {j: each.unpack(sent[j][uid], j, seen) for j in seen.sources}, seen)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    print("parameters  neighbors      full" + "".join(f"{f'fraction {each:g}':>15s}" for each in FRACTIONS), "   times")
    for parameters in (10_000, 1_000_000):
        for degree in (2, 4, 8):
            config = section(GRAPHS, "graph").validate({"name": "regular", "nodes": NODES, "degree": degree})
            weights = section(WEIGHTS, "weights").validate({"name": "metropolis_hastings"})
            graph = build(config, weights, 1)
            every = [Nodes("full", graph, parameters)]
            every += [Nodes("secure_aggregation", graph, parameters, fraction=each) for each in FRACTIONS]
            for turn in range(TURNS):
                for each in every:
                    each.round(turn)
            full, *secure = (1e3 * min(each.seconds) for each in every)
            columns = "".join(f"{each:12.2f} ms" for each in secure)
            print(f"{parameters:10,d} {degree:10d} {full:7.2f} ms{columns} {secure[0] / full:8.0f}", flush=True)


if __name__ == "__main__":
    main()
