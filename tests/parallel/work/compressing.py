"""What ranks do in the tests of compressed and delayed exchanges, and the same in one process."""

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


def _decoded(coding: Coding, vector: Tensor, sizes: Sequence[int]) -> Tensor:
    """A model as receivers decode it: the largest of its entries, or all of them by the codec, tensor by tensor."""
    if coding.fraction < 1:
        assert coding.codec is None
        at = vector.abs().topk(round(coding.fraction * len(vector))).indices
        return torch.zeros_like(vector).index_copy_(0, at, vector[at])
    codec = coding.codec
    assert codec is not None and not codec.unbiased
    return torch.cat([codec.decode(codec.encode(piece), len(piece), piece.dtype) for piece in vector.split(sizes)])


def simulate(topology: Any, sharing: Any, n: int, steps: int, delayed: bool) -> list[Tensor]:
    """By rank, the parameters after so many steps: x_i + sum_j W_ij (q_j - q_i), half of it if delayed, then the local
    step.

    q_i is what is known of x_i: the decoded model, or a public copy for each round of the topology's period.
    """
    graph, rule = make_topology(topology, n, n), make_sharing(sharing)
    if isinstance(rule, Differences):
        rule.choose_step(graph)
    plans = [Plan(graph, rule, rank, delayed) for rank in range(n)]
    coding, models = make_coding(rule), [model().cpu() for _ in range(n)]
    sizes = [p.numel() for p in models[0].parameters()]
    optimizers = [SGD(m.parameters()) for m in models]
    public: dict[int, list[Tensor]] = {}

    def sent(step: int) -> tuple[int, list[Tensor]] | None:
        x = [flat(m) for m in models]
        if rule.exchange_number(step) is None:
            return None
        if coding is None:
            return step, x
        if not coding.differences:
            return step, [_decoded(coding, each, sizes) for each in x]
        phase = plans[0].phase(step)
        known = public.get(phase)
        public[phase] = x if known is None else [
            old + _decoded(coding, new - old, sizes) for old, new in zip(known, x, strict=True)]
        return step, public[phase]

    flight = sent(0)
    for t in range(steps):
        rests = delayed and rule.exchange_number(t + 1) is None
        for rank, m in enumerate(models):
            x, y = (each.cpu() for each in batch(rank, t))
            m.zero_grad()
            (m(x) - y).square().mean().backward()
        for rank, m in enumerate(models):
            if flight is not None and not rests:
                step, q = flight
                half = 0.5 if delayed else 1.0
                pull = half * sum(w * (q[j] - q[rank]).double() for j, w in plans[rank].view(step).weights.items())
                torch.nn.utils.vector_to_parameters((flat(m).double() + pull).float(), m.parameters())
            optimizers[rank].step()
        flight = flight if rests else sent(t + 1)
    return [flat(m) for m in models]


def train(
    rank: int, n: int, topology: Any, sharing: Any, options: dict[str, Any], steps: int
) -> tuple[float, dict[str, float], int]:
    """(greatest difference from the simulation, metrics, parameters)."""
    wrapped = DecentralizedDataParallel(model(rank), optimizer=SGD, topology=topology, sharing=sharing, **options)
    for t in range(steps):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    found = flat(wrapped.module)
    expected = simulate(topology, sharing, n, steps, bool(options.get("delayed")))[rank]
    return float((found - expected).abs().max()), wrapped.metrics, found.numel()


def settle(rank: int, n: int, cases: Sequence[tuple[Any, Any, dict[str, Any]]]) -> list[tuple[float, float, float]]:
    """For each (topology, rule, options): ranks that have drifted apart take steps without gradients. (spread before,
    spread after, how far the mean has moved; all relative to the models' norm)."""
    found = []
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

        def spread(wrapped: DecentralizedDataParallel = wrapped) -> tuple[float, Tensor]:
            own = flat(wrapped.module)
            mean = own.clone()
            dist.all_reduce(mean)
            mean /= n
            distance = (own - mean).norm() / mean.norm()
            dist.all_reduce(distance)
            return float(distance) / n, mean

        before, first = spread()
        for _ in range(160):
            (0.0 * wrapped(x)).sum().backward()
        after, last = spread()
        found.append((before, after, float((last - first).norm() / first.norm())))
        wrapped.close()
        dist.barrier()
    return found


def resume(rank: int, n: int, sharing: Any, options: dict[str, Any], at: int) -> bool:
    """Whether a training that is saved and loaded after `at` steps has the bits of one that is not."""
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


def refused(rank: int, n: int, topology: Any, sharing: Any, options: dict[str, Any]) -> str:
    """Why a model cannot be wrapped so."""
    try:
        DecentralizedDataParallel(model(), optimizer=SGD, topology=topology, sharing=sharing, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def searched(rank: int, n: int, sharing: Any) -> tuple[int, list[float | None]]:
    """(searches of this rank, the steps of its buckets' rules), where the ranks' processors would find different ones.
    """
    searches = []

    def search(rule: Differences, _: Any) -> None:
        searches.append(rule)
        rule.step_size = 0.5 + rank / 8

    with mock.patch.object(Differences, "choose_step", search):
        wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", sharing=sharing)
    rules = [bucket.rule for bucket in wrapped._gossip.buckets]
    return len(searches), [rule.step_size for rule in rules if isinstance(rule, Differences)]
