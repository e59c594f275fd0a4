"""Models, batches and an optimizer for the ranks of the tests."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device("cpu")
"""Where models and batches lie: set in each rank's process by `run_ranks` and `JobProcesses`."""

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 6, generator=generator).to(DEVICE), torch.randn(5, 3, generator=generator).to(DEVICE)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).cpu() for p in module.parameters()])


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state as it is read from a file that was saved with torch, with all tensors on the CPU."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location="cpu")
    return loaded


class UnusualParameters(nn.Module):
    """A model with frozen, tied and unused parameters, others whose gradients come in another order if `flip` is set, a
    weight in channels_last, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.a.weight
        self.conv = nn.Conv2d(1, 2, (2, 3)).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.flip = False
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.flip else (self.a, self.b)
        x = self.norm(self.tied(second(torch.tanh(first(x))) + self.frozen))
        out = x[:, :3] + self.conv(x.view(-1, 1, 2, 3)).flatten(1).sum(1, keepdim=True)
        return out + self.unused(x) if self.flip else out


class MixedPrecision(nn.Module):
    """A model with float32 and bfloat16 parameters, one layer of which is used in every other forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 8).bfloat16()
        self.calls = 0
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.a(x)).bfloat16()
        h = torch.tanh(self.b(h))
        return self.c((self.sometimes(h) if self.calls % 2 else h).float())


class ImageModel(nn.Module):
    """Convolutions in channels_last, on images that it makes of the usual inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2))
        self.to(DEVICE, memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = torch.cat([x, x.flip(1)], 1).tile(1, 3).view(-1, 2, 3, 6)
        return self.layers(images.contiguous(memory_format=torch.channels_last)).mean((2, 3))


@dataclass
class Output:
    logits: Tensor


class Checkpointed(nn.Module):
    """Runs all but the first layer again in the backward pass. Its output is inside a dataclass in a list in a dict."""

    def __init__(self, layers: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x: Tensor) -> dict[str, Any]:
        assert isinstance(self.layers, nn.Sequential)
        x = self.layers[0](x)
        for part in (self.layers[1:3], self.layers[3:]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return {"outputs": [Output(x)]}
