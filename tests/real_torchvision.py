"""The installed torchvision, for tests that compare with it; without it these tests are skipped."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def torchvision() -> Any:
    """Returns the package. Skips the test, or the module, if it is not installed or was built for another torch."""
    try:
        found = importlib.import_module("torchvision")
        importlib.import_module("torchvision.transforms.v2")
    except (ImportError, RuntimeError, AttributeError) as error:  # beside another torch its operators are missing
        pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)
    return found
