"""Numbers of any width in bits, packed into bytes, lowest bit first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 20
"""Numbers packed at a time: a multiple of eight, so that pieces end on whole bytes."""


def pack(flags: Tensor) -> Tensor:
    """flags: [N] bool -> [ceil(N / 8)] uint8."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(-1, 8).to(torch.int32)
    return (padded << torch.arange(8, device=flags.device)).sum(1).to(torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """packed: [>= ceil(count / 8)] uint8 -> [count] bool."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little").view(np.bool_))
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:count].bool()


def set_bits(packed: Tensor, count: int) -> Tensor:
    """[K] int64: ascending positions below `count` of the bits that are one."""
    flags = unpack(packed, count)
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)


def packed_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """numbers: [N] integers in [0, 2^width) -> [ceil(N width / 8)] uint8. width: 0 to 40."""
    if width == 0 or numbers.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=numbers.device)
    if width in (1, 2, 4, 8):
        per = 8 // width
        small = numbers.to(torch.uint8)
        if per == 1:
            return small
        if width == 1:
            return pack(small.bool())
        lanes = torch.nn.functional.pad(small, (0, -small.numel() % per)).view(-1, per)
        packed = lanes[:, 0].clone()
        for lane in range(1, per):
            packed |= lanes[:, lane] << (lane * width)
        return packed
    shifts = torch.arange(width, device=numbers.device)
    pieces = [pack((piece[:, None] >> shifts & 1).view(-1).bool()) for piece in numbers.split(PIECE)]
    return torch.cat(pieces)


def unpack_numbers(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse: [count], uint8 for widths up to 8 that divide 8, else int64."""
    device = packed.device
    if width == 0 or count == 0:
        return torch.zeros(count, dtype=torch.int64, device=device)
    if width in (1, 2, 4, 8):
        per = 8 // width
        if per == 1:
            return packed[:count]
        if width == 1:
            return unpack(packed, count).to(torch.uint8)
        found = torch.empty(packed.numel(), per, dtype=torch.uint8, device=device)
        for lane in range(per):
            torch.bitwise_and(packed >> (lane * width), (1 << width) - 1, out=found[:, lane])
        return found.view(-1)[:count]
    out = torch.empty(count, dtype=torch.int64, device=device)
    for start in range(0, count, PIECE):
        stop = min(count, start + PIECE)
        bits = unpack(packed[start * width // 8 :], (stop - start) * width).view(-1, width)
        total = out[start:stop].zero_()
        for bit in range(width):
            total += bits[:, bit].to(torch.int64) << bit
    return out
