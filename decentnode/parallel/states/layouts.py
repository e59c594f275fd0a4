"""Converts the states that sharing rules keep for each bucket to the buckets of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.parallel.buckets.bucket import Bucket

Layout = list[list[tuple[str, int]]]
"""[bucket]: its parameters in order, each with its number of elements."""


def bucket_layout(buckets: Sequence[Bucket], named: Sequence[tuple[str, Tensor]]) -> Layout:
    """Returns which parameters are in which bucket; named: all of them, with their names."""
    names = {p: name for name, p in named}
    return [[(names[p], p.numel()) for p in bucket.params] for bucket in buckets]


def convert_rule_states(states: Sequence[Any], saved: Layout | None, wanted: Layout) -> list[Any]:
    """Returns the rules' states for the buckets of `wanted`, from those for the buckets of `saved`.

    saved: None if the file does not have it. Tensors with one value per element of a bucket are split at the
    parameters; everything else must be the same in every bucket. Raises ValueError if it is not, or a parameter is
    missing.
    """
    if saved is None and len(states) == len(wanted):
        return list(states)
    if not any(states):
        return [{} for _ in wanted]
    if saved is None:
        raise ValueError(f"the state of the sharing rule must be of {len(wanted)} buckets, got {len(states)}")
    saved_layout = [[(name, int(size)) for name, size in bucket] for bucket in saved]
    if saved_layout == wanted:
        return list(states)
    return [_rebuilt(list(states), saved_layout, bucket, "sharing") for bucket in wanted]


def _rebuilt(values: list[Any], saved: Layout, bucket: list[tuple[str, int]], where: str) -> Any:
    first = values[0]
    sizes = [sum(size for _, size in each) for each in saved]
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _rebuilt([value[key] for value in values], saved, bucket, f"{where}.{key}") for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [_rebuilt(list(each), saved, bucket, f"{where}[{number}]")
                for number, each in enumerate(zip(*values, strict=True))]  # fmt: skip
    if all(isinstance(value, Tensor) and value.shape == (size,) for value, size in zip(values, sizes, strict=True)):
        pieces: dict[str, Tensor] = {}
        for value, names in zip(values, saved, strict=True):
            parts = value.split([size for _, size in names])
            pieces |= {name: part for (name, _), part in zip(names, parts, strict=True)}
        wrong = [name for name, size in bucket if name not in pieces or pieces[name].numel() != size]
        if wrong:
            raise ValueError(f"{where} must have the elements of parameter {wrong[0]}, got a different parameter in "
                             "the file")
        return torch.cat([pieces[name] for name, _ in bucket])
    if all(type(value) is type(first) and not isinstance(value, Tensor) and value == first for value in values):
        return first
    raise ValueError(f"{where} differs from bucket to bucket: resume with the bucket_size_in_mb of the saved run")
