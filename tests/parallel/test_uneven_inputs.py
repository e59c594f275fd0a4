"""A CommOptimizer whose ranks have unequal numbers of batches (torch's Join)."""

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
from tests.parallel.work import uneven_inputs
from tests.parallel.work.models import SGD, batch, flat, model

N = 3


@pytest.mark.sampled(one=["name", "options"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+"])
def test_ranks_without_inputs_keep_exchanging_with_the_others(name: str, options: dict[str, Any]) -> None:
    for result in run_ranks(N, uneven_inputs.train_with_uneven_inputs, name, options, timeout_seconds=60):
        assert result["steps"] == len(uneven_inputs.batch_numbers(0, N)) and result["apart"] < 1e-6
        assert result["leader"] in (None, 0), "rank 0 is the last that had inputs"


def gradients(module: torch.nn.Module, rank: int, t: int | None) -> list[Tensor]:
    """Returns the gradients of a batch; zeros if the rank has no batch (t is None)."""
    if t is None:
        return [torch.zeros_like(p) for p in module.parameters()]
    x, y = batch(rank, t)
    return list(torch.autograd.grad((module(x) - y).square().mean(), list(module.parameters())))


def test_easgd_with_uneven_inputs_equals_easgd_without_the_missing_updates() -> None:
    results = run_ranks(N, uneven_inputs.train_with_uneven_inputs, "EASGD", {}, timeout_seconds=60)
    modules = [model() for _ in range(N)]
    optimizers = [SGD(module.parameters()) for module in modules]
    center, steps = flat(modules[0]), [uneven_inputs.batch_numbers(rank, N) for rank in range(N)]
    for number, batches in enumerate(zip(*steps, strict=True)):
        pulls = [flat(module) - center for module in modules]
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
    for result, module in zip(results, modules, strict=True):
        assert np.allclose(result["center"], center, atol=1e-5)
        assert np.allclose(result["model"], flat(module), atol=1e-5)


def test_averaged_gradients_of_ranks_without_inputs_count_as_zero() -> None:
    results = run_ranks(N, uneven_inputs.train_with_uneven_inputs, "DDP", {}, timeout_seconds=60)
    whole = model()
    optimizer = SGD(whole.parameters())
    for batches in zip(*(uneven_inputs.batch_numbers(rank, N) for rank in range(N)), strict=True):
        by_rank = map(partial(gradients, whole), range(N), batches)
        for p, *parts in zip(whole.parameters(), *by_rank, strict=True):
            p.grad = torch.stack(parts).mean(0)
        optimizer.step()
    for result in results:
        assert np.allclose(result["model"], flat(whole), atol=1e-5) and result["apart"] == 0.0


def test_a_rank_without_inputs_skips_a_step_whose_gradients_overflow_elsewhere() -> None:
    assert run_ranks(2, uneven_inputs.overflow_while_rank_0_idles, timeout_seconds=60) == [(3, True)] * 2


@pytest.mark.usefixtures("single_rank_group")
def test_sdtls_faithful_methods_refuse_join() -> None:
    comm = sdtl.CommOptimizer(SGD(model().parameters()), "LSGD", faithful=True)
    with pytest.raises(ValueError, match="all ranks must take equally many steps with faithful=True"):
        Join([comm])
