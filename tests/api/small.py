"""A small experiment made of plain objects, and the classes of these objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decentnode import Experiment


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Points(torch.utils.data.Dataset):
    """Points in the unit square, transformed; the label says on which side of a line a point is."""

    def __init__(self, count: int = 400, transform: Callable[[Tensor], Tensor] = lambda x: 2 * x - 1) -> None:
        self.x = torch.rand(count, 2, generator=torch.Generator().manual_seed(count))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.x[index]), int(self.x[index].sum() > 1)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.rand(20, 2, generator=draw)
        yield x, (x.sum(1) > 1).long()


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def experiment(**more: Any) -> Experiment:
    """Four nodes on a ring, which learn in a few rounds."""
    adam = functools.partial(torch.optim.Adam, lr=0.03)
    given = {"graph": "ring", "nodes": 4, "optimizer": adam, "local_steps": 5, "rounds": 8, **more}
    return Experiment.from_objects(given.pop("model", net()), given.pop("train", Points()),
                                   given.pop("test", Points(100)), **given)  # fmt: skip
