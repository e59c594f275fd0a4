"""Imports other libraries' models and maps their errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from decentnode.errors import UsageError, describe_error


def import_library(module: str, model: str, extra: str = "") -> Any:
    """Imports and returns a library's module. Raises UsageError, naming the model, if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise UsageError(f"model {model}: importing {module} raised {describe_error(error)}") from error
        install = f"'decentnode[{extra}]' has it" if extra else package
        raise UsageError(f"model {model} needs {package}, which is not installed; pip install {install}") from error
    except Exception as error:  # torchvision raises RuntimeError with another build of torch than its own
        raise UsageError(f"model {model}: importing {module} raised {describe_error(error)}") from error


def call_library(model: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Returns what `make` returns. Raises UsageError for anything that the library raises."""
    try:
        return make()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"making {model} raised {describe_error(error)}") from error
