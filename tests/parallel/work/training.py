"""Functions of ranks for the tests of training with DecentralizedDataParallel."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from decentnode.optim import AccumAdam
from decentnode.parallel import DecentralizedDataParallel
from decentnode.parallel.buckets import bucket as buckets
from decentnode.parallel.planning.topologies import make_topology
from decentnode.parallel.transports import shared_memory
from tests.parallel.work.models import SGD, ImageModel, MixedPrecision, UnusualParameters, batch, flat, model
from tests.parallel.work.simulation import make_rule_argument, simulate, simulate_rule


def train_with_rule(rank: int, n: int, topology: Any, section: Any, transport: str, cut: int) -> tuple[float, float]:
    """Trains 7 steps with a rule, from a saved and loaded state at step `cut` on. Returns (greatest difference from the
    simulation, greatest change of a parameter)."""
    def make() -> DecentralizedDataParallel:
        return DecentralizedDataParallel(
            model(), optimizer=SGD, topology=topology, sharing=make_rule_argument(section), bucket_size_in_mb=0,
            transport=transport,  # type: ignore[arg-type]
        )  # fmt: skip

    wrapped = make()
    start = flat(wrapped.module)
    for t in range(7):
        if t == cut:
            state = copy.deepcopy(wrapped.state_dict())
            wrapped = make()
            wrapped.load_state_dict(state)
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    results, expected = flat(wrapped.module), simulate_rule(make_topology(topology, n, n), section, n, 7)[rank]
    return float((results - expected).abs().max()), float((results - start).abs().max())


def train(
    rank: int, n: int, topology: Any, steps: int, options: dict[str, Any]
) -> tuple[list[float], float, dict[str, float]]:
    """Trains D-PSGD. Returns (final parameters, greatest difference from the simulation, metrics)."""
    wrapped = DecentralizedDataParallel(model(rank), optimizer=SGD, topology=topology, **options)
    for t in range(steps):
        x, y = batch(rank, t)
        wrapped.zero_grad()
        (wrapped(x) - y).square().mean().backward()
    graph = make_topology(topology, n, options.get("local_world_size", n))
    expected = simulate(graph, n, steps)[rank]
    return flat(wrapped.module).tolist(), float((flat(wrapped.module) - expected).abs().max()), wrapped.metrics


def train_with_and_without_regroup(
    rank: int, n: int, topology: Any, transport: str, sharing: Any, delayed: bool = False
) -> tuple[list[float], list[float]]:
    """Returns the parameters after a training with an average in it, without missing="regroup" and with it."""
    results = []
    for missing in ("fail", "regroup"):
        own_transport = "collective" if transport == "sockets" and missing == "fail" else transport
        wrapped = DecentralizedDataParallel(
            model(rank), optimizer=SGD, topology=topology, sharing=make_rule_argument(sharing),
            bucket_size_in_mb=0.0001, transport=own_transport, missing=missing, delayed=delayed,  # type: ignore[arg-type]
        )  # fmt: skip
        for t in range(9):
            if t == 6:
                wrapped.global_avg(will_revert=False)
            x, y = batch(rank, t)
            (wrapped(x) - y).square().mean().backward()
        wrapped.consensus_distance()
        results.append(flat(wrapped.module).tolist())
        dist.barrier()
    return results[0], results[1]


def train_with_adaptive_factor(rank: int, n: int, topology: str, transport: str) -> float:
    """Trains with a factor that the script sets between steps, from a saved and loaded state at step 4 on. Returns the
    greatest difference from the simulation."""
    def make() -> DecentralizedDataParallel:
        return DecentralizedDataParallel(model(), optimizer=SGD, topology=topology, transport=transport)  # type: ignore[arg-type]

    factors = [1.0, 1.0, 0.3, 0.3, 0.3, 0.0, 0.8]
    wrapped = make()
    for t, factor in enumerate(factors):
        if t == 4:  # the state has the factor
            state = copy.deepcopy(wrapped.state_dict())
            wrapped = make()
            wrapped.load_state_dict(state)
        elif t:
            wrapped.set_adaptive_factor(factor)
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    expected = simulate(make_topology(topology, n, n), n, len(factors), factors)[rank]
    return float((flat(wrapped.module) - expected).abs().max())


OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD, "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "accum_adam": partial(AccumAdam, lr=0.01, accum_iter=2, weight_decay=0.1),
    "groups": lambda params: torch.optim.Adam([{"params": p, "lr": 0.01 / (1 + p.dim())} for p in params]),
}  # fmt: skip


def step_by_parts(rank: int, n: int, name: str, transport: str, compiled: bool) -> tuple[bool, int, list[int]]:
    """Takes 5 steps whose updates are made part by part while models arrive, and 5 with one update each, both with or
    both without compiled loops. Returns (whether both have the same bits, number of parts, calls of the optimizer
    in either)."""
    buckets.PART_BYTES, buckets.BLOCK_BYTES = 128, 64
    if not compiled:
        buckets.loops = lambda: None  # type: ignore[assignment]
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    made, calls = [], [0, 0]
    for way in range(2):
        made.append(DecentralizedDataParallel(
            model(), optimizer=OPTIMIZERS[name], topology="exp", grad_clip_norm=1.0, lr_scheduler_fn=schedule,
            transport=transport,  # type: ignore[arg-type]
        ))  # fmt: skip
        update = made[way]._gossip.part_steps.update if way == 0 else made[way].optimizer.step

        def counted(*args: Any, way: int = way, update: Any = update) -> None:
            calls[way] += 1
            update(*args)

        if way == 0:
            made[way]._gossip.part_steps.update = counted  # type: ignore[method-assign]
        else:
            made[way].optimizer.step = counted  # type: ignore[method-assign]
    for t in range(5):
        x, y = batch(rank, t)
        for wrapped in made:
            (wrapped(x) - y).square().mean().backward()
    parts = [part for bucket in made[0]._gossip.buckets for part in bucket.parts]
    same = torch.equal(flat(made[0].module), flat(made[1].module))
    return same, len(parts), calls


def accumulate_gradients(rank: int, n: int) -> float:
    """Trains with whole batches, with two half batches by no_sync, and by set_accumulate_grad. Returns the greatest
    difference of the latter two from the first."""
    whole = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    halves = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    flagged = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    for t in range(3):
        (x, y), (u, v) = batch(rank, 2 * t), batch(rank, 2 * t + 1)
        (((whole(x) - y).square().mean() + (whole(u) - v).square().mean()) / 2).backward()
        with halves.no_sync():
            ((halves(x) - y).square().mean() / 2).backward()
        ((halves(u) - v).square().mean() / 2).backward()
        flagged.set_accumulate_grad(True)
        ((flagged(x) - y).square().mean() / 2).backward()
        flagged.set_accumulate_grad(False)
        ((flagged(u) - v).square().mean() / 2).backward()
    a = flat(whole.module)
    return max(float((a - flat(other.module)).abs().max()) for other in (halves, flagged))


def train_unusual_parameters(rank: int, n: int, clip: float) -> tuple[float, float, bool]:
    """Trains UnusualParameters, whose gradients come in another order on each rank. Returns (greatest difference
    between ranks of the averaged model, norm of a clipped update, whether frozen parameters are equal on all ranks)."""
    torch.manual_seed(rank)
    scale = 100.0 if clip else 1.0
    wrapped = DecentralizedDataParallel(
        UnusualParameters(), optimizer=partial(torch.optim.SGD, lr=0.1), topology="complete", grad_clip_norm=clip,
        bucket_size_in_mb=0, sync_buffer_in_global_avg=True,
    )  # fmt: skip
    for t in range(6):
        wrapped.module.flip = bool((t + rank) % 2)
        x, y = batch(rank, t)
        (scale * (wrapped(x) - y).square().mean()).backward()
    before = flat(wrapped.module)
    wrapped._gossip.restart_exchange()
    x, y = batch(0, 50)
    wrapped.module.flip = True
    mixed = before.clone()
    dist.all_reduce(mixed)
    (scale * (wrapped(x) - y).square().mean()).backward()
    moved = float((flat(wrapped.module) - mixed / n).norm())
    with wrapped.averaged():
        frozen = [torch.zeros(6) for _ in range(n)]
        dist.all_gather(frozen, wrapped.module.frozen.detach())
        after = flat(wrapped.module)
        both = [torch.zeros_like(after) for _ in range(n)]
        dist.all_gather(both, after)
    return float((both[0] - both[-1]).abs().max()), moved, torch.equal(frozen[0], frozen[-1])


def train_kind_of_model(rank: int, n: int, what: str) -> tuple[float, bool]:
    """Takes five steps with a kind of model. Returns (greatest difference from the simulation, whether types and memory
    formats were kept and five steps taken)."""
    def make() -> nn.Module:
        torch.manual_seed(0)
        return {"mixed": MixedPrecision, "channels_last": ImageModel}.get(what, model)()

    compiled = partial(torch.compile, backend="aot_eager")
    inner = make()
    formats = [(p.dtype, p.stride()) for p in inner.parameters()]
    given: Any = compiled(inner) if what == "compiled inside" else inner
    wrapped = DecentralizedDataParallel(
        given, optimizer=SGD, topology="complete", grad_clip_norm=1.0 if what == "mixed" else 0.0,
    )  # fmt: skip
    called: Any = compiled(wrapped) if what == "compiled outside" else wrapped
    others = [make() for _ in range(n)]
    optimizers = [SGD(m.parameters()) for m in others]

    def backward(module: Any, r: int, t: int) -> None:
        x, y = batch(r, t)
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            loss = (module(x) - y).square().mean()
        loss.backward()

    for t in range(5):
        backward(called, rank, t)
        for r, other in enumerate(others):
            backward(other, r, t)
            if what == "mixed":
                nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        with torch.no_grad():
            for by_rank in zip(*(m.parameters() for m in others), strict=True):
                mean = torch.stack([p.float() for p in by_rank]).mean(0)
                for p in by_rank:
                    p.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(inner.parameters(), others[rank].parameters(), strict=True)
    difference = max(float((p.float() - q.float()).abs().max()) for p, q in pairs)
    return difference, formats == [(p.dtype, p.stride()) for p in inner.parameters()] and wrapped.steps == 5


def resume_and_compare(rank: int, n: int, transport: str, folder: str) -> bool:
    """Returns whether a training that is restored in the middle, into a new wrapper or the same one, gives the bits of
    one that was not. folder: for the files of shared memory."""
    shared_memory.FOLDER = Path(folder)

    def make() -> DecentralizedDataParallel:
        return DecentralizedDataParallel(
            model(rank), optimizer=SGD, topology="exp", transport=transport,  # type: ignore[arg-type]
            lr_scheduler_fn=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        )  # fmt: skip

    def steps(wrapped: DecentralizedDataParallel, first: int, last: int) -> None:
        for t in range(first, last):
            x, y = batch(rank, t)
            (wrapped(x) - y).square().mean().backward()

    straight, cut = make(), make()
    steps(straight, 0, 9)
    steps(cut, 0, 4)
    state = copy.deepcopy(cut.state_dict())
    steps(cut, 4, 6)
    again = make()
    again.load_state_dict(state)
    steps(again, 4, 9)
    cut.load_state_dict(state)
    steps(cut, 4, 9)
    wanted = flat(straight.module)
    same = torch.equal(wanted, flat(again.module)) and torch.equal(wanted, flat(cut.module))
    return same and again.get_lr() == straight.get_lr() and again.steps == 9


def train_with_overflow_on_rank_0(rank: int, n: int) -> tuple[float, int, bool]:
    """Trains with a GradScaler whose first step overflows on rank 0 alone. Returns (greatest change of a parameter in
    that step, steps, whether the model stays finite)."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete", scaler=scaler, grad_clip_norm=1.0)
    start = flat(wrapped.module)
    x, y = batch(rank, 0)
    loss = (wrapped(x) - y).square().mean()
    scaler.scale(loss * (float("inf") if rank == 0 else 1.0)).backward()
    moved = float((flat(wrapped.module) - start).abs().max())
    for t in range(1, 5):
        x, y = batch(rank, t)
        scaler.scale((wrapped(x) - y).square().mean()).backward()
    return moved, wrapped.steps, bool(torch.isfinite(flat(wrapped.module)).all())
