"""What ranks do in the tests: functions of a module, so that processes can run them."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import io
import mmap
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from decentnode.communication.shared_memory.segment import PAGE, Segment
from decentnode.config.component import Config
from decentnode.errors import AssemblyError, PeerLost
from decentnode.graph.base import Graph, RoundView
from decentnode.optim import AccumAdam
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel, buckets, shared_memory
from decentnode.parallel.plan import Plan, sharing_named
from decentnode.parallel.presence import WORDS, Presence
from decentnode.parallel.topology_names import make_topology
from decentnode.payload import Payload
from decentnode.sharing.full import Full
from tests.conftest import wait_until

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def simulate(graph: Graph, n: int, steps: int) -> list[Tensor]:
    """D-PSGD with W(t) in one process: x_i <- sum_j W_ij x_j, then the local step at the gradient of the old x_i."""
    models = [model() for _ in range(n)]
    optimizers = [SGD(m.parameters()) for m in models]
    for t in range(steps):
        for rank, m in enumerate(models):
            x, y = batch(rank, t)
            m.zero_grad()
            (m(x) - y).square().mean().backward()
        before = [flat(m).double() for m in models]
        for rank, m in enumerate(models):
            mixed = sum(w * before[j] for j, w in graph.weights(rank, t).items())
            torch.nn.utils.vector_to_parameters(mixed.float(), m.parameters())  # type: ignore[union-attr]
            optimizers[rank].step()
    return [flat(m) for m in models]


class Clipped(Full):
    """A user's own rule that is not linear: no neighbor moves an element by more than 0.01."""

    linear = False

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        before = model.clone()
        for uid, payload in received.items():
            model.add_((payload.tensors["x"] - before).clamp_(-0.01, 0.01), alpha=view.weights[uid])


def rule_of(section: Any) -> Any:
    return Clipped(Config()) if section == "object" else section


def simulate_rule(graph: Graph, section: Any, n: int, steps: int) -> list[Tensor]:
    """As `simulate`, for any elementwise rule, each rank's on its whole model."""
    models = [model() for _ in range(n)]
    optimizers = [SGD(m.parameters()) for m in models]
    rules = [sharing_named(rule_of(section)) for _ in range(n)]
    for rank, rule in enumerate(rules):
        rule.begin(flat(models[rank]), Plan(graph, rule, rank).view(0))
    for t in range(steps):
        for rank, m in enumerate(models):
            x, y = batch(rank, t)
            m.zero_grad()
            (m(x) - y).square().mean().backward()
        before = [flat(m) for m in models]
        for rank, (m, rule) in enumerate(zip(models, rules, strict=True)):
            plan, mixed = Plan(graph, rule, rank), before[rank].clone()
            view = plan.view(t)
            if view.sources:
                rule.mix(mixed, {j: Payload({"x": before[j]}) for j in view.sources}, view)
            rule.finish(mixed, view)
            rule.begin(mixed, plan.view(t + 1))
            torch.nn.utils.vector_to_parameters(mixed, m.parameters())
            optimizers[rank].step()
    return [flat(m) for m in models]


def shared_rule(rank: int, n: int, topology: Any, section: Any, transport: str, cut: int) -> tuple[float, float]:
    """Train 7 steps with a rule, started anew from its state at step `cut`; (difference from the simulation, moved)."""
    def make() -> DecentralizedDataParallel:
        return DecentralizedDataParallel(
            model(), optimizer=SGD, topology=topology, sharing=rule_of(section), bucket_size_in_mb=0,
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
    found, expected = flat(wrapped.module), simulate_rule(make_topology(topology, n, n), section, n, 7)[rank]
    return float((found - expected).abs().max()), float((found - start).abs().max())


def train(
    rank: int, n: int, topology: Any, steps: int, options: dict[str, Any]
) -> tuple[list[float], float, dict[str, float]]:
    """Train; (final parameters, greatest difference from the simulation, metrics)."""
    wrapped = DecentralizedDataParallel(model(rank), optimizer=SGD, topology=topology, **options)
    for t in range(steps):
        x, y = batch(rank, t)
        wrapped.zero_grad()
        (wrapped(x) - y).square().mean().backward()
    graph = make_topology(topology, n, options.get("local_world_size", n))
    expected = simulate(graph, n, steps)[rank]
    return flat(wrapped.module).tolist(), float((flat(wrapped.module) - expected).abs().max()), wrapped.metrics


OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD, "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "accum_adam": partial(AccumAdam, lr=0.01, accum_iter=2, weight_decay=0.1),
    "groups": lambda params: torch.optim.Adam([{"params": p, "lr": 0.01 / (1 + p.dim())} for p in params]),
}  # fmt: skip


