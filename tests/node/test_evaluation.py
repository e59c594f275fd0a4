from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.communication.base import Pending
from decentnode.node.measuring.evaluation import squared_distance, steps_until_ready
from decentnode.tensors import BLOCK_ELEMENTS


class ReadyLater(Pending):
    """A mean that is ready when `ready` was read `looks` times before."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    @property
    def arrived(self) -> bool:
        return self.looks < 0

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        raise AssertionError("steps must not block")


@pytest.mark.parametrize(("looks", "steps"), [(0, 1), (1, 2), (2, 3), (9, 4)])
def test_a_node_waits_for_a_mean_at_most_one_step_per_phase_and_one_more(looks: int, steps: int) -> None:
    assert len(list(steps_until_ready(ReadyLater(looks), phases=3))) == steps


def test_distances_are_summed_in_double_precision() -> None:
    elements = 2 * BLOCK_ELEMENTS + 5
    x, mean = torch.randn(elements) + 100, torch.randn(elements) + 100
    distance, norm = squared_distance(x, mean)
    wide = mean.double().numpy()
    assert distance == pytest.approx(float(np.square(x.double().numpy() - wide).sum()), rel=1e-12)
    assert norm == pytest.approx(float(np.square(wide).sum()), rel=1e-12)
