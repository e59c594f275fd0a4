"""Finds tensors that share memory with each other, or whose own elements share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Named = tuple[str, Tensor]


def shares_elements(tensor: Tensor) -> bool:
    """Returns whether elements of the tensor share memory, as with `expand` and with overlapping windows."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return len(_element_offsets(tensor).unique()) < tensor.numel()
            end = stride * (size - 1) + end
    return False


def overlaps(changed: Sequence[Named], others: Sequence[Named]) -> tuple[str, str] | None:
    """Returns the names of two tensors that share memory, the first of them in `changed`; None if there are none."""
    spans = sorted(((*_span(each), name, each, number < len(changed))
                   for number, (name, each) in enumerate([*changed, *others]) if each.numel()),
                  key=lambda row: row[:2])  # fmt: skip
    open_: list[tuple[int, int, str, Tensor, bool]] = []
    for row in spans:
        open_ = [before for before in open_ if before[1] > row[0]]
        for before in open_:
            if (row[4] or before[4]) and row[3].device == before[3].device and _share_bytes(row[3], before[3]):
                return (row[2], before[2]) if row[4] else (before[2], row[2])
        open_.append(row)
    return None


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the address of the tensor's first byte, and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _dense(tensor: Tensor) -> bool:
    """Returns whether every byte of the tensor's span belongs to it; elements that share memory make it False."""
    start, end = _span(tensor)
    return end - start == tensor.numel() * tensor.element_size() and not shares_elements(tensor)


def _element_offsets(tensor: Tensor) -> Tensor:
    """Returns [elements] the offset of each element from the first, in elements."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[..., None] + torch.arange(size, device="cpu") * stride).reshape(-1)
    return places.reshape(-1)


def _share_bytes(first: Tensor, second: Tensor) -> bool:
    """Returns whether any byte belongs to both of two tensors whose spans overlap."""
    if _dense(first) and _dense(second):
        return True  # without listing the bytes, which would take gigabytes for a large model
    both = []
    for each in (first, second):
        size = each.element_size()
        starts = _element_offsets(each) * size + each.data_ptr()
        both.append((starts[:, None] + torch.arange(size, device="cpu")).reshape(-1))
    return bool(torch.isin(both[0], both[1]).any())
