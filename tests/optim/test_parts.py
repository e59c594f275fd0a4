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
from decentnode.optim.parts import ONE_BY_ONE, Division, can_divide_step, restrict_groups


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
    division = Division([[parts[1]], [parts[0], parts[3]]])
    for turn in range(5):
        for p, q in zip(whole, parts, strict=True):
            p.grad = q.grad = None if turn == 2 and p.dim() == 1 else torch.full_like(p, 0.1 + turn).cos()
        once.step()
        kept = often.param_groups
        found = division.groups(often)
        assert [[len(group["params"]) for group in each] for each in found] == [[1], [1, 1], [1]]
        for each in found:
            with restrict_groups(often, each):
                often.step()
        assert often.param_groups is kept
    assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True))


def test_a_division_follows_what_a_script_does_with_its_groups() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(groups(params), lr=0.1)
    division = Division([[params[0]], params[1:3]])
    before, after = division.groups(optimizer), division.groups(optimizer)
    assert all(a["params"] is b["params"] for x, y in zip(before, after, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip
    optimizer.param_groups[0]["lr"] = 0.5
    assert division.groups(optimizer)[0][0]["lr"] == 0.5
    optimizer.param_groups[0]["params"].remove(params[0])
    optimizer.add_param_group({"params": [params[0]], "lr": 0.7})
    assert [[group["lr"] for group in each] for each in division.groups(optimizer)] == [[0.7], [0.5], [0.2]]
    optimizer.param_groups[0]["params"] = [params[2], params[1]]
    assert [id(p) for p in division.groups(optimizer)[1][0]["params"]] == [id(params[2]), id(params[1])]


def test_who_counts_steps_sees_one() -> None:
    make = partial(torch.optim.SGD, parameters(), lr=0.1)
    assert can_divide_step(make()) and can_divide_step(AccumAdamW(parameters()))
    scheduled = make()
    StepLR(scheduled, 1)
    assert can_divide_step(scheduled), "a scheduler only wants to know whether there was a step"
    hooked, replaced = make(), make()
    handle = hooked.register_step_post_hook(lambda *_: None)
    replaced.step = lambda closure=None: None  # type: ignore[assignment]
    assert not can_divide_step(hooked) and not can_divide_step(replaced)
    handle.remove()
    assert can_divide_step(hooked)
    assert not can_divide_step(type("Mine", (torch.optim.SGD,), {})(parameters(), lr=0.1))
    assert not can_divide_step(torch.optim.Adagrad(parameters()))
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    assert not can_divide_step(make())
    everywhere.remove()
