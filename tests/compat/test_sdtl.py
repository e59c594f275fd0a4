"""Scripts written for SDTL work after a change of the import."""

from __future__ import annotations

import pytest
import torch

from decentnode.compat import sdtl
from decentnode.compat.sdtl import CommOptimizer
from tests.compat import work_sdtl as work
from tests.parallel.ranks import run_ranks


def make_local_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)


def test_arguments_are_taken_by_position_by_name_and_without_the_number_of_ranks() -> None:
    made = CommOptimizer(make_local_optimizer(), "EASGD", 1, 0.05, 0.25, 7).dist_optimizer
    assert (made.local_pulling_strength, made.dist_pulling_strength, made.comm_period) == (0.05, 0.25, 7)
    named = CommOptimizer(
        local_optimizer=make_local_optimizer(), dist_optim_name="LSGD+", comm_period=3, dist_pulling_strength=0.5,
        local_pulling_strength=0.0,
    )  # fmt: skip
    assert named.dist_optimizer.world_size == 1
    assert type(CommOptimizer(make_local_optimizer(), "DataParallel").dist_optimizer).__name__ == "GradientAveraging"
    method = sdtl.LSGDPlus(make_local_optimizer(), 1, 0.05, 0.25, 7)  # SDTL's own classes are made like this
    assert (method.local_pulling_strength, method.dist_pulling_strength, method.comm_period) == (0.05, 0.25, 7)
    with pytest.raises(ValueError, match="dist_optim_name must be one of"):
        CommOptimizer(make_local_optimizer(), "SGD", faithful=True)
    with pytest.raises(ValueError, match="overlap must be False"):
        CommOptimizer(make_local_optimizer(), "EASGD", faithful=True, overlap=True)


@pytest.mark.parametrize(("faithful", "period", "steps"), [
    (True, 4, [3, 6, 9, 12]), (False, 4, [4, 8, 12]), (True, 1, list(range(1, 13))), (True, 2, list(range(1, 13))),
])  # fmt: skip
def test_ranks_communicate_in_sdtls_steps_only_if_faithful(faithful: bool, period: int, steps: list[int]) -> None:
    made = CommOptimizer(make_local_optimizer(), "EASGD", comm_period=period, faithful=faithful).dist_optimizer
    communicating = []
    for step in range(1, 13):
        if made.communicates:
            communicating.append(step)
        made.steps += 1
    assert communicating == steps


def test_faithful_methods_equal_sdtls_and_are_resumed_with_the_same_bits() -> None:
    for rank, results in enumerate(run_ranks(3, work.train)):
        for name, (whole, resumed) in results.items():
            assert whole == pytest.approx(work.simulate(name)[rank], abs=1e-5), name
            assert whole == resumed, f"{name} resumed"
