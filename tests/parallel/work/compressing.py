"""Functions of ranks for the tests of compressed and delayed exchanges, and a simulation of them in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentnode.parallel import DecentralizedDataParallel
from decentnode.parallel.planning.differences import Differences
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import Coding, make_coding, make_sharing
from decentnode.parallel.planning.topologies import make_topology
from tests.parallel.work.models import SGD, batch, flat, model


def _decode(coding: Coding, vector: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns a model as receivers decode it: its largest entries alone, or all of them through the codec, tensor by
    tensor."""
    if coding.fraction < 1:
        assert coding.codec is None
        at = vector.abs().topk(round(coding.fraction * len(vector))).indices
        return torch.zeros_like(vector).index_copy_(0, at, vector[at])
    codec = coding.codec
    assert codec is not None and not codec.unbiased
    return torch.cat([codec.decode(codec.encode(piece), len(piece), piece.dtype) for piece in vector.split(sizes)])


def simulate(topology: Any, sharing: Any, n: int, steps: int, delayed: bool) -> list[Tensor]:
    """Returns the parameters of each rank after so many steps of x_i <- x_i + c sum_j W_ij (q_j - q_i) and the local
    step, where c is 1/2 if exchanges are delayed, else 1.

    q_i is what receivers know of x_i: the decoded model, or with compressed differences the copy that all neighbors
    have, one for each round of the topology's period.
    """
    graph, rule = make_topology(topology, n, n), make_sharing(sharing)
    if isinstance(rule, Differences):
        rule.choose_step(graph)
    plans = [Plan(graph, rule, rank, delayed) for rank in range(n)]
    coding, models = make_coding(rule), [model().cpu() for _ in range(n)]
    sizes = [p.numel() for p in models[0].parameters()]
    optimizers = [SGD(m.parameters()) for m in models]
    public: dict[int, list[Tensor]] = {}

    def start_exchange(step: int) -> tuple[int, list[Tensor]] | None:
        x = [flat(m) for m in models]
        if rule.exchange_number(step) is None:
            return None
        if coding is None:
            return step, x
        if not coding.differences:
            return step, [_decode(coding, vector, sizes) for vector in x]
        phase = plans[0].phase(step)
        known = public.get(phase)
        public[phase] = x if known is None else [
            old + _decode(coding, new - old, sizes) for old, new in zip(known, x, strict=True)]
        return step, public[phase]

    in_flight = start_exchange(0)
    for t in range(steps):
        no_exchange_due = delayed and rule.exchange_number(t + 1) is None
        for rank, m in enumerate(models):
            x, y = (tensor.cpu() for tensor in batch(rank, t))
            m.zero_grad()
            (m(x) - y).square().mean().backward()
        for rank, m in enumerate(models):
            if in_flight is not None and not no_exchange_due:
                step, q = in_flight
                strength = 0.5 if delayed else 1.0
                pull = strength * sum(w * (q[j] - q[rank]).double() for j, w in plans[rank].view(step).weights.items())
                torch.nn.utils.vector_to_parameters((flat(m).double() + pull).float(), m.parameters())
            optimizers[rank].step()
        in_flight = in_flight if no_exchange_due else start_exchange(t + 1)
    return [flat(m) for m in models]


def train(
    rank: int, n: int, topology: Any, sharing: Any, options: dict[str, Any], steps: int
) -> tuple[float, dict[str, float], int]:
    """Trains with a compressed or delayed rule. Returns (greatest difference from `simulate`, metrics, number of
    parameters)."""
    wrapped = DecentralizedDataParallel(model(rank), optimizer=SGD, topology=topology, sharing=sharing, **options)
    for t in range(steps):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    results = flat(wrapped.module)
    expected = simulate(topology, sharing, n, steps, bool(options.get("delayed")))[rank]
    return float((results - expected).abs().max()), wrapped.metrics, results.numel()