def by_parts(rank: int, n: int, name: str, transport: str, compiled: bool) -> tuple[bool, int, int, list[int]]:
    """5 steps taken part by part beside 5 taken at once, both with compiled loops or both without: (same bits, parts,
    parts that the compiled Adam can take, calls of the optimizer)."""
    buckets.PART_BYTES, buckets.BLOCK_BYTES, buckets.WORTH_ELEMENTS = 128, 64, 1
    if not compiled:
        buckets.loops = lambda: None  # type: ignore[assignment]
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    made, calls = [], [0, 0]
    for way in range(2):
        made.append(DecentralizedDataParallel(
            model(), optimizer=OPTIMIZERS[name], topology="exp", grad_clip_norm=1.0, lr_scheduler_fn=schedule,
            transport=transport,  # type: ignore[arg-type]
        ))  # fmt: skip
        update = made[way]._update if way == 0 else made[way].optimizer.step

        def counted(*args: Any, way: int = way, update: Any = update) -> None:
            calls[way] += 1
            update(*args)

        if way == 0:
            made[way]._update = counted  # type: ignore[method-assign]
        else:
            made[way].optimizer.step = counted  # type: ignore[method-assign]
    for t in range(5):
        x, y = batch(rank, t)
        for each in made:
            (each(x) - y).square().mean().backward()
    parts = [part for bucket in made[0]._buckets for part in bucket.parts]
    same = torch.equal(flat(made[0].module), flat(made[1].module))
    return same, len(parts), sum(part.even for part in parts), calls


def features(rank: int, n: int) -> dict[str, Any]:
    """Averages, reverting, writing parameters, accumulation, odd orders: figures for the test to look at."""
    found: dict[str, Any] = {}
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", bucket_size_in_mb=25)

    def step(t: int) -> None:
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()

    for t in range(4):
        step(t)
    found["distance"] = wrapped.consensus_distance()
    local = flat(wrapped.module)
    with wrapped.averaged():
        found["averaged"] = flat(wrapped.module).tolist()
        found["off_center"] = float((flat(wrapped.module) - local).norm())
        assert wrapped.global_avg(return_d2c=True) == 0.0
    found["reverted"] = torch.equal(local, flat(wrapped.module))
    found["d2c"] = wrapped.global_avg(return_d2c=True)
    wrapped.revert_global_avg()
    wrapped.global_avg()
    wrapped.eval()
    wrapped(batch(rank, 0)[0])
    found["still_averaged"] = not torch.equal(local, flat(wrapped.module))
    wrapped.train()
    step(4)
    found["went_on"] = wrapped.steps
    wrapped.global_avg(will_revert=False)
    mean = flat(wrapped.module)
    for group in wrapped.optimizer.param_groups:
        group["lr"] = 0.0
    step(5)
    found["stays"] = float((flat(wrapped.module) - mean).abs().max())
    with torch.no_grad():
        for p in wrapped.module.parameters():
            p.fill_(7.0)
    step(6)
    step(7)
    found["written"] = (float(flat(wrapped.module).min()), float(flat(wrapped.module).max()))
    return found


