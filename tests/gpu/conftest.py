"""Tests that need CUDA: skipped by name where there is none. What they cost is measured by eval/gpu.sh.

They compare models with those of the CPU, and bits of one run with those of another. By default a GPU rounds the
inputs of convolutions to ten bits, and cuDNN may take convolutions that add in an order of the moment. The first is so
neither here nor in the processes that the tests start, the second not here; nodes with processes of their own are asked
for it (`training.cudnn_deterministic`), and ranks of scripts set it.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # cuBLAS and cuDNN read it as they are loaded
import torch


@pytest.fixture(autouse=True)
def _convolutions_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and not count:
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and there is none here"))
        elif item.get_closest_marker("multigpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, here: {count}"))
