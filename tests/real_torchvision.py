"""The installed torchvision, for tests that compare with it; those that need it are skipped where there is none."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def torchvision() -> Any:
    """Returns the package. Skips the test, or the module, where it is not installed, or is one of another torch."""
    try:
        found = importlib.import_module("torchvision")
        importlib.import_module("torchvision.transforms.v2")
    except (ImportError, RuntimeError, AttributeError) as error:  # beside another build its operators are missing
        pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)
    return found
