"""Tests that need CUDA are skipped, with the reason, where there is none. eval/gpu.sh measures what they cost.

The tests compare models with those of the CPU, and the bits of one run with those of another. By default a GPU rounds
the inputs of convolutions to ten bits of mantissa (TF32), and cuDNN may choose convolutions that add in a varying
order. Therefore TF32 is off, here and in the processes that the tests start; cuDNN is deterministic here. Nodes in
their own processes are deterministic through `training.cudnn_deterministic`, and ranks of scripts set it themselves.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # cuBLAS and cuDNN read it when they are loaded
import torch


@pytest.fixture(autouse=True)
def _deterministic_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and not count:
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and there is none here"))
        elif item.get_closest_marker("multigpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, here: {count}"))
