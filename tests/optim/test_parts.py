"""Optimizer steps taken for a part of the parameters at a time: the same bits, and only if no hook could notice."""

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


def make_groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.2, "weight_decay": 0.3}]


@pytest.mark.parametrize("cls", ONE_BY_ONE, ids=lambda cls: cls.__name__)
def test_a_step_taken_in_parts_has_the_bits_of_a_whole_step(cls: Callable[..., Any]) -> None:
    whole, parts = parameters(), parameters()
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    in_one, in_parts = cls(make_groups(whole), **options), cls(make_groups(parts), **options)
    division = Division([[parts[1]], [parts[0], parts[3]]])
    for turn in range(5):
        for p, q in zip(whole, parts, strict=True):
            p.grad = q.grad = None if turn == 2 and p.dim() == 1 else torch.full_like(p, 0.1 + turn).cos()
        in_one.step()
        param_groups = in_parts.param_groups
        groups_of_parts = division.groups(in_parts)
        sizes = [[len(group["params"]) for group in groups] for groups in groups_of_parts]
        assert sizes == [[1], [1, 1], [1]], "the last part has the parameters that the division does not name"
        for groups in groups_of_parts:
            with restrict_groups(in_parts, groups):
                in_parts.step()
        assert in_parts.param_groups is param_groups
    assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True))


def test_a_division_follows_changes_that_a_script_makes_to_the_groups() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(make_groups(params), lr=0.1)
    division = Division([[params[0]], params[1:3]])
    before, after = division.groups(optimizer), division.groups(optimizer)
    assert all(a["params"] is b["params"] for x, y in zip(before, after, strict=True)
               for a, b in zip(x, y, strict=True)), "lists are reused while nothing changes"  # fmt: skip
    optimizer.param_groups[0]["lr"] = 0.5
    assert division.groups(optimizer)[0][0]["lr"] == 0.5
    optimizer.param_groups[0]["params"].remove(params[0])
    optimizer.add_param_group({"params": [params[0]], "lr": 0.7})
    assert [[group["lr"] for group in groups] for groups in division.groups(optimizer)] == [[0.7], [0.5], [0.2]]
    optimizer.param_groups[0]["params"] = [params[2], params[1]]
    assert [id(p) for p in division.groups(optimizer)[1][0]["params"]] == [id(params[2]), id(params[1])]


def test_a_step_is_not_divided_if_hooks_or_subclasses_could_count_steps() -> None:
    make_sgd = partial(torch.optim.SGD, parameters(), lr=0.1)
    assert can_divide_step(make_sgd()) and can_divide_step(AccumAdamW(parameters()))
    scheduled = make_sgd()
    StepLR(scheduled, 1)
    assert can_divide_step(scheduled), "a scheduler only checks whether there was a step"
    hooked, replaced = make_sgd(), make_sgd()
    handle = hooked.register_step_post_hook(lambda *_: None)
    replaced.step = lambda closure=None: None  # type: ignore[assignment]
    assert not can_divide_step(hooked) and not can_divide_step(replaced)
    handle.remove()
    assert can_divide_step(hooked)
    assert not can_divide_step(type("Mine", (torch.optim.SGD,), {})(parameters(), lr=0.1))
    assert not can_divide_step(torch.optim.Adagrad(parameters()))
    handle_for_all = register_optimizer_step_pre_hook(lambda *_: None)
    assert not can_divide_step(make_sgd())
    handle_for_all.remove()
