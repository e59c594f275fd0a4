"""Training loops that make the calls of Decent-DP's experiments and of SDTL's main script, on tiny data of one kind."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

import decentnode.compat.decent_dp as package
from decentnode.compat.sdtl import CommOptimizer
from tests.parallel.work import models
from tests.parallel.work.models import flat

EPOCHS, BATCHES, CLASSES = 2, 12, 4


def make_batches(rank: int, epoch: int, kind: str) -> list[tuple[Tensor, Tensor]]:
    """Returns batches from which a small model learns something in two epochs."""
    batches = []
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(1000 * epoch + 10 * number + rank)
        y = torch.randint(CLASSES, (16,), generator=generator)
        if kind == "cnn":
            batches.append((torch.randn(16, 3, 8, 8, generator=generator) * 0.3 + y.view(-1, 1, 1, 1), y))
        else:  # sequences that repeat one token
            batches.append((y.view(-1, 1).repeat(1, 6), y.view(-1, 1).repeat(1, 6)))
    return [(x.to(models.DEVICE), y.to(models.DEVICE)) for x, y in batches]


class LanguageModel(nn.Module):
    """A transformer layer that returns logits, and with targets also the loss, as in Decent-DP's GPT-2 script."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        logits = self.head(self.block(self.embed(x)))
        return logits if target is None else (logits, F.cross_entropy(logits.flatten(0, 1), target.flatten()))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return (LanguageModel() if kind != "cnn" else nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    ).to(memory_format=torch.channels_last)).to(models.DEVICE)  # fmt: skip


def decay_groups(params: list[tuple[str, Tensor]], decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups of which only matrices have weight decay."""
    return [{"params": [p for _, p in params if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for _, p in params if p.dim() >= 2], "weight_decay": decay}]  # fmt: skip


def schedule(optimizer: torch.optim.Optimizer, kind: str) -> LRScheduler:
    if kind == "transformer":
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    warm, cosine = LinearLR(optimizer, 0.5, total_iters=3), CosineAnnealingLR(optimizer, 40, eta_min=1e-5)
    return SequentialLR(optimizer, [warm, cosine], [3])


def wrap(kind: str) -> Any:
    """Wraps a model by the names of the package `decent_dp`, as scripts import them."""
    sys.modules["decent_dp"] = package
    from decent_dp.ddp import DecentralizedDataParallel as DecentDP  # type: ignore[import-not-found]
    from decent_dp.optim import AccumAdam, AccumAdamW  # type: ignore[import-not-found]

    def make(params: list[tuple[str, Tensor]], lr: float) -> torch.optim.Optimizer:
        if kind == "cnn":
            return torch.optim.SGD(decay_groups(params, 1e-4), lr=lr, momentum=0.9)
        if kind == "transformer":
            return AccumAdam([p for _, p in params], lr=lr, betas=(0.9, 0.98), eps=1e-9, accum_iter=2)
        return AccumAdamW(decay_groups(params, 0.1), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, accum_iter=2)

    more: dict[str, Any] = {
        "cnn": {"grad_clip_norm": 1.0, "sync_buffer_in_global_avg": True},
        "transformer": {}, "gpt2": {"grad_clip_norm": 1.0, "bucket_size_in_mb": 100},
    }[kind]  # fmt: skip
    return DecentDP(network(kind), optim_fn=partial(make, lr=0.02), lr_scheduler_fn=partial(schedule, kind=kind),
                    topology="ring", scaler=torch.GradScaler("cpu", enabled=False), **more)  # fmt: skip


def train_epoch(model: Any, kind: str, rank: int, epoch: int) -> list[float]:
    """Trains one epoch as the script of `kind` does. Returns the losses."""
    scaler, losses = torch.GradScaler("cpu", enabled=False), []
    model.train()
    for x, y in make_batches(rank, epoch, kind):
        if kind == "gpt2":
            _, loss = model(x, y)
        else:
            logits = model(x.contiguous(memory_format=torch.channels_last) if kind == "cnn" else x)
            loss = F.cross_entropy(logits.reshape(-1, CLASSES), y.flatten(), label_smoothing=0.05)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        rate = model._lr_schedulers[0].get_last_lr()[0] if kind == "cnn" else model._optims[0].param_groups[0]["lr"]
        assert rate > 0
    if kind != "cnn":
        model.global_avg()  # training continues from the average
    with torch.no_grad():
        model.eval()
        model(x)
    return losses


def train_decent_dp_experiment(rank: int, n: int, kind: str) -> tuple[list[list[float]], bool]:
    """Trains for two epochs, saves after the first, and repeats the second from what was saved. Returns (losses by
    epoch, whether the repeated epoch has the same bits)."""
    model = wrap(kind)
    losses = [train_epoch(model, kind, rank, 0)]
    saved = copy.deepcopy({
        "model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in model._optims],
        "lr_schedulers": [schedule.state_dict() for schedule in model._lr_schedulers],
    })  # fmt: skip
    full = copy.deepcopy(model.full_state_dict())
    losses.append(train_epoch(model, kind, rank, 1))
    again = wrap(kind)
    again.load_state_dict(full)
    assert all(torch.equal(full[name], value) for name, value in saved["model"].items())
    same = train_epoch(again, kind, rank, 1) == losses[1] and torch.equal(flat(again._model), flat(model._model))
    return losses, same


class DecentDpLoop:
    """The training loop of Decent-DP's README and "getting started", or that of its tests/test.py."""

    def __init__(self, kind: str, n: int) -> None:
        sys.modules["decent_dp"] = package
        from decent_dp.ddp import DecentralizedDataParallel as DecentDP  # type: ignore[import-not-found]
        from decent_dp.optim import optim_fn_adam, optim_fn_adamw  # type: ignore[import-not-found]
        from decent_dp.utils import initialize_dist  # type: ignore[import-not-found]

        assert initialize_dist() == (dist.get_rank(), n)
        torch.manual_seed(0)
        if kind == "readme":
            inner = nn.Sequential(nn.Linear(3 * 64, 50), nn.ReLU(), nn.Linear(50, CLASSES))
            self.model = DecentDP(inner, optim_fn=partial(optim_fn_adamw, lr=0.003), topology="complete")
        else:
            inner = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 16), nn.BatchNorm1d(16), nn.ReLU(),
                                  nn.Linear(16, CLASSES))  # fmt: skip
            self.model = DecentDP(inner, partial(optim_fn_adam, beta1=0.974, lr=1e-3 * n), lr_scheduler_fn=None,
                                  topology="ring", sync_buffer_in_global_avg=True)  # fmt: skip
        self.train_epoch = self._readme if kind == "readme" else self._test

    def _readme(self, rank: int, epoch: int) -> list[float]:
        losses = []
        self.model.train()
        for data, target in make_batches(rank, epoch, "cnn"):
            loss = F.mse_loss(self.model(data.flatten(1)), F.one_hot(target, CLASSES).float())
            self.model.zero_grad()
            loss.backward()
            losses.append(loss.item())
        self.model.eval()
        with torch.no_grad():
            self.model(data.flatten(1))
        return losses

    def _test(self, rank: int, epoch: int) -> list[float]:
        criterion, losses = nn.CrossEntropyLoss(label_smoothing=0.025), []
        self.model.train()
        if epoch == 1:
            self.model.set_adaptive_factor(0.1)
        for data, target in make_batches(rank, epoch, "cnn"):
            loss = criterion(self.model(data), target)
            loss.backward()
            losses.append(loss.item())
        before = flat(self.model._model).clone()
        assert self.model.global_avg(will_revert=True, return_d2c=True) > 0
        with torch.no_grad():
            self.model.eval()
            self.model(data)
        self.model.revert_global_avg()
        assert torch.equal(flat(self.model._model), before)
        return losses


