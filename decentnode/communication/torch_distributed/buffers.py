"""What both ends of a communicator agree on: headers, pieces, and the buffers that payloads are sent from and received
into."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgpack
import torch
from torch import Tensor

from decentnode.communication.receive.chunking import TensorPlan

HEADER_BYTES = 1024


def pack_header(round: int, phase: int, totals: list[int], scalars: Mapping[str, int | float]) -> Tensor:
    """Returns a header [HEADER_BYTES] uint8: two bytes of length, then msgpack. Raises ValueError if it does not
    fit."""
    raw = msgpack.packb([round, phase, totals, dict(scalars)])
    if len(raw) > HEADER_BYTES - 2:
        raise ValueError(f"payload scalars must fit in {HEADER_BYTES - 2} bytes, got {len(raw)}")
    framed = len(raw).to_bytes(2, "little") + raw
    return torch.frombuffer(bytearray(framed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def unpack_header(
    header: Tensor, round: int, phase: int, plans: tuple[TensorPlan, ...]
) -> tuple[list[int], dict[str, int | float]]:
    """Returns (elements per tensor, scalars) of a header, checked against the local schema. Raises ValueError for
    anything else.

    header: [HEADER_BYTES] uint8 on the CPU.
    """
    raw = header.numpy().tobytes()
    length = int.from_bytes(raw[:2], "little")
    try:
        value = msgpack.unpackb(raw[2 : 2 + length], max_array_len=64, max_map_len=64, max_str_len=256, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"header is not msgpack: {error}") from error
    if not (isinstance(value, list) and len(value) == 4 and value[:2] == [round, phase]):
        raise ValueError(f"header must be of round {round}, phase {phase}")
    totals, scalars = value[2:]
    if not isinstance(totals, list) or len(totals) != len(plans) or any(type(total) is not int for total in totals):
        raise ValueError("header must have one size per tensor")
    for plan, total in zip(plans, totals, strict=True):
        if not plan.accepts(total):
            raise ValueError(f"{plan.name} must have at most {plan.spec.max_elements} elements, got {total}")
    if not isinstance(scalars, dict) or any(
        not isinstance(k, str) or type(v) not in (int, float) for k, v in scalars.items()
    ):
        raise ValueError("scalars must be named numbers")
    return totals, scalars


def pieces(plans: tuple[TensorPlan, ...], tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors cut into chunks, as both ends cut them; an empty tensor gives none."""
    return [
        tensor[slice(*plan.bounds(chunk, tensor.numel()))]
        for plan, tensor in zip(plans, tensors, strict=True) if tensor.numel()
        for chunk in range(plan.count(tensor.numel()))
    ]  # fmt: skip


class Pool:
    """A pool of reusable buffers of the schema's largest sizes, for any thread. Buffers that are never given back are
    not tracked."""

    def __init__(self, device: torch.device, keep: int = 16, pinned: bool = False) -> None:
        """keep: how many free buffers of one size and dtype are kept. pinned: for copies to and from a GPU."""
        self.device, self._keep, self._pinned = device, keep, pinned
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns a buffer [elements] with arbitrary values."""
        with self._lock:
            free = self._free.get((elements, dtype))
            if free:
                return free.pop()
        return torch.empty(elements, dtype=dtype, device=self.device, pin_memory=self._pinned)

    def put_back(self, tensor: Tensor) -> None:
        with self._lock:
            free = self._free.setdefault((tensor.numel(), tensor.dtype), [])
            if len(free) < self._keep:
                free.append(tensor)


class Buffers:
    """One payload's tensors. They return to the pool once all `num_users` have released them. Any thread."""

    def __init__(self, pool: Pool, plans: tuple[TensorPlan, ...], num_users: int) -> None:
        self.tensors = [pool.take(plan.spec.max_elements, plan.spec.dtype) for plan in plans]
        self._pool, self._num_users = pool, num_users
        self._lock = threading.Lock()

    def trimmed(self, totals: list[int]) -> list[Tensor]:
        """Returns the tensors of a payload with these sizes."""
        return [tensor[:total] for tensor, total in zip(self.tensors, totals, strict=True)]

    def release(self) -> None:
        """Records that one user no longer needs the buffers."""
        with self._lock:
            self._num_users -= 1
            last = self._num_users == 0
        if last:
            for tensor in self.tensors:
                self._pool.put_back(tensor)
