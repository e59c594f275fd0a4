"""Functions of ranks for the tests of `decentnode.compat.decent_dp`, and a simulation of Decent-DP in one process."""

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


class UnevenWeights(Topology):
    """Edges of two and of four ranks, with different weights."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge(ranks=[0, 1], weight=0.3), Edge(ranks=[3, 2], weight=0.4)],
                [Edge(ranks=[0, 2], weight=0.6), Edge(ranks=[1, 3], weight=0.7)],
                [Edge(ranks=[0, 1, 2, 3], weight=0.4)]]  # fmt: skip


class RecordingSGD(torch.optim.SGD):
    """SGD that records the arguments of `pre_average_hook` and the sum of the communication buffers at that time."""

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        sums = [float(p.comm_buffer.sum()) for group in self.param_groups for p in group["params"]]
        self.hook_calls = [*getattr(self, "hook_calls", []), (edge.ranks, weight, sum(sums))]


def train(
    rank: int, n: int, options: dict[str, Any], steps: int, average: int, hooked: bool = False,
    topology: type[Topology] = Pairs, passes: int = 1, evaluates: bool = False,
) -> Any:
    """Trains over a topology. Returns (parameters, calls of `pre_average_hook`, number of optimizers).

    average: the number of steps between averages, which are not reverted, 0 for none. hooked: with RecordingSGD.
    passes: backward passes per step. evaluates: a forward pass in eval mode comes after every step."""
    TopologyReg.registry["custom"] = topology
    kind = RecordingSGD if hooked else torch.optim.SGD
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
    hook_calls = [call for optimizer in wrapped._optims for call in getattr(optimizer, "hook_calls", [])]
    return flat(wrapped._model).tolist(), hook_calls, len(wrapped._optims)


def simulate(
    steps: int, average: int, faithful: bool, clipped: bool = False, topology: type[Topology] = Pairs, passes: int = 1,
) -> list[list[float]]:
    """Returns the parameters of each rank by an independent computation in one process, in float64. faithful: as in
    Decent-DP 0.2.3, whose second step mixes what was sent over the edges of round 1 with the weight of round 2."""
    rounds = topology._get_topo_edges(None)  # type: ignore[arg-type]

    def edge(rank: int, number: int) -> Edge:
        return next(edge for edge in rounds[number % len(rounds)] if rank in edge.ranks)

    modules = [model().double() for _ in range(4)]
    at = [flat(module) for module in modules]
    """[rank] the point at which its gradient is taken."""
    sent = [x.clone() for x in at]
    """[rank] the parameters that it sent last."""
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
                exchanged = edge(rank, t + 1 if faithful and t > 1 else t)
                weighted = edge(rank, t + 1 if faithful else t)
                share, own_share = ((1 - e.weight) / (len(e.ranks) - 1) for e in (exchanged, weighted))
                total = torch.stack([sent[j] for j in exchanged.ranks]).sum(0)
                mixed.append((weighted.weight - own_share) * at[rank] + share * total)
        sent = [mixed[i] + updates[i] for i in range(4)]
        at = sent
        if average and t % average == average - 1:
            at = [torch.stack(sent).mean(0)] * 4
            sent = sent if faithful else at
    return [x.tolist() for x in at]


def resume_and_compare(rank: int, n: int, average: int, at: int) -> dict[str, list[float]]:
    """Trains with `faithful=True`, saves after `at` steps and trains five more. Returns, for each way of loading what
    was saved, the largest differences of parameters and buffers after each of the same five steps."""
    TopologyReg.registry["custom"] = Pairs

    def make(bucket_size_in_mb: float) -> decent_dp.DecentralizedDataParallel:
        return decent_dp.DecentralizedDataParallel(
            torch.nn.Sequential(*model()[:1], torch.nn.BatchNorm1d(8).to(models.DEVICE), *model(1)[1:]),  # type: ignore[index]
            lambda named: torch.optim.SGD([p for _, p in named], lr=RATE, momentum=0.9),
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "custom", bucket_size_in_mb=bucket_size_in_mb, faithful=True,
        )  # fmt: skip

    def step(wrapped: decent_dp.DecentralizedDataParallel, t: int) -> Tensor:
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
        if average and t % average == average - 1:
            wrapped.global_avg(will_revert=t % 2 == 0)
        return torch.cat([value.double().reshape(-1) for value in wrapped.state_dict().values()])

    first = make(0.0003)
    for t in range(at):
        step(first, t)
    full, model_alone = copy.deepcopy(first.full_state_dict()), copy.deepcopy(first.state_dict())
    lists = [copy.deepcopy([part.state_dict() for part in parts])
             for parts in (first._optims, first._lr_schedulers)]  # fmt: skip
    rate = first.get_lr()
    expected = [step(first, t) for t in range(at, at + 5)]
    differences = {}
    for name in ("full", "full, another bucket size", "lists", "lists, after steps"):
        other = make(25 if "another" in name else 0.0003)
        if "after" in name:
            for t in range(90, 93):
                step(other, t)
        if "full" in name:
            other.load_state_dict(full)
        # before the second step there are no optimizers, and after an average the lists lack what is in flight
        elif at > 1 and not average:
            other.load_state_dict(model_alone)
            other.load_optimizers(*lists, bucket_size_in_mb=0.0003, steps=at)
        else:
            continue
        assert other.get_lr() == rate
        differences[name] = [float((step(other, at + t) - state).abs().max()) for t, state in enumerate(expected)]
        assert len(other._optims) == (1 if "another" in name else len(first._optims)) and len(first._optims) > 2
    return differences
