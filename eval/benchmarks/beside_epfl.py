"""PATH CASE NODES BATCH SECONDS: prints node-updates of EPFL's Decentralized Learning Simulator per second and per
second of CPU.

PATH: folders separated by colons that hold its checkout and its dependencies (dataclasses-json, networkx). Of its
models only the one for CIFAR-10 is among the cases (gn_lenet). One process per core runs what its workers run: `train`
of every node and then `aggregate` of a node's model with those of four others, on random images instead of downloaded
ones. The work of its coordinator and brokers (events, models as messages) is left out, to its advantage.
"""

from __future__ import annotations

import os
import sys
import time
import types
from typing import Any

from common import workers

DEGREE = 4


class Images:
    """The samples of a node: random images, in the form in which its trainer takes batches."""

    def __init__(self, count: int) -> None:
        import torch

        self.images, self.labels = torch.randn(count, 3, 32, 32), torch.randint(10, (count,))

    def with_transform(self, _: object) -> Images:
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"img": self.images[index], "label": int(self.labels[index])}


class Shares:
    def load_partition(self, _node: int, _split: str) -> Images:
        return Images(400)


def stand_in(name: str, *members: str) -> None:
    """Installs an empty module in place of one that is imported only for downloads and augmentation."""
    module: Any = types.ModuleType(name)
    for member in members:
        setattr(module, member, object)
    sys.modules[name] = module


def work(path: str, nodes: list[int], batch: int, seconds: float) -> tuple[float, float, float]:
    """Returns (node-updates, seconds, CPU seconds)."""
    sys.path[:0] = path.split(":")
    stand_in("flwr_datasets", "FederatedDataset")
    stand_in("flwr_datasets.partitioner", "DirichletPartitioner", "IidPartitioner")
    stand_in("datasets", "Dataset")
    stand_in("dasklearn.datasets.transforms", "apply_transforms_cifar10", "apply_transforms_cifar10_resnet")
    import torch
    from dasklearn import functions
    from dasklearn.session_settings import LearningSettings, SessionSettings

    torch.set_num_threads(1)
    settings = SessionSettings(
        algorithm="dpsgd", seed=1, work_dir="", dataset="cifar10", model="gnlenet", participants=max(nodes) + 1,
        learning=LearningSettings(learning_rate=0.05, momentum=0.0, weight_decay=0.0, batch_size=batch, local_steps=1),
    )  # fmt: skip
    functions.dataset = Shares()
    models: dict[int, Any] = dict.fromkeys(nodes)

    def turn(at: int) -> None:
        trained = {node: functions.train(settings, {"model": models[node], "round": at, "time": 0, "peer": node})[0]
                   for node in nodes}  # fmt: skip
        for index, node in enumerate(nodes):
            neighbors = [trained[nodes[(index + k) % len(nodes)]] for k in range(min(DEGREE + 1, len(nodes)))]
            models[node] = functions.aggregate(settings, {"models": neighbors, "round": at, "peer": node})[0]

    turn(1)
    rounds, started, before = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        turn(rounds + 2)
        rounds += 1
    return rounds * len(nodes), elapsed, time.process_time() - before


def main() -> None:
    path, case, *numbers = sys.argv[1:]
    if case != "gn_lenet":
        raise SystemExit("it has no such model")
    nodes, batch, seconds = int(numbers[0]), int(numbers[1]), float(numbers[2])
    cores = len(os.sched_getaffinity(0))
    shares = [share for core in range(cores) if (share := [*range(nodes)][core::cores])]
    with workers(len(shares)) as pool:
        found = [each.result() for each in [pool.submit(work, path, share, batch, seconds) for share in shares]]
    per_second = sum(updates / taken for updates, taken, _ in found)
    sys.stdout.write(f"\n{per_second} {sum(each[0] for each in found) / sum(each[2] for each in found)}\n")


if __name__ == "__main__":
    main()
