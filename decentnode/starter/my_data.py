"""The data: any map-style Dataset of (input, target). It is created once for training (`train=True`) and once for
tests; each node then takes its own part of the training samples."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points of three spirals."""

    classes = ("first", "second", "third")

    def __init__(self, samples: int = 2000, noise: float = 0.05, train: bool = True) -> None:
        draw = torch.Generator().manual_seed(1 if train else 2)
        count = samples if train else max(samples // 5, 1)
        self.targets = torch.randint(len(self.classes), (count,), generator=draw)
        radius = torch.rand(count, generator=draw)
        angle = 4 * radius + 2 * torch.pi / len(self.classes) * self.targets
        angle += noise * torch.randn(count, generator=draw)
        self.points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.targets[index]
