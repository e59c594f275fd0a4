"""The state from which every test starts, regardless of the tests before it."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import THREADS


@pytest.mark.parametrize("turn", range(2))
def test_threads_of_torch_are_those_of_the_first_test(turn: int) -> None:
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(THREADS + 1)  # for the second turn to find otherwise
