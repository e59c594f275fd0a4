"""Data and a model of one's own, as PyTorch has them: nothing in here knows of decentnode."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Waves(Dataset):
    """Eight points of a sine wave; the target is the point that follows. Every tenth wave is for tests."""

    def __init__(self, count: int = 2000, noise: float = 0.05, train: bool = True):
        draw = torch.Generator().manual_seed(0)
        starts = 6.28 * torch.rand(count, generator=draw)
        waves = torch.sin(starts[:, None] + 0.4 * torch.arange(9)) + noise * torch.randn(count, 9, generator=draw)
        chosen = (torch.arange(count) % 10 == 0) != train
        self.waves = waves[chosen]

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return self.waves[index, :8], self.waves[index, 8]


class Forecast(nn.Module):
    def __init__(self, input_shape, width: int = 16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(*input_shape, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, points):
        return self.layers(points)
