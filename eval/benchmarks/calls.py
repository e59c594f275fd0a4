"""Measures the fixed costs of batches and all_reduce of torch.distributed and fits the keys of simulate.links.calls.

Ranks are processes of this machine, with gloo on CPUs or, with --backend nccl, one on each GPU. All call at once, after
a barrier; a time is the median over repetitions of the longest time of a rank. A batch sends to the next d ranks and
receives from the d ranks before; its time is modeled as call + peer d + hop, that of all_reduce among n ranks as call +
2 (n - 1) hop. The three are fitted by least squares, none below zero.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import machine

SMALL, LARGE = 256, 4_000_000
"""Elements: 1 KB, whose transfer time is negligible, and 16 MB."""
Times = dict[tuple[str, int, int], float]
"""(operation, neighbors, elements) -> seconds"""


def timed(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Returns the median over repetitions of the longest time of a rank."""
    found = torch.zeros(repeats, device=device)
    for number in range(-3, repeats):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            found[number] = time.perf_counter() - began
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


def rank_times(rank: int, size: int, backend: str, folder: str, repeats: int) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size,
                            timeout=timedelta(seconds=60), device_id=bound)  # fmt: skip
    found: Times = {}
    for elements in (SMALL, LARGE):
        x = torch.ones(elements, device=device)
        received = [torch.empty_like(x) for _ in range(size)]
        for d in range(1, size):
            def batch(d: int = d, x: torch.Tensor = x, received: list[torch.Tensor] = received) -> None:
                ops = [dist.P2POp(dist.isend, x, (rank + k) % size) for k in range(1, d + 1)]
                ops += [dist.P2POp(dist.irecv, received[k], (rank - k) % size) for k in range(1, d + 1)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

            found["batch", d, elements] = timed(batch, repeats, device)
        found["all_reduce", size - 1, elements] = timed(lambda x=x: dist.all_reduce(x), repeats, device)  # type: ignore[misc]
    if rank == 0:
        torch.save(found, Path(folder) / "times")
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, backend: str, repeats: int) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_times, (size, backend, folder, repeats), nprocs=size)
        times: Times = torch.load(Path(folder) / "times", weights_only=True)
        return times


def terms(operation: str, neighbors: int) -> tuple[float, float, float]:
    """Returns the coefficients of (call, peer, hop) in the time of an operation."""
    return (1.0, neighbors, 1.0) if operation == "batch" else (1.0, 0.0, 2.0 * neighbors)


def fitted(rows: list[tuple[str, int, float]]) -> np.ndarray:
    """Returns (call, peer, hop) in seconds, by least squares of relative errors; negative ones are set to 0."""
    a = np.array([terms(operation, d) for operation, d, _ in rows])
    b = np.array([seconds for *_, seconds in rows])
    a, b = a / b[:, None], np.ones(len(b))
    kept = [0, 1, 2]
    while True:
        found = np.zeros(3)
        found[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (found >= 0).all():
            return found
        kept.remove(int(found.argmin()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    print(machine())
    rows: list[tuple[str, int, float]] = []
    large: list[tuple[str, int, int, float]] = []
    for size in options.ranks:
        for (operation, d, elements), seconds in measure(size, options.backend, options.repeats).items():
            if elements == SMALL:
                rows.append((operation, d, seconds))
            else:
                large.append((operation, d, size, seconds))
    found = fitted(rows)
    print(f"\n{'operation':12} {'neighbors':>9} {'1 KB':>9} {'fitted':>9} {'error':>7}")
    for operation, d, seconds in rows:
        predicted = float(np.dot(terms(operation, d), found))
        print(f"{operation:12} {d:9} {1e6 * seconds:6.0f} us {1e6 * predicted:6.0f} us {predicted / seconds - 1:+7.0%}")
    print(f"\n{'operation':12} {'neighbors':>9} {'ranks':>5} {'16 MB':>9} {'sent by a rank':>15}")
    for operation, d, size, seconds in large:
        sent = 4 * LARGE * (d if operation == "batch" else 2 * (size - 1) / size)
        print(f"{operation:12} {d:9} {size:5} {1e3 * seconds:6.1f} ms {1e-9 * sent / seconds:10.2f} GB/s")
    call, peer, hop = found
    keys = f"{{call_seconds: {call:.2e}, peer_seconds: {peer:.2e}, hop_seconds: {hop:.2e}}}"
    print(f"\nsimulate:\n  links:\n    calls: {keys}")


if __name__ == "__main__":
    main()
