"""Trained models on disk: safetensors with the names of the module's state_dict."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from decentnode.errors import EnvironmentFault
from decentnode.node.node import Node
from decentnode.tensors import FlatModel


def save(module: nn.Module, path: Path) -> None:
    """Write in one step: there is never half a file. Raises EnvironmentFault when the disk refuses."""
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in module.state_dict().items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, path)
    except Exception as error:  # safetensors wraps the system's errors in its own
        temporary.unlink(missing_ok=True)
        raise EnvironmentFault(f"cannot write the model {path}: {error}") from error


def load_merged(model: FlatModel, merged: Tensor) -> None:
    """merged: [P + B] parameters, then float buffers; written into the module."""
    model.parameters.copy_(merged[: model.num_parameters])
    model.buffers.copy_(merged[model.num_parameters :])


def save_node(node: Node, run_dir: Path) -> None:
    """models/<uid>.safetensors, and from the lowest uid models/merged.safetensors; ends the model's use."""
    model = node.training.model
    save(model.module, run_dir / "models" / f"{node.uid:03d}.safetensors")
    if node.uid == node.generation.members[0] and node.merged is not None:
        load_merged(model, node.merged)
        save(model.module, run_dir / "models" / "merged.safetensors")