class Explode(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of the backward pass")


def exception(rank: int, n: int, where: int) -> tuple[int, float]:
    """A backward pass that raises after the last layer's gradients came; (steps, distance from never having raised)."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    plain = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    for t in range(4):
        x, y = batch(rank, t)
        if t == where:
            layers = wrapped.module
            try:
                layers[2:](Explode.apply(layers[:2](x))).sum().backward()
            except ArithmeticError:
                wrapped.zero_grad()
        for each in (wrapped, plain):
            (each(x) - y).square().mean().backward()
    return wrapped.steps, float((flat(wrapped.module) - flat(plain.module)).abs().max())


WRITES = {"element": "auto", "data": "collective", "numpy": "auto", "swap": "auto", "copy": "auto",
          "load": "collective"}  # fmt: skip
"""How a script writes -> the transport to try it with."""


def writes(rank: int, n: int) -> dict[str, tuple[float, float]]:
    return {way: write(rank, n, way, transport) for way, transport in WRITES.items()}


def write(rank: int, n: int, way: str, transport: Any) -> tuple[float, float]:
    """One element (or all) raised by 3 on rank 0 between two steps, with a learning rate of 0 and W = 1/n.

    (what the mean gained, greatest difference between ranks after the next step); the gain must not be lost.
    """
    wrapped = DecentralizedDataParallel(
        nn.Linear(301, 7, bias=False), optimizer=partial(torch.optim.SGD, lr=0.0), topology="complete",
        transport=transport,
    )  # fmt: skip
    p = wrapped.module.weight
    x = torch.ones(2, 301)
    wrapped(x).sum().backward()
    before = flat(wrapped.module).double().sum()
    if rank == 0:
        with torch.no_grad():
            if way == "element":
                p[3, 58] += 3.0
            elif way == "data":
                p.data[3, 58] += 3.0
            elif way == "numpy":
                p.detach().numpy()[3, 58] += 3.0
            elif way == "swap":
                p.data = p.data + 3.0 / p.numel()
            elif way == "copy":
                p.data.copy_(p.data + 3.0 / p.numel())
            else:
                wrapped.module.load_state_dict({"weight": p + 3.0 / p.numel()})
    for _ in range(2):
        wrapped(x).sum().backward()
    after = flat(wrapped.module)
    others = [torch.zeros_like(after) for _ in range(n)]
    dist.all_gather(others, after)
    return float(after.double().sum() - before), float((others[0] - others[-1]).abs().max())


@dataclass
class Output:
    logits: Tensor


class Checkpointed(nn.Module):
    """All but the first layer run again in the backward pass; says what it found in a dict with a dataclass in it."""

    def __init__(self, layers: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x: Tensor) -> dict[str, Any]:
        assert isinstance(self.layers, nn.Sequential)
        x = self.layers[0](x)
        for part in (self.layers[1:3], self.layers[3:]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return {"found": [Output(x)]}


def checkpointed(rank: int, n: int) -> tuple[list[int], float]:
    """Steps with both kinds of checkpoints, a gradient of the inputs alone taken in each; their difference."""
    wrapped = [DecentralizedDataParallel(Checkpointed(model(), kind), optimizer=SGD, topology="complete")
               for kind in (False, True)]  # fmt: skip
    for t in range(3):
        x, y = batch(rank, t)
        for each in wrapped:
            (each(x)["found"][0].logits - y).square().mean().backward()
        x.requires_grad_()
        torch.autograd.grad(wrapped[0](x)["found"][0].logits.sum(), x)
    return [each.steps for each in wrapped], float((flat(wrapped[0]) - flat(wrapped[1])).abs().max())


def accumulation(rank: int, n: int) -> float:
    """Two half batches with no_sync equal one whole; set_accumulate_grad does the same."""
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


class Odd(nn.Module):
    """Frozen, tied, unused and differently ordered parameters, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.a.weight
        self.conv = nn.Conv2d(1, 2, (2, 3)).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.flip = False

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.flip else (self.a, self.b)
        x = self.norm(self.tied(second(torch.tanh(first(x))) + self.frozen))
        out = x[:, :3] + self.conv(x.view(-1, 1, 2, 3)).flatten(1).sum(1, keepdim=True)
        return out + self.unused(x) if self.flip else out


def oddities(rank: int, n: int, clip: float) -> tuple[float, float, bool]:
    """(spread of everything after averaging all ranks often, clipped update norm, frozen parameters alike)."""
    torch.manual_seed(rank)
    scale = 100.0 if clip else 1.0
    wrapped = DecentralizedDataParallel(
        Odd(), optimizer=partial(torch.optim.SGD, lr=0.1), topology="complete", grad_clip_norm=clip,
        bucket_size_in_mb=0, sync_buffer_in_global_avg=True,
    )  # fmt: skip
    for t in range(6):
        wrapped.module.flip = bool((t + rank) % 2)
        x, y = batch(rank, t)
        (scale * (wrapped(x) - y).square().mean()).backward()
    before = flat(wrapped.module)
    wrapped._exchange.drain()
    wrapped._launch(wrapped.steps)
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


class Mixed(nn.Module):
    """float32 and bfloat16 parameters, one of them without a use in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 8).bfloat16()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.a(x)).bfloat16()
        h = torch.tanh(self.b(h))
        return self.c((self.sometimes(h) if self.calls % 2 else h).float())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = torch.cat([x, x.flip(1)], 1).tile(1, 3).view(-1, 2, 3, 6)
        return self.layers(images.contiguous(memory_format=torch.channels_last)).mean((2, 3))


def variant(rank: int, n: int, what: str) -> tuple[float, bool]:
    """Five steps of a kind of model; (difference from the simulation, types and memory formats kept)."""
    def make() -> nn.Module:
        torch.manual_seed(0)
        return {"mixed": Mixed, "channels_last": Images}.get(what, model)()

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
            for each in zip(*(m.parameters() for m in others), strict=True):
                mean = torch.stack([p.float() for p in each]).mean(0)
                for p in each:
                    p.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(inner.parameters(), others[rank].parameters(), strict=True)
    difference = max(float((p.float() - q.float()).abs().max()) for p, q in pairs)
    return difference, formats == [(p.dtype, p.stride()) for p in inner.parameters()] and wrapped.steps == 5


def resume(rank: int, n: int, transport: str, folder: str) -> bool:
    """A run cut in the middle and restored into new objects gives the same bits. folder: for shared memory."""
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


def scaled(rank: int, n: int) -> tuple[float, int, bool]:
    """A gradient scaler whose first step overflows on rank 0 alone: nothing is applied there, mixing goes on."""
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


def differing(rank: int, n: int, what: str) -> None:
    module = nn.Linear(4, 5 if rank == 1 and what == "shape" else 3)
    if rank == 1 and what == "frozen":
        module.bias.requires_grad = False
    if rank == 2 and what == "more":
        module.extra = nn.Parameter(torch.zeros(2))
    topology = "ring" if rank == 1 and what == "topology" else "complete"
    DecentralizedDataParallel(module, optimizer=SGD, topology=topology)


def vanish(rank: int, n: int, transport: str, noticed: str) -> None:
    """The last rank stops taking part, until somebody has noticed and makes the file of that name."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=SGD, topology="exp", timeout_seconds=3, transport=transport,  # type: ignore[arg-type]
    )
    for t in range(3):
        if rank == n - 1 and t == 1:
            wait_until(lambda: os.path.exists(noticed))
            return
        x, y = batch(rank, t)
        try:
            (wrapped(x) - y).square().mean().backward()
        except PeerLost:
            open(noticed, "x").close()
            raise


