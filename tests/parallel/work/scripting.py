"""Functions of ranks for the tests of what scripts do with a wrapped model beside training it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentnode.parallel import DecentralizedDataParallel
from tests.parallel.work.models import SGD, Checkpointed, batch, flat, model


def use_every_feature(rank: int, n: int) -> dict[str, Any]:
    """Averages, reverts, evaluates at the average, keeps an average and writes parameters, with one wrapper.

    Returns distance: of consensus; averaged: the mean model; off_center: the own model's distance from it; d2c: the
    same as global_avg returns it; reverted: whether the own model came back bit for bit; still_averaged: whether
    evaluation leaves the average in place; went_on: steps after that; stays: how far a step of rate 0 moves a kept
    average; written: least and greatest parameter two steps after all ranks wrote 7."""
    results: dict[str, Any] = {}
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", bucket_size_in_mb=25)

    def step(t: int) -> None:
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()

    for t in range(4):
        step(t)
    results["distance"] = wrapped.consensus_distance()
    local = flat(wrapped.module)
    with wrapped.averaged():
        results["averaged"] = flat(wrapped.module).tolist()
        results["off_center"] = float((flat(wrapped.module) - local).norm())
        assert wrapped.global_avg(return_d2c=True) == 0.0
    results["reverted"] = torch.equal(local, flat(wrapped.module))
    results["d2c"] = wrapped.global_avg(return_d2c=True)
    wrapped.revert_global_avg()
    wrapped.global_avg()
    wrapped.eval()
    wrapped(batch(rank, 0)[0])
    results["still_averaged"] = not torch.equal(local, flat(wrapped.module))
    wrapped.train()
    step(4)
    results["went_on"] = wrapped.steps
    wrapped.global_avg(will_revert=False)
    mean = flat(wrapped.module)
    for group in wrapped.optimizer.param_groups:
        group["lr"] = 0.0
    step(5)
    results["stays"] = float((flat(wrapped.module) - mean).abs().max())
    with torch.no_grad():
        for p in wrapped.module.parameters():
            p.fill_(7.0)
    step(6)
    step(7)
    results["written"] = (float(flat(wrapped.module).min()), float(flat(wrapped.module).max()))
    return results


class RaisesInBackward(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of the backward pass")


def raise_in_backward(rank: int, n: int, where: int) -> tuple[int, float]:
    """Raises in a backward pass once the last layer's gradients have come. Returns (steps, greatest difference from a
    training in which nothing was raised). where: the step before which it raises."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    plain = DecentralizedDataParallel(model(), optimizer=SGD, topology="complete")
    for t in range(4):
        x, y = batch(rank, t)
        if t == where:
            layers = wrapped.module
            try:
                layers[2:](RaisesInBackward.apply(layers[:2](x))).sum().backward()
            except ArithmeticError:
                wrapped.zero_grad()
        for trained in (wrapped, plain):
            (trained(x) - y).square().mean().backward()
    return wrapped.steps, float((flat(wrapped.module) - flat(plain.module)).abs().max())

TRANSPORT_OF_WRITE = {"element": "auto", "data": "collective", "numpy": "auto", "swap": "auto", "copy": "auto",
          "load": "collective"}  # fmt: skip
"""Way in which a script writes into parameters -> the transport to test it with."""


def write_in_every_way(rank: int, n: int) -> dict[str, tuple[float, float]]:
    return {way: write_between_steps(rank, n, way, transport) for way, transport in TRANSPORT_OF_WRITE.items()}


def write_between_steps(rank: int, n: int, way: str, transport: Any) -> tuple[float, float]:
    """Adds 3 to one element on rank 0 (in some ways 3 in all, spread over the elements) between two steps, with a
    learning rate of 0 and W = 1/n. Returns (by how much this rank's sum grew, greatest difference between ranks after
    the next steps).
    """
    wrapped = DecentralizedDataParallel(
        nn.Linear(301, 7, bias=False), optimizer=partial(torch.optim.SGD, lr=0.0), topology="complete",
        transport=transport,
    )  # fmt: skip
    p = wrapped.module.weight
    x = torch.ones(2, 301)
    wrapped(x).sum().backward()
    before = flat(wrapped.module).double().sum()
    if rank == 0:
        with torch.no_grad():
            if way == "element":
                p[3, 58] += 3.0
            elif way == "data":
                p.data[3, 58] += 3.0
            elif way == "numpy":
                p.detach().numpy()[3, 58] += 3.0
            elif way == "swap":
                p.data = p.data + 3.0 / p.numel()
            elif way == "copy":
                p.data.copy_(p.data + 3.0 / p.numel())
            else:
                wrapped.module.load_state_dict({"weight": p + 3.0 / p.numel()})
    for _ in range(2):
        wrapped(x).sum().backward()
    after = flat(wrapped.module)
    others = [torch.zeros_like(after) for _ in range(n)]
    dist.all_gather(others, after)
    return float(after.double().sum() - before), float((others[0] - others[-1]).abs().max())


def train_with_checkpoints(rank: int, n: int) -> tuple[list[int], float]:
    """Trains with both kinds of activation checkpoints, and in each step also takes a gradient for the inputs alone.
    Returns (steps of both, greatest difference between them)."""
    wrapped = [DecentralizedDataParallel(Checkpointed(model(), kind), optimizer=SGD, topology="complete")
               for kind in (False, True)]  # fmt: skip
    for t in range(3):
        x, y = batch(rank, t)
        for checkpointed in wrapped:
            (checkpointed(x)["outputs"][0].logits - y).square().mean().backward()
        x.requires_grad_()
        torch.autograd.grad(wrapped[0](x)["outputs"][0].logits.sum(), x)
    return [checkpointed.steps for checkpointed in wrapped], float((flat(wrapped[0]) - flat(wrapped[1])).abs().max())


def run_script(rank: int, n: int, path: str, arguments: list[str]) -> str:
    """Runs a script as torchrun does when started in the script's folder. Returns what it prints."""
    sys.argv = [path, *arguments]
    os.chdir(Path(path).parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