def mix_without_gradients(
    rank: int, n: int, cases: Sequence[tuple[Any, Any, dict[str, Any]]]
) -> list[tuple[float, float, float]]:
    """For each (topology, rule, options), gives the ranks different models and takes 160 steps whose gradients are
    zero. Returns by case (distance from the mean before, after, distance by which the mean moved), all relative to the
    norm of the mean, the first two averaged over the ranks."""
    results = []
    for topology, sharing, options in cases:
        wrapped = DecentralizedDataParallel(
            nn.Linear(40, 50), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), topology=topology,
            sharing=sharing, bucket_size_in_mb=0.002, **options,
        )  # fmt: skip
        x = torch.zeros(1, 40)
        with torch.no_grad():
            draws = torch.Generator().manual_seed(rank)
            for p in wrapped.parameters():
                p.add_(torch.randn(p.shape, generator=draws))

        def distance_and_mean(wrapped: DecentralizedDataParallel = wrapped) -> tuple[float, Tensor]:
            own = flat(wrapped.module)
            mean = own.clone()
            dist.all_reduce(mean)
            mean /= n
            distance = (own - mean).norm() / mean.norm()
            dist.all_reduce(distance)
            return float(distance) / n, mean

        before, first = distance_and_mean()
        for _ in range(160):
            (0.0 * wrapped(x)).sum().backward()
        after, last = distance_and_mean()
        results.append((before, after, float((last - first).norm() / first.norm())))
        wrapped.close()
        dist.barrier()
    return results


def resume_and_compare(rank: int, n: int, sharing: Any, options: dict[str, Any], at: int) -> bool:
    """Returns whether a training that is saved and loaded after `at` steps has the bits of one that is not."""
    ends = []
    make = functools.partial(DecentralizedDataParallel, optimizer=SGD, topology="ring", sharing=sharing, **options)
    for cut in (-1, at):
        wrapped = make(model())
        for t in range(12):
            if t == cut:
                state = copy.deepcopy(wrapped.state_dict())
                wrapped.close()
                wrapped = make(model(7))
                wrapped.load_state_dict(state)
            x, y = batch(rank, t)
            (wrapped(x) - y).square().mean().backward()
        ends.append(flat(wrapped.module))
        wrapped.close()
        dist.barrier()
    return torch.equal(*ends)


def load_and_coast(rank: int, n: int, rule: str, how: str) -> float:
    """Loads a model, before the first step or with `how` "later" in the middle of a turn, and trains two turns with
    next to no learning rate. Returns the largest difference from the loaded model."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=functools.partial(torch.optim.SGD, lr=1e-9), sharing={"name": rule, "every": 4})
    loaded = {name: torch.full_like(value, 5.0) for name, value in model().state_dict().items()}
    for t in range(12):
        if t == (6 if how == "later" else 0):
            (wrapped.module if how == "module" else wrapped).load_state_dict(loaded)
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    return float((flat(wrapped.module) - 5.0).abs().max())


def reason_of_refusal(rank: int, n: int, topology: Any, sharing: Any, options: dict[str, Any]) -> str:
    """Returns the error with which a model with these arguments is refused, "nothing" if it is not."""
    try:
        DecentralizedDataParallel(model(), optimizer=SGD, topology=topology, sharing=sharing, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def count_step_searches(rank: int, n: int, sharing: Any) -> tuple[int, list[float | None]]:
    """Returns (number of searches for a step size on this rank, the step sizes of its buckets' rules). The search is
    replaced by one that gives every rank another size, as different processors would."""
    searches = []

    def search(rule: Differences, _: Any) -> None:
        searches.append(rule)
        rule.step_size = 0.5 + rank / 8

    with mock.patch.object(Differences, "choose_step", search):
        wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", sharing=sharing)
    rules = [bucket.rule for bucket in wrapped._gossip.buckets]
    return len(searches), [rule.step_size for rule in rules if isinstance(rule, Differences)]
