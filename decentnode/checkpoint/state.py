"""Converts a node's state to JSON and named tensors, and back. Nothing is pickled, and every number keeps its bits.

The state is a tree of dicts, lists, tuples, tensors, NumPy arrays, numbers, strings and None. Values that JSON lacks (a
tensor, a tuple, a float that is not finite, a dict whose keys are not strings) become an object with the single key
"#".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentnode.errors import CheckpointError

TAG = "#"
ALIGNMENT = 64
"""Alignment in bytes that is sufficient for tensors of every dtype."""


def encode(state: Any, name: str, tensors: dict[str, Tensor], *, copy: bool) -> Any:
    """Returns the JSON tree of `state`; adds its tensors to `tensors`, named by their place below `name`.

    The tensors are contiguous and on the CPU; tensors of a GPU only after `to_host`, which must be called before they
    change. copy: whether to copy CPU tensors, because `state` will change before they are written. Raises
    CheckpointError for a value that cannot be stored, with its place.
    """
    if isinstance(state, Tensor):
        plain, kind = state.detach(), "tensor"
        if plain.is_complex():  # safetensors has no complex dtypes
            plain, kind = torch.view_as_real(plain.resolve_conj()), "complex"
        if not plain.is_cuda:
            copied = plain.is_cpu and (copy or not plain.is_contiguous())
            plain = plain.to("cpu", copy=copied, memory_format=torch.contiguous_format)
        tensors[name] = plain
        return {TAG: [kind, name]}
    if isinstance(state, np.ndarray):
        tensors[name] = torch.from_numpy(np.array(state, order="C"))
        return {TAG: ["array", name]}
    if isinstance(state, Mapping):
        if all(isinstance(key, str) for key in state) and TAG not in state:
            return {key: encode(value, f"{name}.{key}", tensors, copy=copy) for key, value in state.items()}
        pairs = [[_encode_plain(key, name), encode(value, f"{name}.{key}", tensors, copy=copy)]
                 for key, value in state.items()]  # fmt: skip
        return {TAG: ["dict", pairs]}
    if isinstance(state, tuple):
        return {TAG: ["tuple", _encode_items(state, name, tensors, copy=copy)]}
    if isinstance(state, list):
        return _encode_items(state, name, tensors, copy=copy)
    return _encode_plain(state, name)


def to_host(tensors: dict[str, Tensor]) -> None:
    """Replaces tensors on GPUs, in place, by copies in pinned host memory. Blocking, but with one wait per GPU: all
    copies are in flight before the host waits."""
    on_gpus: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            on_gpus.setdefault(tensor.device, {})[name] = tensor
    for theirs in on_gpus.values():
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in theirs.values()]
        pinned = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        for (name, tensor), place in zip(theirs.items(), pinned.split(sizes), strict=True):
            tensors[name] = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensors[name].copy_(tensor, non_blocking=True)
    for device in on_gpus:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def _encode_items(values: Iterable[Any], name: str, tensors: dict[str, Tensor], *, copy: bool) -> list[Any]:
    return [encode(value, f"{name}.{index}", tensors, copy=copy) for index, value in enumerate(values)]


def _encode_plain(value: Any, name: str) -> Any:
    """Returns a plain value for JSON. Python writes floats so that reading them gives the same bits. Raises
    CheckpointError for other types."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG: ["float", repr(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{name} must be tensors, numbers, texts, lists and dicts to be kept in a checkpoint, "
                          f"got {type(value).__name__}")  # fmt: skip


def decode(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Returns the state that was passed to `encode`, with the tensors from `tensors`, moved to `device` if given.
    Raises CheckpointError for an invalid tree."""
    if isinstance(tree, list):
        return [decode(value, tensors, device) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(value, tensors, device) for key, value in tree.items()}
    try:
        kind, value = tree[TAG]
        if kind == "tensor":
            return tensors[value].to(device)
        if kind == "complex":
            return torch.view_as_complex(tensors[value].to(device))
        if kind == "array":
            return tensors[value].numpy()
        if kind == "tuple":
            return tuple(decode(value, tensors, device))
        if kind == "float":
            return float(value)
        if kind == "dict":
            return {decode(key, tensors): decode(each, tensors, device) for key, each in value}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a checkpoint's state must be what was encoded, got {tree[TAG]!r}") from error
    raise CheckpointError(f"a checkpoint's state has a value of the unknown kind {kind!r}")
