"""PATH CASE NODES BATCH SECONDS: prints node-updates of EXO Gym per second and per second of CPU. PATH: folders
separated by colons that hold the package exogym and its dependencies.

EXO Gym has a process per node, which averages its model with all others by gloo's all_reduce after every step (its
FedAvgStrategy with H = 1). A fit of N steps and a longer one are timed and subtracted, so that the start of the
processes does not count; nothing is logged, and evaluation happens only at the beginning and the end. EXO Gym asks gloo
for macOS's loopback interface by name; on Linux it gets that of Linux instead.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from typing import Any

PATH, CASE, *NUMBERS = sys.argv[1:]
sys.path[:0] = PATH.split(":")
os.environ["OMP_NUM_THREADS"] = "1"  # there are more processes than cores

import exogym.trainer as trainer_module  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

SHAPES: dict[str, tuple[int, ...]] = {"logistic": (64,), "mlp": (64,), "gn_lenet": (3, 32, 32)}
FEWEST = 20


def network(case: str) -> nn.Module:
    if case == "logistic":
        return nn.Linear(64, 10)
    if case == "mlp":
        return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    from decentnode.config.component import load_class
    from decentnode.models import MODELS
    from decentnode.samples import DataSpec

    kind = load_class(case, MODELS, "model")
    return kind(kind.Config(name=case)).make(DataSpec(SHAPES[case], num_classes=10))


def init_process_group(backend: str, rank: int, world_size: int) -> None:
    """Replaces EXO Gym's own function, which asks for an interface that Linux lacks. Every process imports this
    file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=world_size)


trainer_module.init_process_group_portsafe = init_process_group


class Lossy(nn.Module):
    """A model in the form that EXO Gym expects: it maps a batch to its loss."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.network = network(case)

    def forward(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def cost_of(steps: int, nodes: int, batch: int) -> tuple[float, float]:
    """Returns (seconds, CPU seconds) of a whole fit, including the start of its processes."""
    from exogym.strategy import FedAvgStrategy, OptimSpec

    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(4000, *SHAPES[CASE]), torch.randint(10, (4000,)))
    trainer = trainer_module.Trainer(Lossy(CASE), data, data, start_port=free_port(), device="cpu")
    started, before = time.perf_counter(), cpu_seconds()
    trainer.fit(num_epochs=1 << 20, max_steps=steps, num_nodes=nodes, batch_size=batch, minibatch_size=batch,
                val_size=batch, val_interval=1 << 30, strategy=FedAvgStrategy(OptimSpec(torch.optim.SGD, lr=0.05)),
                disable_logging=True)  # fmt: skip
    return time.perf_counter() - started, cpu_seconds() - before


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of the children that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main() -> None:
    nodes, batch, wanted = int(NUMBERS[0]), int(NUMBERS[1]), float(NUMBERS[2])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        first = cost_of(FEWEST, nodes, batch)
        steps = FEWEST
        while True:
            steps *= 4
            elapsed, used = (b - a for a, b in zip(first, cost_of(FEWEST + steps, nodes, batch), strict=True))
            if elapsed >= wanted:
                break
        os.chdir("/")
    sys.stdout.write(f"\n{steps * nodes / elapsed} {steps * nodes / used}\n")


if __name__ == "__main__":
    main()
