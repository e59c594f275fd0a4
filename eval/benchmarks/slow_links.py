"""Time to learn over slow links: DecentralizedDataParallel beside PyTorch's DDP with its communication hooks.

Every rank is a machine of its own, a network namespace, whose cable to a common switch passes --mbit in each direction
(tc's token bucket; with --latency a switch of our own, cables.py); needs root, ip and tc. All ranks train the same
network on the handwritten digits, with each variant in turn, for --seconds each. The samples are sorted by class and
dealt in two shards to each rank, so that most ranks lack most classes. Printed are the seconds of a step; the bytes
that a rank sends in it; when the mean of all models first classified --target of the test images correctly, also in
steps and relative to DDP's time; and the final accuracy of the mean model and of the worst rank's own model. Models are
saved at some steps and evaluated after the training, so that evaluation costs no time and nothing is sent meanwhile.
Ceilings of the same run: steps without any exchange, and the transfer time of the parameters over a cable.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cables import hosts as distant_hosts
from common import machine
from overlap import ip
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from decentnode.parallel import DecentralizedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ddp_digits import digits, network

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "DDP": {},
    "DDP, fp16": {"hook": "float16"},
    "DDP, PowerSGD rank 2": {"hook": "powersgd"},
    "torch, means every 8": {"averaged": 8},
    "gossip": {"sharing": "full"},
    "gossip, bf16": {"sharing": {"name": "full", "compression": {"name": "bfloat16"}}},
    "gossip, int8 changes": {"sharing": {"name": "choco", "choose": "all", "compression": {"name": "int8"}}},
    "gossip, int4 changes": {"sharing": {"name": "choco", "choose": "all", "compression": {"name": "int4"}}},
    "gossip, largest 2 %": {"sharing": {"name": "choco", "fraction": 0.02}},
    "every 8, bf16": {"sharing": {"name": "local_sgd", "every": 8, "compression": {"name": "bfloat16"}}},
    "every 8, bf16, delayed": {"sharing": {"name": "local_sgd", "every": 8, "compression": {"name": "bfloat16"}},
                               "delayed": True},
    "every 8, int8": {"sharing": {"name": "local_sgd", "every": 8, "compression": {"name": "int8"}}},
    "every 8, int8, delayed": {"sharing": {"name": "local_sgd", "every": 8, "compression": {"name": "int8"}},
                               "delayed": True},
    "every 4, int8": {"sharing": {"name": "local_sgd", "every": 4, "compression": {"name": "int8"}}},
    "every 8, int4 changes": {"sharing": {"name": "choco", "choose": "all", "compression": {"name": "int4"},
                                          "every": 8}},
    "every 8, largest 2 %": {"sharing": {"name": "choco", "fraction": 0.02, "every": 8}},
}  # fmt: skip
"""Variants of training; "alone" exchanges nothing. Those without a `sharing` are torch's."""
MAX_AHEAD = 4
"""The most steps by which ranks are apart, in multiples of those between two exchanges."""
BURST = "64kb"


