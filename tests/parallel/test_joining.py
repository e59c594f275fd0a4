"""A CommOptimizer whose ranks have unequally many batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join

from decentnode.compat import sdtl
from tests.parallel.ranks import run_ranks
from tests.parallel.work import joining
from tests.parallel.work.habits import alone  # noqa: F401  (a fixture)
from tests.parallel.work.models import SGD, batch, flat, model

N = 3


@pytest.mark.sampled(one=["name", "options"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+"])
def test_ranks_without_inputs_go_on_meeting_the_others(name: str, options: dict[str, Any]) -> None:
    found = run_ranks(N, joining.uneven, name, options, timeout_seconds=60)
    for each in found:
        assert each["steps"] == len(joining.steps_of(0, N)) and each["apart"] < 1e-6
        assert each["leader"] in (None, 0), "rank 0 alone had inputs at last"


def gradients(module: torch.nn.Module, rank: int, t: int | None) -> list[Tensor]:
    if t is None:
        return [torch.zeros_like(p) for p in module.parameters()]
    x, y = batch(rank, t)
    return list(torch.autograd.grad((module(x) - y).square().mean(), list(module.parameters())))


def test_a_center_of_ranks_without_inputs_is_that_of_elastic_averaging_without_their_updates() -> None:
    found = run_ranks(N, joining.uneven, "EASGD", {}, timeout_seconds=60)
    modules = [model() for _ in range(N)]
    optimizers = [SGD(each.parameters()) for each in modules]
    center, steps = flat(modules[0]), [joining.steps_of(rank, N) for rank in range(N)]
    for number, batches in enumerate(zip(*steps, strict=True)):
        pulls = [flat(each) - center for each in modules]
        for rank, (module, optimizer, t) in enumerate(zip(modules, optimizers, batches, strict=True)):
            if t is not None:
                for p, gradient in zip(module.parameters(), gradients(module, rank, t), strict=True):
                    p.grad = gradient
                optimizer.step()
            if number % 2:
                with torch.no_grad():
                    sizes = [p.numel() for p in module.parameters()]
                    for p, pull in zip(module.parameters(), pulls[rank].split(sizes), strict=True):
                        p.sub_(0.1 * pull.view(p.shape))
        if number % 2:
            center = center + 0.1 * torch.stack(pulls).sum(0)
    for each, module in zip(found, modules, strict=True):
        assert np.allclose(each["center"], center, atol=1e-5)
        assert np.allclose(each["model"], flat(module), atol=1e-5)


def test_averaged_gradients_of_ranks_without_inputs_count_as_zero() -> None:
    found = run_ranks(N, joining.uneven, "DDP", {}, timeout_seconds=60)
    whole = model()
    optimizer = SGD(whole.parameters())
    for batches in zip(*(joining.steps_of(rank, N) for rank in range(N)), strict=True):
        every = map(partial(gradients, whole), range(N), batches)
        for p, *parts in zip(whole.parameters(), *every, strict=True):
            p.grad = torch.stack(parts).mean(0)
        optimizer.step()
    for each in found:
        assert np.allclose(each["model"], flat(whole), atol=1e-5) and each["apart"] == 0.0


def test_a_rank_without_inputs_knows_of_a_scaler_s_overflow() -> None:
    assert run_ranks(2, joining.scaled, timeout_seconds=60) == [(3, True)] * 2


@pytest.mark.usefixtures("alone")
def test_sdtl_s_own_methods_have_no_ranks_without_inputs() -> None:
    comm = sdtl.CommOptimizer(SGD(model().parameters()), "LSGD", faithful=True)
    with pytest.raises(ValueError, match="all ranks must take equally many steps with faithful=True"):
        Join([comm])
