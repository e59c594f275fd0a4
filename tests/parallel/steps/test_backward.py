from __future__ import annotations

import torch
from torch.nn import Parameter

from decentnode.parallel.steps.backward import BackwardWatch


class Steps:
    """Counts its steps, and keeps an error of each with its frames, as an exchange does that found a connection
    broken."""

    def __init__(self) -> None:
        self.errors: list[RuntimeError] = []

    def take(self) -> None:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            self.errors.append(error)


def test_every_pass_ends_with_a_step_although_errors_of_earlier_steps_are_kept() -> None:
    steps, parameter = Steps(), Parameter(torch.ones(1))
    watch = BackwardWatch([parameter], steps.take)
    for _ in range(3):
        (2 * parameter).sum().backward()
    assert len(steps.errors) == 3 and watch.stop()