def leave(rank: int, n: int, how: str, transport: str, gone: int = 1) -> None:
    """Rank `gone` takes four steps fewer than the others, and then does what `how` says."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=SGD, topology="ring", timeout_seconds=1000, bucket_size_in_mb=0,
        transport=transport,  # type: ignore[arg-type]
    )
    for t in range(5 if rank == gone else 9):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    if rank != gone or how == "done":  # what is dropped here is closed, and a barrier comes next
        return
    if how == "average":
        wrapped.global_avg()
    if how == "worker left" and os.fork() == 0:  # as a data loader's: it has the rank's shared memory open
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if "decentnode-ddp" not in os.readlink(f"/proc/self/fd/{number}"):
                    os.close(number)
        time.sleep(300)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class DiskFull(OSError):
    pass


def refuses(rank: int, n: int, what: str) -> tuple[str, float]:
    """Rank 1 cannot do its part of the start. What it comes to, and a sum over all ranks that are asked for next."""

    def no(*_: object, **__: object) -> Any:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    opened = os.open

    def own_only(path: Any, flags: int, *mode: int) -> int:
        return opened(path, flags, *mode) if flags & os.O_CREAT or "decentnode-ddp" not in str(path) else no()

    if rank == 1:
        where: Any = {"mmap": mmap}.get(what.partition(".")[0], os)
        setattr(where, what.partition(".")[2], own_only if what == "os.open" else no)
    module = nn.Sequential() if rank == 1 and what == "model" else model()
    optimizer = no if rank == 1 and what == "optimizer" else SGD
    told = ""
    try:
        DecentralizedDataParallel(module, optimizer=optimizer, topology="ring", transport="shared_memory")
    except (OSError, ValueError, AssemblyError) as error:
        told = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return told, float(total)


def present(rank: int, n: int, how: str, folder: str) -> str:
    """Rank 1 leaves as `how` says, and its process lives on; what rank 0 knows of it."""
    paths = [Path(folder, str(r)) for r in range(n)]
    own = Segment.create(paths[rank], 2 * PAGE, PAGE, watched=True)
    dist.barrier()
    segments = [own if r == rank else Segment.attach(p, 2 * PAGE, PAGE, watched=True) for r, p in enumerate(paths)]
    presence: Presence | None = Presence(segments, [each.words(0, WORDS) for each in segments], rank)
    del own, segments
    assert presence is not None
    presence.at_step(3 + rank)
    dist.barrier()
    if rank == 1 and how == "closed":
        presence.close()
    elif rank == 1 and how == "forgotten":
        presence = None
        gc.collect()
    elif rank == 1 and how == "forgotten by a child" and not (child := os.fork()):
        presence = None
        gc.collect()
        os._exit(0)
    elif rank == 1 and how == "forgotten by a child":
        os.waitpid(child, 0)
    dist.barrier()
    absence = None if presence is None or rank else presence.absent([1])
    dist.barrier()
    return "" if absence is None else absence.reason


def killed_in_average(rank: int, n: int) -> float | None:
    """The last rank is killed where the others average."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", transport="shared_memory")
    if rank == n - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapped.global_avg(return_d2c=True)


