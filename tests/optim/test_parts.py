"""Steps of some parameters after the others: the same bits, and only where nobody could tell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from decentnode.optim import AccumAdamW
from decentnode.optim.parts import ONE_BY_ONE, divided, divisible, restricted


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 4), (4,), (4, 3), (3,))]


def groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.2, "weight_decay": 0.3}]


@pytest.mark.parametrize("cls", ONE_BY_ONE, ids=lambda cls: cls.__name__)
def test_parts_are_the_whole(cls: Callable[..., Any]) -> None:
    whole, parts = parameters(), parameters()
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    once, often = cls(groups(whole), **options), cls(groups(parts), **options)
    part_of = {parts[0]: 1, parts[1]: 0, parts[3]: 1}
    for turn in range(5):
        for p, q in zip(whole, parts, strict=True):
            p.grad = q.grad = None if turn == 2 and p.dim() == 1 else torch.full_like(p, 0.1 + turn).cos()
        once.step()
        kept = often.param_groups
        found = divided(often, part_of, 2)
        assert [[len(group["params"]) for group in each] for each in found] == [[1], [1, 1], [1]]
        for each in found:
            with restricted(often, each):
                often.step()
        assert often.param_groups is kept
    assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True))


def test_who_counts_steps_sees_one() -> None:
    make = partial(torch.optim.SGD, parameters(), lr=0.1)
    assert divisible(make()) and divisible(AccumAdamW(parameters()))
    scheduled = make()
    StepLR(scheduled, 1)
    assert divisible(scheduled), "a scheduler only wants to know whether there was a step"
    hooked, replaced = make(), make()
    handle = hooked.register_step_post_hook(lambda *_: None)
    replaced.step = lambda closure=None: None  # type: ignore[assignment]
    assert not divisible(hooked) and not divisible(replaced)
    handle.remove()
    assert divisible(hooked)
    assert not divisible(type("Mine", (torch.optim.SGD,), {})(parameters(), lr=0.1))
    assert not divisible(torch.optim.Adagrad(parameters()))
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    assert not divisible(make())
    everywhere.remove()
