"""The state from which every test starts, regardless of the tests before it."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import THREADS


@pytest.mark.parametrize("turn", range(2))
def test_every_test_starts_with_the_same_number_of_torch_threads(turn: int) -> None:
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(THREADS + 1)  # for the second turn to find otherwise