@contextlib.contextmanager
def hosts(mbit: list[float]) -> Iterator[list[tuple[str, str, str]]]:
    """Yields (namespace, address, interface) of hosts on a common switch, whose cables have these rates."""
    mark = f"dn{os.getpid() % 100000}"
    switch, net = f"{mark}s", f"10.78.{os.getpid() % 250}"
    described = [(f"{mark}h{rank}", f"{net}.{rank + 1}", f"{mark}n{rank}") for rank in range(len(mbit))]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "name", "hub", "type", "bridge")
        ip("-n", switch, "link", "set", "hub", "up")
        for rank, (name, address, host_end) in enumerate(described):
            switch_end, rate = f"{mark}f{rank}", mbit[rank]
            ip("netns", "add", name)
            ip("link", "add", host_end, "type", "veth", "peer", "name", switch_end)
            ip("link", "set", host_end, "netns", name)
            ip("link", "set", switch_end, "netns", switch)
            ip("-n", switch, "link", "set", switch_end, "master", "hub")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", host_end)
            for where, cable in ((name, host_end), (switch, switch_end)):
                ip("-n", where, "link", "set", cable, "up")
                ip("netns", "exec", where, "tc", "qdisc", "add", "dev", cable, "root", "tbf", "rate",
                   f"{rate:g}mbit", "burst", BURST, "latency", "50ms")  # fmt: skip
            ip("-n", name, "link", "set", "lo", "up")
        yield described
    finally:
        for name in [*(name for name, _, _ in described), switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def wrap(model: nn.Module, way: str) -> tuple[nn.Module, Any]:
    """Returns the module to call, and the optimizer to step if the module does not step one itself."""
    options = dict(WAYS[way])
    if "sharing" in options:
        return DecentralizedDataParallel(model, optimizer=SGD, topology="one-peer-exp", **options), None
    optimizer = SGD(model.parameters())
    if "averaged" in options:  # what torch's local SGD does once it no longer averages gradients
        averager = PeriodicModelAverager(period=options["averaged"], warmup_steps=0)
        return model, PostLocalSGDOptimizer(optim=optimizer, averager=averager)
    if way == "alone":
        return model, optimizer
    # with several buckets, PowerSGD's operations in gloo's two threads wait for others that need these threads
    one = {"bucket_cap_mb": 1000.0} if options.get("hook") == "powersgd" else {}
    parallel = nn.parallel.DistributedDataParallel(model, **one)
    if options.get("hook") == "float16":  # torch's hook for bfloat16 requires NCCL
        parallel.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    if options.get("hook") == "powersgd":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=3)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel, optimizer


def bytes_of(namespace: str) -> int:
    """Returns the bytes that have left a host, by its interface's counter."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip().endswith(namespace):
            return int(counters.split()[8])
    raise SystemExit(f"no cable {namespace}")


def train(way: str, rank: int, ranks: int, seconds: float, hidden: int, folder: Path, cable: str) -> None:
    """Trains as one rank; writes the saved models with their times, and the bytes that were sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    images, labels, _, _ = digits()
    shards = labels.argsort(stable=True).chunk(2 * ranks)
    own = torch.cat([shards[rank], shards[rank + ranks]])
    images, labels = images[own], labels[own]
    module = network(hidden)
    model, optimizer = wrap(module, way)
    stop = np.memmap(folder / "stop", dtype=np.int64, mode="r+", shape=(1,))
    keep = {round(1.15**k) for k in range(100)}
    draw = torch.Generator().manual_seed(rank)
    kept: list[tuple[float, int, Tensor]] = []
    dist.barrier()
    left, began, step = bytes_of(cable), time.perf_counter(), 0
    while step < stop[0]:
        at = torch.randint(0, len(images), (32,), generator=draw)
        nn.functional.cross_entropy(model(images[at]), labels[at]).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        step += 1
        now = time.perf_counter() - began
        if step in keep:
            kept.append((now, step, torch.cat([p.detach().flatten() for p in module.parameters()])))
        if rank == 0 and now > seconds and stop[0] == np.iinfo(np.int64).max:
            sharing, every = WAYS[way].get("sharing"), WAYS[way].get("averaged", 1)
            stop[0] = step + MAX_AHEAD * (sharing.get("every", 1) if isinstance(sharing, dict) else every)
    took = time.perf_counter() - began
    np.savez(folder / f"{rank}.npz", times=[each[0] for each in kept], steps=[each[1] for each in kept],
             models=torch.stack([each[2] for each in kept]).numpy(), took=took, step=step,
             sent=bytes_of(cable) - left)  # fmt: skip
    dist.barrier()
    os._exit(0)


@dataclass
class VariantResult:
    """The results of one variant of training."""

    step_seconds: float
    step_bytes: float
    curve: list[tuple[float, int, float, float]]
    """(seconds, steps, accuracy of the mean of all models, accuracy of the worst rank's own)."""

    def until(self, target: float) -> tuple[float, float]:
        """Returns the seconds and steps after which the mean model first reached an accuracy; infinity if it never
        did."""
        never = float("inf"), float("inf")
        return next(((seconds, steps) for seconds, steps, accuracy, _ in self.curve if accuracy >= target), never)


def accuracy_function(hidden: int) -> Callable[[np.ndarray], float]:
    _, _, images, labels = digits()
    module = network(hidden)

    def measured(values: np.ndarray) -> float:
        nn.utils.vector_to_parameters(torch.from_numpy(values), module.parameters())
        with torch.no_grad():
            return float((module(images).argmax(1) == labels).float().mean())

    return measured


