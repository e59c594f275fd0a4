"""Step times of data parallel training on one host: alone, PyTorch's DDP, DecentralizedDataParallel.

Same model, data and fused optimizer; one thread per rank, gloo. "alone" is all ranks training at once without talking.
AccumAdam's step is timed beside torch's fused Adam, memory bandwidth beside both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import machine, memory_ceilings
from torch import Tensor, nn

from decentnode.optim import AccumAdam
from decentnode.parallel import DecentralizedDataParallel

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "decentnode.parallel"])
STEPS, WARM = 14, 4
ADAM = partial(torch.optim.Adam, lr=1e-3, fused=True)


class Transformer(nn.Module):
    """About 10 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, 320)
        layer = nn.TransformerEncoderLayer(320, 5, 1280, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(320, 4000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(784, 2800), nn.ReLU(), nn.Linear(2800, 2700), nn.ReLU(),
                                         nn.Linear(2700, 10))  # fmt: skip
        return model, torch.randn(32, 784), torch.randint(0, 10, (32,))
    return Transformer(), torch.randint(0, 4000, (4, 32)), torch.randint(0, 4000, (4 * 32,))


def train(rank: int, world: int, store: str, name: str, way: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model, x, y = make(name)
    optimizer: Any = None
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif way != "alone":
        model = DecentralizedDataParallel(model, optimizer=ADAM, topology="one-peer-exp", transport=way)  # type: ignore[arg-type]
    if not isinstance(model, DecentralizedDataParallel):
        optimizer = ADAM(model.parameters())
    times = []
    for _ in range(STEPS + WARM):
        started = time.perf_counter()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    exposed = model.metrics["exposed_seconds"] / (STEPS + WARM) if optimizer is None else 0.0  # type: ignore[union-attr,operator]
    dist.barrier()
    pipe.send((statistics.median(times[WARM:]), exposed))
    os._exit(0)


def measure(world: int, name: str, way: str) -> tuple[float, float]:
    """(median step, exposed communication) of the slowest rank, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=train, args=(rank, world, f"{folder}/store", name, way, theirs))
            process.start()
            pipes.append(mine)
            processes.append(process)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return max(found)


def optimizer_steps() -> dict[str, float]:
    """Seconds of one optimizer step on 10 M parameters, one thread."""
    torch.set_num_threads(1)
    params = [torch.randn(1000, 1000, requires_grad=True) for _ in range(10)]
    for p in params:
        p.grad = torch.randn_like(p)
    found = {}
    for name, optimizer in (("fused Adam", ADAM(params)), ("AccumAdam, window 1", AccumAdam(params, accum_iter=1)),
                            ("AccumAdam, window 4", AccumAdam(params, accum_iter=4))):  # fmt: skip
        times = []
        for _ in range(16):
            started = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - started)
        found[name] = statistics.mean(times[4:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["transformer", "mlp"])
    options = parser.parse_args()
    ceilings = memory_ceilings()
    print(machine())
    print(f"ceilings: memory copy {ceilings['copy']:.1f} GB/s, axpy {ceilings['axpy']:.1f} GB/s (one thread)\n")
    for name, seconds in (steps := optimizer_steps()).items():
        print(f"step of {name:20} {1e3 * seconds:7.2f} ms  {seconds / steps['fused Adam']:5.2f} of fused Adam")
    print(f"\n{'model':12} {'ranks':>5} {'way':>14} {'step':>10} {'/alone':>7} {'/ddp':>6} {'exposed':>10}")
    for name in options.models:
        for world in (2, 4):
            alone, _ = measure(world, name, "alone")
            ddp, _ = measure(world, name, "ddp")
            for way in ("alone", "ddp", "collective", "shared_memory"):
                step, exposed = {"alone": (alone, 0.0), "ddp": (ddp, 0.0)}.get(way) or measure(world, name, way)
                print(f"{name:12} {world:5} {way:>14} {1e3 * step:7.1f} ms {step / alone:7.2f} {step / ddp:6.2f} "
                      f"{1e3 * exposed:7.1f} ms", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
