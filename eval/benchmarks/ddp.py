"""Step times of data-parallel training on one host: alone, with PyTorch's DDP, and with DecentralizedDataParallel.

Same model, data and fused optimizer; one thread per rank, gloo. "alone": all ranks train at once without communication.
If the package decent-dp is installed (pip install --no-deps decent-dp loguru), it is measured too, over its
one-peer-exp: as it ships, with its own Adam, and with the fused one. All variants take turns in the same processes;
ratios are medians over turns. Cases: optimizer (AccumAdam's step beside torch's fused Adam), transformer and mlp (10 M
parameters, 2 and 4 ranks), tiny (1,000 small parameters, 2 ranks), link (4 ranks whose links are limited to 1 Gbit/s
and 5 ms), straggler (4 ranks, one of them at random delayed in every step: loss after the same time). Rows "with
regroup" are the variant above them with missing="regroup" and no failures; a process may have only one such wrapper, so
the second of them is measured in processes of its own, beside the same variant without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import machine, memory_ceilings
from delayed import DelayedLink
from torch import Tensor, nn

from decentnode.optim import AccumAdam
from decentnode.parallel import DecentralizedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ddp_digits import digits

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "decentnode.parallel"])
STEPS, WARM, TURN_STEPS, REST_SECONDS = 14, 4, 4, 0.05
THEIRS = ("decent-dp", "decent-dp fused") if importlib.util.find_spec("decent_dp") else ()
COPY = "copy"
WITH_REGROUP = " with regroup"
WAYS = ("alone", "ddp", "collective", "shared_memory", "shared_memory" + WITH_REGROUP, *THEIRS)
WAYS_AGAIN = ("alone", "ddp", "collective", "collective" + WITH_REGROUP)
LINK = (1e9, 5e-3)
"""Bits per second, and seconds of latency."""
HELD_UP_SECONDS, STRAGGLER_SECONDS = 0.02, 8.0
ADAM = partial(torch.optim.Adam, lr=1e-3, fused=True)


class Transformer(nn.Module):
    """A Transformer with about 10 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, 320)
        layer = nn.TransformerEncoderLayer(320, 5, 1280, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(320, 4000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class Tiny(nn.Module):
    """A network of 1,000 parameters of 16 or 320 elements and a few more, some of which do not fill a vector
    register."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size := 16 + number % 5, size) for number in range(499))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = x[:, : layer.in_features]
            x = nn.functional.pad(y + 0.05 * torch.tanh(layer(y)), (0, 20 - layer.in_features))
        return self.head(x[:, :16])


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "tiny":
        return Tiny(), torch.randn(32, 20), torch.randint(0, 10, (32,))
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(784, 2800), nn.ReLU(), nn.Linear(2800, 2700), nn.ReLU(),
                                         nn.Linear(2700, 10))  # fmt: skip
        return model, torch.randn(32, 784), torch.randint(0, 10, (32,))
    return Transformer(), torch.randint(0, 4000, (4, 32)), torch.randint(0, 4000, (4 * 32,))


def _by_names(optimizer: Callable[..., Any], named: list[tuple[str, Tensor]]) -> Any:
    return optimizer([p for _, p in named])


def wrap(model: nn.Module, way: str, optimizer: Callable[..., Any], link: DelayedLink | None) -> tuple[nn.Module, Any]:
    """Returns (the module to call, the optimizer to step if the module does not step one itself)."""
    if way in ("alone", "ddp"):
        own = optimizer(model.parameters())
        if way == "ddp":
            parallel = nn.parallel.DistributedDataParallel(model)
            if link is not None:
                parallel.register_comm_hook(None, link.hook)
            model = parallel
        return model, own
    if way in THEIRS:
        importlib.import_module("loguru").logger.disable("decent_dp")
        make = importlib.import_module("decent_dp.optim").optim_fn_adam
        own = partial(_by_names, optimizer) if way == "decent-dp fused" else make
        theirs = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel
        return theirs(model, own, topology="one-peer-exp"), None
    if link is not None:
        dist.batch_isend_irecv = link.batch_isend_irecv
    transport, regroup, _ = way.partition(WITH_REGROUP)
    return DecentralizedDataParallel(model, optimizer=optimizer, topology="one-peer-exp", transport=transport,  # type: ignore[arg-type]
                                     missing="regroup" if regroup else "fail"), None  # fmt: skip


def join(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


class Runner:
    """One variant of training a model, with the times of its steps."""

    def __init__(self, name: str, way: str, limited: bool = False) -> None:
        model, self.x, self.y = make(name)
        self.model, self.optimizer = wrap(model, way, ADAM, DelayedLink(*LINK) if limited else None)
        self.steps = 0

    def step(self) -> float:
        """Makes a step and returns its seconds."""
        started = time.perf_counter()
        nn.functional.cross_entropy(self.model(self.x).flatten(0, -2), self.y).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1
        return time.perf_counter() - started

    def figures(self) -> tuple[float, float]:
        """Returns the exposed communication and the memory passes per step."""
        if not isinstance(self.model, DecentralizedDataParallel):
            return 0.0, 0.0
        metrics = self.model.metrics
        return metrics["exposed_seconds"] / self.steps, metrics["memory_passes"]


def train(rank: int, world: int, folder: str, pipe: Any, name: str, way: str) -> None:
    """Trains over a slow link, or alone; sends the mean seconds of a step."""
    join(rank, world, folder)
    runner = Runner(name, way, limited=way != "alone")
    times = [runner.step() for _ in range(STEPS + WARM)]
    dist.barrier()
    pipe.send(statistics.mean(times[WARM:]))
    os._exit(0)


def take_turns(rank: int, world: int, folder: str, pipe: Any, name: str, turns: int, ways: Sequence[str]) -> None:
    """Runs all `ways` in the same processes, some steps of each in turn. Sends {way: (seconds per turn, figures)}, and
    as COPY the seconds in which all ranks at once copy as many bytes as the parameters have."""
    join(rank, world, folder)
    runners = {way: Runner(name, way) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in (*ways, COPY)}
    flat = torch.cat([p.detach().flatten() for p in runners["alone"].model.parameters()])
    flat = torch.stack([flat, flat])
    for turn in range(-1, turns):
        for way, runner in runners.items():
            dist.barrier()
            time.sleep(REST_SECONDS)  # lets operations of the previous variant that are in flight end
            step_seconds = [runner.step() for _ in range(1 + TURN_STEPS)][1:]
            if turn >= 0:
                times[way].append(statistics.median(step_seconds))
        dist.barrier()
        step_seconds = [_copy(flat) for _ in range(1 + TURN_STEPS)][1:]
        if turn >= 0:
            times[COPY].append(statistics.median(step_seconds))
    dist.barrier()
    pipe.send({way: (times[way], runner.figures()) for way, runner in runners.items()} | {COPY: (times[COPY], (0, 0))})
    os._exit(0)


def _copy(flat: Tensor) -> float:
    started = time.perf_counter()
    flat[0].copy_(flat[1])
    return time.perf_counter() - started


def straggle(rank: int, world: int, folder: str, pipe: Any, way: str, seconds: float) -> None:
    """Trains digits for `seconds`, with one random rank delayed in every step; sends (steps, loss of the mean
    model)."""
    join(rank, world, folder)
    images, labels, _, _ = digits()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = wrap(inner, way, partial(torch.optim.SGD, lr=0.02), None)
    delayed_rank_draws, sample_draws = torch.Generator().manual_seed(1), torch.Generator().manual_seed(rank)
    stop, last, step = Path(folder) / "stop", 1 << 60, 0
    dist.barrier()
    started = time.perf_counter()
    kept: list[Tensor] = []
    while step <= last:
        if int(torch.randint(world, (1,), generator=delayed_rank_draws)) == rank:
            time.sleep(HELD_UP_SECONDS)
        part = torch.randint(rank, len(images) - world, (16,), generator=sample_draws) // world * world + rank
        nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if not kept and time.perf_counter() - started > seconds:
            kept, steps_made = [p.detach().clone() for p in inner.parameters()], step
            if rank == 0:  # ranks are at most a few steps apart; all continue to the same step
                (Path(folder) / "new").write_text(str(step + 4 * world))
                (Path(folder) / "new").rename(stop)
        if last == 1 << 60 and stop.exists():
            last = int(stop.read_text())
    dist.barrier()
    for p in kept:
        dist.all_reduce(p)
        p.div_(world)
    with torch.no_grad():
        for p, mean in zip(inner.parameters(), kept, strict=True):
            p.copy_(mean)
        loss = float(nn.functional.cross_entropy(inner(images), labels))
    pipe.send((steps_made, loss))
    os._exit(0)


def on_ranks(world: int, work: Callable[..., None], *args: Any) -> list[Any]:
    """Runs `work` on every rank and returns what each sends, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=work, args=(rank, world, folder, theirs, *args))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return found


def optimizer_steps() -> dict[str, float]:
    """Returns the seconds of one optimizer step on 10 M parameters, one thread: medians over windows of 4 steps, in
    turn."""
    torch.set_num_threads(1)
    params = [torch.randn(1000, 1000, requires_grad=True) for _ in range(10)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizers: dict[str, Any] = {
        "fused Adam": ADAM(params), "AccumAdam, window 1": AccumAdam(params, accum_iter=1),
        "AccumAdam, window 4": AccumAdam(params, accum_iter=4),
        "  without a compiler": AccumAdam(params, accum_iter=4, fused=True),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(9):
        for name, optimizer in optimizers.items():
            started = time.perf_counter()
            for _ in range(4):
                optimizer.step()
            times[name].append((time.perf_counter() - started) / 4)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def show_optimizers() -> None:
    for name, seconds in (steps := optimizer_steps()).items():
        print(f"step of {name:20} {1e3 * seconds:7.2f} ms  {seconds / steps['fused Adam']:5.2f} of fused Adam")


def show_steps(name: str, worlds: Sequence[int], turns: int) -> None:
    heads = f"{'model':12} {'ranks':>5} {'way':>26} {'step':>10} {'/alone':>7} {'/ddp':>6} {'/without':>8} "
    heads += f"{'exposed':>10} {'passes':>7} {'/floor':>6}" + "".join(f" {'/' + each:>16}" for each in THEIRS)
    print(f"\n{heads}  (/without: the same way without regroup; passes over memory by snapshots and mixing, S: bytes "
          "of the parameters; floor: a step alone, and these passes at the speed of a copy by all ranks at once)")
    for world in worlds:
        for ways in (WAYS, WAYS_AGAIN):
            _show_ways(name, world, on_ranks(world, take_turns, name, turns, ways), ways)


def _show_ways(name: str, world: int, ranks: Sequence[Any], ways: Sequence[str]) -> None:
    """Prints one row for each variant. ranks: what `take_turns` sends."""
    times = {way: [max(each) for each in zip(*(found[way][0] for found in ranks), strict=True)]
             for way in (*ways, COPY)}  # fmt: skip

    def ratio(way: str, base: str) -> float:
        return statistics.median(t / u for t, u in zip(times[way], times[base], strict=True))

    print(f"{name:12} {world:5} {COPY:>26} {1e3 * statistics.median(times[COPY]):7.1f} ms")
    for way in ways:
        exposed, passes = (max(found[way][1][k] for found in ranks) for k in (0, 1))
        floors = [t + passes / 2 * copied for t, copied in zip(times["alone"], times[COPY], strict=True)]
        of_floor = statistics.median(t / floor for t, floor in zip(times[way], floors, strict=True))
        without = f"{ratio(way, way.removesuffix(WITH_REGROUP)):.3f}" if way.endswith(WITH_REGROUP) else ""
        theirs = "".join(f" {ratio(way, each):16.2f}" for each in THEIRS if each in ways)
        print(f"{name:12} {world:5} {way:>26} {1e3 * statistics.median(times[way]):7.1f} ms {ratio(way, 'alone'):7.2f} "
              f"{ratio(way, 'ddp'):6.2f} {without:>8} {1e3 * exposed:7.1f} ms "
              f"{f'{passes:.1f} S' if passes else '':>7} {f'{of_floor:.2f}' if passes else '':>6}{theirs}",
              flush=True)  # fmt: skip


def show_link() -> None:
    print(f"\nlinks of {LINK[0] / 1e9:g} Gbit/s and {1e3 * LINK[1]:g} ms, transformer, 4 ranks: seconds per step")
    alone = max(on_ranks(4, train, "transformer", "alone"))
    ways = ("ddp", "collective")
    found = {way: max(on_ranks(4, train, "transformer", way)) for way in ways}
    for way, seconds in (("alone", alone), ("ddp", found["ddp"]), ("decentnode, one-peer-exp", found["collective"])):
        print(f"{way:>26} {1e3 * seconds:7.1f} ms {found['ddp'] / seconds:6.2f} of DDP's throughput", flush=True)


def show_stragglers() -> None:
    print(f"\none of 4 ranks at random held up for {1e3 * HELD_UP_SECONDS:g} ms in every step, digits, "
          f"{STRAGGLER_SECONDS:g} s: loss of the mean model")  # fmt: skip
    for way in ("ddp", "collective", "shared_memory"):
        steps_made, loss = zip(*on_ranks(4, straggle, way, STRAGGLER_SECONDS), strict=True)
        print(f"{way:>26} {statistics.mean(steps_made):7.0f} steps, loss {loss[0]:.4f}", flush=True)


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "optimizer": lambda _: show_optimizers(),
    "transformer": lambda options: show_steps("transformer", options.ranks, options.turns),
    "mlp": lambda options: show_steps("mlp", options.ranks, options.turns),
    "tiny": lambda options: show_steps("tiny", [2], options.turns),
    "link": lambda _: show_link(), "straggler": lambda _: show_stragglers(),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case", help=", ".join(CASES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of transformer and mlp")
    parser.add_argument("--turns", type=int, default=8, help="of the ways of transformer and mlp")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"case must be one of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    ceilings = memory_ceilings()
    print(machine())
    print(f"ceilings: memory copy {ceilings['copy']:.1f} GB/s, axpy {ceilings['axpy']:.1f} GB/s (one thread)\n")
    for case in options.cases:
        CASES[case](options)


if __name__ == "__main__":
    main()
