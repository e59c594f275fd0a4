"""Tests that need CUDA: skipped by name where there is none. What they cost is measured by eval/gpu.sh."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and not count:
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and there is none here"))
        elif item.get_closest_marker("multigpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, here: {count}"))