def script(rank: int, n: int, path: str, arguments: list[str]) -> str:
    """Run a script as torchrun would; what it prints."""
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def elastic(rank: int, n: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A quadratic without gradients, and a short training, with a CommOptimizer."""
    warnings.simplefilter("error")
    torch.manual_seed(rank)
    still = nn.Parameter(torch.randn(7))
    start = still.detach().clone()
    local = torch.optim.SGD([still], lr=0.1, momentum=0.9 if name == "EAMSGD" else 0.0)
    comm = CommOptimizer(local, name, world_size=n, comm_period=3, **options)
    total = start.clone()
    if n > 1:
        dist.all_reduce(total)
    found: dict[str, Any] = {"unchanged": torch.equal(start, still), "center": torch.allclose(comm.center, total / n)}
    met = []
    for step in range(9):
        still.grad = torch.zeros(7)
        before = still.detach().clone()
        comm.step(loss=float(rank))
        if not torch.equal(before, still):
            met.append(step + 1)
    after = still.detach().clone()
    if n > 1:
        dist.all_reduce(after)
    found["met"] = met
    found["conserved"] = float((after + comm.center - total - total / n).abs().max())
    found["leader"] = getattr(comm.dist_optimizer, "leader", None)
    found["at"] = still.detach().tolist()
    module = model()
    local = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    trained = CommOptimizer(local, name, world_size=n, comm_period=4, **options)
    schedule = torch.optim.lr_scheduler.StepLR(trained, 5, 0.5)
    losses = []
    for t in range(30):
        x, y = batch(rank, t % 3)
        trained.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        trained.step(loss=loss.item())
        schedule.step()
        losses.append(loss.item())
        if t == 14:
            state = copy.deepcopy(trained.state_dict())
            trained = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True), name,
                                    world_size=n, comm_period=4, **options)  # fmt: skip
            trained.load_state_dict(state)
            schedule.optimizer = trained
    found["losses"] = (sum(losses[:3]), sum(losses[-3:]))
    found["lr"] = trained.param_groups[0]["lr"]
    return found


def overlapped(rank: int, n: int, name: str, period: int) -> dict[str, Any]:
    """Exchanges that fly behind the next steps: when they take effect, and a resume in the middle of one."""
    torch.manual_seed(rank)
    still = nn.Parameter(torch.randn(7))
    local = torch.optim.SGD([still], lr=0.1, momentum=0.9 if name == "EAMSGD" else 0.0)
    comm = CommOptimizer(local, name, world_size=n, comm_period=period, dist_pulling_strength=0.2, overlap=True)
    total = torch.cat([still.detach(), comm.center])
    met = []
    for step in range(9):
        still.grad, before = torch.zeros(7), still.detach().clone()
        comm.step(loss=float(rank))
        if not torch.equal(before, still):
            met.append(step + 1)
    after = torch.cat([still.detach(), comm.center])
    dist.all_reduce(total)
    dist.all_reduce(after)
    conserved = after[:7] + after[7:] / n - total[:7] - total[7:] / n
    ends = []
    for resumed in (None, *range(8, 8 + period)):
        module = model()
        make = partial(torch.optim.SGD, list(module.parameters()), lr=0.05, momentum=0.9)
        trained = CommOptimizer(make(), name, world_size=n, comm_period=period, overlap=True)
        for t in range(16):
            x, y = batch(rank, t)
            trained.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            trained.step(loss=loss.item())
            if t == resumed:
                state = copy.deepcopy(trained.state_dict())
                trained = CommOptimizer(make(), name, world_size=n, comm_period=period, overlap=True)
                trained.load_state_dict(state)
        ends.append(flat(module))
    return {"met": met, "conserved": float(conserved.abs().max()), "same": all(torch.equal(ends[0], e) for e in ends)}


def diverged(rank: int, n: int, name: str) -> tuple[int, bool]:
    """Rank 0's model and loss are no numbers; (who leads, whether this rank's model is one of numbers)."""
    p = nn.Parameter(torch.full((3,), float("nan") if rank == 0 else 1.0))
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), name, world_size=n, comm_period=1)
    p.grad = torch.zeros(3)
    comm.step(loss=float("nan") if rank == 0 else float(rank))
    return comm.dist_optimizer.leader, bool(p.isfinite().all())  # type: ignore[attr-defined]