def train_decent_dp_loop(rank: int, n: int, kind: str) -> tuple[list[list[float]], bool]:
    """Trains two epochs of a DecentDpLoop and repeats the second from what was saved. Returns as
    `train_decent_dp_experiment`."""
    first = DecentDpLoop(kind, n)
    losses = [first.train_epoch(rank, 0)]
    full = copy.deepcopy(first.model.full_state_dict())
    losses.append(first.train_epoch(rank, 1))
    again = DecentDpLoop(kind, n)
    again.model.load_state_dict(full)
    same = again.train_epoch(rank, 1) == losses[1]
    return losses, same and torch.equal(flat(again.model._model), flat(first.model._model))


def train_sdtl_loop(rank: int, n: int, name: str) -> tuple[list[list[float]], bool]:
    """Trains two epochs of SDTL's main loop with a method and repeats the second from what was saved. Returns as
    `train_decent_dp_experiment`."""
    def train(model: nn.Module, optimizer: Any, scheduler: Any, epoch: int) -> list[float]:
        losses = []
        model.train()
        for data, target in make_batches(rank, epoch, "cnn"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        return losses

    def make() -> tuple[nn.Module, Any, Any]:
        model = network("cnn")
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data.div_(n)
        local = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
        scheduler = MultiStepLR(local, milestones=[5], gamma=0.1)
        return model, CommOptimizer(local, dist_optim_name=name, world_size=n, comm_period=4,
                                    dist_pulling_strength=0.1, local_pulling_strength=0.1), scheduler  # fmt: skip

    model, optimizer, scheduler = make()
    losses = [train(model, optimizer, scheduler, 0)]
    saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, scheduler)])
    losses.append(train(model, optimizer, scheduler, 1))
    resumed = make()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    return losses, train(*resumed, 1) == losses[1]