def train_all_ranks(
    way: str, where: list[tuple[str, str, str]], options: argparse.Namespace, port: int
) -> VariantResult:
    """Trains all ranks with one variant. Blocking. Raises SystemExit if a rank fails."""
    ranks = len(where)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        np.full(1, np.iinfo(np.int64).max, np.int64).tofile(folder / "stop")
        started = []
        for rank, (name, _, cable) in enumerate(where):
            environment = {**os.environ, "MASTER_ADDR": where[0][1], "MASTER_PORT": str(port), "RANK": str(rank),
                           "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                           "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": cable}  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--way", way, "--rank", str(rank),
                       "--ranks", str(ranks), "--seconds", str(options.seconds), "--hidden", str(options.hidden),
                       "--folder", text, "--cable", cable]  # fmt: skip
            with open(folder / f"{rank}.log", "w") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        until = time.monotonic() + 300 + 20 * options.seconds
        try:
            while any(process.poll() is None for process in started):
                late = time.monotonic() > until
                if late or any(process.returncode for process in started):
                    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(ranks))
                    raise SystemExit(f"{way}: {'no end after so long' if late else 'a rank failed'}:\n{logs}")
                time.sleep(0.1)
        finally:
            for process in started:
                process.kill()
                process.wait()
        files = [np.load(folder / f"{rank}.npz") for rank in range(ranks)]
        measured, curve = accuracy_function(options.hidden), []
        for number in range(min(len(file["steps"]) for file in files)):
            models = np.stack([file["models"][number] for file in files])
            curve.append((max(float(file["times"][number]) for file in files), int(files[0]["steps"][number]),
                          measured(models.mean(0)), min(map(measured, models))))  # fmt: skip
        seconds = statistics.mean(float(file["took"]) / int(file["step"]) for file in files)
        sent = statistics.mean(float(file["sent"]) / int(file["step"]) for file in files)
        return VariantResult(seconds, sent, curve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0], help="what each cable passes")
    parser.add_argument("--latency", type=float, default=0.0, metavar="MS", help="from any rank to any other, one way")
    parser.add_argument("--slow", type=float, default=0.0, help="what the last rank's cable passes, where it is slower")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, by each way")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the network's two hidden layers")
    parser.add_argument("--target", type=float, default=0.95, help="accuracy that the mean model is to reach")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    for hidden in ("--way", "--folder", "--cable"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are removed at exit
    if options.way:
        train(options.way, options.rank, options.ranks, options.seconds, options.hidden, Path(options.folder),
              options.cable)  # fmt: skip
        return
    size = sum(p.numel() for p in network(options.hidden).parameters()) * 4
    print(machine())
    for mbit in options.mbit:
        rates = [mbit] * (options.ranks - 1) + [options.slow or mbit]
        slow = f", that of rank {options.ranks - 1} {options.slow:g}" if options.slow else ""
        late = f", {options.latency:g} ms one way" if options.latency else ""
        print(f"\n{options.ranks} ranks, cables of {mbit:g} Mbit/s{slow}{late}; parameters of {size / 1e6:.1f} MB, "
              f"once over a cable: {8 * size / min(rates) / 1e6:.2f} s; {options.seconds:g} s each", flush=True)
        print(f"{'way':24} {'a step':>9} {'sent in it':>11} {f'{options.target:.0%} after':>11} {'in steps':>9} "
              f"{'of DDP':>7} {'at the end':>11} {'worst':>7}", flush=True)
        first = float("nan")
        with distant_hosts(rates, options.latency / 1e3) if options.latency else hosts(rates) as where:
            for number, way in enumerate(options.ways):
                found = train_all_ranks(way, where, options, 20000 + (os.getpid() + number) % 20000)
                until, steps = found.until(options.target)
                first = until if way == "DDP" else first
                _, _, accuracy, worst = found.curve[-1]
                ratio = until / first if math.isfinite(first) else math.nan  # DDP's time is unknown otherwise
                print(f"{way:24} {1e3 * found.step_seconds:6.0f} ms {found.step_bytes / 1e6:8.2f} MB {until:9.1f} s "
                      f"{steps:9.0f} {ratio:7.2f} {accuracy:11.1%} {worst:7.1%}", flush=True)


if __name__ == "__main__":
    main()
