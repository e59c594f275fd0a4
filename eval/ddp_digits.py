"""Digits with your own training loop on several processes, with five ways of parallel training.

    torchrun --nproc_per_node=4 eval/ddp_digits.py --parallel decent

decent: DecentralizedDataParallel; ddp: PyTorch's DistributedDataParallel; easgd, lsgd: CommOptimizer; none: every rank
trains alone. Every rank has an equal part of the samples. Prints the accuracy on the test set (of the averaged model;
of rank 0's for none and ddp, of the center for easgd) and the time of a step relative to a step without communication.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentnode
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel, initialize_dist

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images and labels, test images and labels: 8 x 8 pixels in [0, 1]."""
    data = np.load(Path(decentnode.__file__).parent / "data" / "digits.npz")
    found = []
    for part in ("train", "test"):
        found.append(torch.from_numpy(data[f"{part}_images"].reshape(-1, 64).astype("float32")) / 16)
        found.append(torch.from_numpy(data[f"{part}_labels"].astype("int64")))
    return found[0], found[1], found[2], found[3]


def network(hidden: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def step_alone(hidden: int, x: Tensor, y: Tensor, batch: int) -> float:
    """Returns the median seconds of a step of all ranks at once without communication."""
    model = network(hidden)
    optimizer, times = SGD(model.parameters()), []
    for i in range(40):
        started = time.perf_counter()
        part = slice(i * batch % (len(x) - batch), i * batch % (len(x) - batch) + batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["decent", "ddp", "easgd", "lsgd", "none"], default="decent")
    parser.add_argument("--topology", default="one-peer-exp", help="for decent: complete, ring, one-peer-exp, ...")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = initialize_dist("gloo")
    x, y, x_test, y_test = digits()
    x, y = x[rank::world], y[rank::world]
    alone = step_alone(options.hidden, x, y, options.batch)

    model: Any = network(options.hidden)
    optimizer: Any = None
    if options.parallel == "decent":
        model = DecentralizedDataParallel(model, optimizer=SGD, topology=options.topology)
    elif options.parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if options.parallel != "decent":
        optimizer = SGD(model.parameters())
    if options.parallel in ("easgd", "lsgd"):
        optimizer = CommOptimizer(optimizer, options.parallel, world_size=world, comm_period=4,
                                  dist_pulling_strength=0.9 / (world + 1))  # fmt: skip

    times, steps = [], 1437 // world // options.batch  # the same number of steps on every rank
    for epoch in range(options.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * rank + epoch))
        for i in range(steps):
            part = order[i * options.batch : (i + 1) * options.batch]
            started = time.perf_counter()
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            loss.backward()
            if isinstance(optimizer, CommOptimizer):
                optimizer.step(loss=loss.item())
            elif optimizer is not None:
                optimizer.step()
            times.append(time.perf_counter() - started)

    model.eval()
    if options.parallel == "decent":
        model.global_avg()
    with optimizer.at_center() if options.parallel == "easgd" else contextlib.nullcontext(), torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
    if rank == 0:
        step = statistics.median(times)
        print(f"{options.parallel}, {world} ranks: accuracy {accuracy:.4f}, step {1e3 * step:.2f} ms, "
              f"{step / alone:.2f} of a step alone ({1e3 * alone:.2f} ms)", flush=True)  # fmt: skip
    dist.barrier()


if __name__ == "__main__":
    main()
