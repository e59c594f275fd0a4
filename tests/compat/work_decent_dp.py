"""What ranks do in the tests of Decent-DP's face."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentnode.compat import decent_dp
from decentnode.compat.decent_dp import Edge, Topology, TopologyReg
from tests.parallel.work.models import batch, flat, model

RATE, CLIP = 0.1, 0.5


class Pairs(Topology):
    """The topology of Decent-DP's tutorial, for four ranks."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge(ranks=[0, 1], weight=0.5), Edge(ranks=[2, 3], weight=0.5)],
                [Edge(ranks=[0, 2], weight=0.5), Edge(ranks=[1, 3], weight=0.5)],
                [Edge(ranks=[3, 0], weight=0.5), Edge(ranks=[2, 1], weight=0.5)]]  # fmt: skip


class Hooked(torch.optim.SGD):
    """SGD that writes down what `pre_average_hook` is told, and what the buffers hold then."""

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        sums = [float(p.comm_buffer.sum()) for group in self.param_groups for p in group["params"]]
        self.told = [*getattr(self, "told", []), (edge.ranks, weight, sum(sums))]


def train(rank: int, n: int, options: dict[str, Any], steps: int, average: int, hooked: bool = False) -> Any:
    """Trains over `Pairs`; averages after every `average` steps, without reverting. (parameters, what hooks heard)."""
    TopologyReg.registry["pairs"] = Pairs
    kind = Hooked if hooked else torch.optim.SGD
    wrapped = decent_dp.DecentralizedDataParallel(
        model(), lambda named: kind([p for _, p in named], lr=RATE), topology="pairs", **options
    )
    for t in range(steps):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
        if average and t % average == average - 1:
            wrapped.global_avg()
    told = [each for optimizer in wrapped._optims for each in getattr(optimizer, "told", [])]
    return flat(wrapped._model).tolist(), told, len(wrapped._optims)


def simulated(steps: int, average: int, there: bool, clipped: bool = False) -> list[list[float]]:
    """Independently, in one process and float64: [rank] parameters. there: as Decent-DP 0.2.3 does it."""
    pairs = [{0: 1, 1: 0, 2: 3, 3: 2}, {0: 2, 2: 0, 1: 3, 3: 1}, {0: 3, 3: 0, 1: 2, 2: 1}]
    modules = [model().double() for _ in range(4)]
    at = [flat(module) for module in modules]
    """Where the gradient is taken."""
    base = [x.clone() for x in at]
    """What is mixed."""
    for t in range(steps):
        updates = []
        for rank, module in enumerate(modules):
            torch.nn.utils.vector_to_parameters(at[rank], module.parameters())
            x, y = batch(rank, t)
            grads = torch.autograd.grad((module(x.double()) - y).square().mean(), list(module.parameters()))
            if clipped:
                grads = tuple(g * min(1.0, CLIP / (float(g.norm()) + 1e-6)) for g in grads)
            updates.append(-RATE * torch.cat([g.reshape(-1) for g in grads]))
        number = t + 1 if there and t > 1 else t
        mates = pairs[number % 3]
        mixed: list[Tensor] = [(base[i] + base[mates[i]]) / 2 for i in range(4)] if t else base
        base = [mixed[i] + updates[i] for i in range(4)]
        at = base
        if average and t % average == average - 1:
            mean = torch.stack(base).mean(0)
            at = [mean] * 4
            base = base if there else at
    return [x.tolist() for x in at]
