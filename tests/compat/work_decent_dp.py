"""What ranks do in the tests of Decent-DP's face."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from decentnode.compat import decent_dp
from decentnode.compat.decent_dp import Edge, Topology, TopologyReg
from tests.parallel.work import models
from tests.parallel.work.models import batch, flat, model

RATE, CLIP = 0.1, 0.5


class Pairs(Topology):
    """The topology of Decent-DP's tutorial, for four ranks."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge(ranks=[0, 1], weight=0.5), Edge(ranks=[2, 3], weight=0.5)],
                [Edge(ranks=[0, 2], weight=0.5), Edge(ranks=[1, 3], weight=0.5)],
                [Edge(ranks=[3, 0], weight=0.5), Edge(ranks=[2, 1], weight=0.5)]]  # fmt: skip


class Uneven(Topology):
    """Edges of two and four ranks, with weights of many kinds."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge(ranks=[0, 1], weight=0.3), Edge(ranks=[3, 2], weight=0.4)],
                [Edge(ranks=[0, 2], weight=0.6), Edge(ranks=[1, 3], weight=0.7)],
                [Edge(ranks=[0, 1, 2, 3], weight=0.4)]]  # fmt: skip


class Hooked(torch.optim.SGD):
    """SGD that writes down what `pre_average_hook` is told, and what the buffers hold then."""

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        sums = [float(p.comm_buffer.sum()) for group in self.param_groups for p in group["params"]]
        self.told = [*getattr(self, "told", []), (edge.ranks, weight, sum(sums))]


def train(
    rank: int, n: int, options: dict[str, Any], steps: int, average: int, hooked: bool = False,
    topology: type[Topology] = Pairs, passes: int = 1, evaluates: bool = False,
) -> Any:
    """Trains over a topology; averages after every `average` steps, without reverting. passes: backward passes of
    a step. evaluates: forward passes in eval mode come between steps. (parameters, what hooks heard, optimizers)."""
    TopologyReg.registry["custom"] = topology
    kind = Hooked if hooked else torch.optim.SGD
    wrapped = decent_dp.DecentralizedDataParallel(
        model(), lambda named: kind([p for _, p in named], lr=RATE), topology="custom", **options
    )
    for t in range(steps):
        wrapped.train()
        for number in range(passes):
            wrapped.set_accumulate_grad(number < passes - 1)
            x, y = batch(rank, t * passes + number)
            ((wrapped(x) - y).square().mean() / passes).backward()
        if evaluates:
            wrapped.eval()
            with torch.inference_mode():
                wrapped(x)
        if average and t % average == average - 1:
            wrapped.global_avg()
    told = [each for optimizer in wrapped._optims for each in getattr(optimizer, "told", [])]
    return flat(wrapped._model).tolist(), told, len(wrapped._optims)


def simulated(
    steps: int, average: int, there: bool, clipped: bool = False, topology: type[Topology] = Pairs, passes: int = 1,
) -> list[list[float]]:
    """Independently, in one process and float64: [rank] parameters. there: as Decent-DP 0.2.3 does it, whose second
    step mixes what was sent over the edges of round 1 with the weight of round 2."""
    rounds = topology._get_topo_edges(None)  # type: ignore[arg-type]

    def edge(rank: int, number: int) -> Edge:
        return next(each for each in rounds[number % len(rounds)] if rank in each.ranks)

    modules = [model().double() for _ in range(4)]
    at = [flat(module) for module in modules]
    """Where the gradient is taken."""
    base = [x.clone() for x in at]
    """What was sent."""
    for t in range(steps):
        updates = []
        for rank, module in enumerate(modules):
            torch.nn.utils.vector_to_parameters(at[rank], module.parameters())
            batches = [batch(rank, t * passes + number) for number in range(passes)]
            loss = torch.stack([(module(x.double()) - y).square().mean() for x, y in batches]).mean()
            grads = torch.autograd.grad(loss, list(module.parameters()))
            if clipped:
                grads = tuple(g * min(1.0, CLIP / (float(g.norm()) + 1e-6)) for g in grads)
            updates.append(-RATE * torch.cat([g.reshape(-1) for g in grads]))
        mixed: list[Tensor] = at
        if t:
            mixed = []
            for rank in range(4):
                sent, kept = edge(rank, t + 1 if there and t > 1 else t), edge(rank, t + 1 if there else t)
                share, others = ((1 - each.weight) / (len(each.ranks) - 1) for each in (sent, kept))
                total = torch.stack([base[j] for j in sent.ranks]).sum(0)
                mixed.append((kept.weight - others) * at[rank] + share * total)
        base = [mixed[i] + updates[i] for i in range(4)]
        at = base
        if average and t % average == average - 1:
            at = [torch.stack(base).mean(0)] * 4
            base = base if there else at
    return [x.tolist() for x in at]


def resumed(rank: int, n: int, average: int, at: int) -> dict[str, list[float]]:
    """A run with `faithful=True` that is saved after `at` steps and goes on: the largest differences of its parameters
    and buffers, after each further step, from those of runs that have loaded what was saved."""
    TopologyReg.registry["custom"] = Pairs

    def wrapped(bucket_size_in_mb: float) -> decent_dp.DecentralizedDataParallel:
        return decent_dp.DecentralizedDataParallel(
            torch.nn.Sequential(*model()[:1], torch.nn.BatchNorm1d(8).to(models.DEVICE), *model(1)[1:]),  # type: ignore[index]
            lambda named: torch.optim.SGD([p for _, p in named], lr=RATE, momentum=0.9),
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "custom", bucket_size_in_mb=bucket_size_in_mb, faithful=True,
        )  # fmt: skip

    def step(each: decent_dp.DecentralizedDataParallel, t: int) -> Tensor:
        x, y = batch(rank, t)
        (each(x) - y).square().mean().backward()
        if average and t % average == average - 1:
            each.global_avg(will_revert=t % 2 == 0)
        return torch.cat([value.double().reshape(-1) for value in each.state_dict().values()])

    first = wrapped(0.0003)
    for t in range(at):
        step(first, t)
    full, model_alone = copy.deepcopy(first.full_state_dict()), copy.deepcopy(first.state_dict())
    lists = [copy.deepcopy([each.state_dict() for each in kind]) for kind in (first._optims, first._lr_schedulers)]
    rate = first.get_lr()
    expected = [step(first, t) for t in range(at, at + 5)]
    found = {}
    for name in ("full", "full, another bucket size", "lists", "lists, after steps"):
        other = wrapped(25 if "another" in name else 0.0003)
        if "after" in name:
            for t in range(90, 93):
                step(other, t)
        if "full" in name:
            other.load_state_dict(full)
        elif at > 1 and not average:  # no optimizers before the second step; a file has nothing of what is in flight
            other.load_state_dict(model_alone)
            other.load_optimizers(*lists, bucket_size_in_mb=0.0003, steps=at)
        else:
            continue
        assert other.get_lr() == rate
        found[name] = [float((step(other, at + t) - kept).abs().max()) for t, kept in enumerate(expected)]
        assert len(other._optims) == (1 if "another" in name else len(first._optims)) and len(first._optims) > 2
    return found
