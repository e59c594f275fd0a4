"""Loads initial weights from a .safetensors file with the state_dict of a module; adapters may be missing from it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from decentnode.errors import UsageError
from decentnode.models.lora import adapter_names

MAX_LISTED = 4
"""How many tensors a message names at most."""


def check_weights(module: nn.Module, path: Path) -> None:
    """Raises UsageError unless the file has exactly the tensors of the module, with the right shapes. The module may be
    on the meta device; no value is read."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    adapters = adapter_names(module)
    try:
        with safe_open(path, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"init must be a .safetensors file, {path} is not: {error}") from error
    if not adapters & found.keys():  # weights of the model before it had adapters
        expected = {name: shape for name, shape in expected.items() if name not in adapters}
    wrong = [f"{name} is {list(found[name])} instead of {list(shape)}" for name, shape in expected.items()
             if name in found and found[name] != shape]  # fmt: skip
    for names, what in ((expected.keys() - found, "it lacks"), (found.keys() - expected, "it also has")):
        if names:
            wrong.append(f"{what} {_few(sorted(names))}")
    if wrong:
        raise UsageError(f"init must hold the weights of this model, {path} does not: {'; '.join(wrong[:MAX_LISTED])}")


def load_weights(module: nn.Module, path: Path) -> None:
    """Copies the values in the file into the module, in place. Raises UsageError as `check_weights` does."""
    check_weights(module, path)
    with safe_open(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, value in module.state_dict().items():
            if name in names:
                value.copy_(file.get_tensor(name))


def _few(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
