"""Packs flags and integers of any width in bits into bytes, lowest bit first, and unpacks them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 20
"""Numbers packed at a time: a multiple of eight, so that pieces end on whole bytes."""
BLOCK = 1 << 16
"""Flags set at a time; few enough to be still in a core's cache when they are packed."""
GATHER_FACTOR = sum(1 << 56 - 7 * byte for byte in range(8))
"""A multiplier for a word of eight bytes that are 0 or 1 (lowest first): the highest byte of the product has one bit of
each."""


def pack(flags: Tensor) -> Tensor:
    """Packs flags [N] bool into [ceil(N / 8)] uint8."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    return _pack_on_device(flags)


def _pack_on_device(flags: Tensor) -> Tensor:
    """Returns the result of `pack`, computed on 64-bit words of eight flags, so that a GPU reads and writes little
    memory."""
    words = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(torch.int64)  # eight bytes that are 0 or 1
    return (words * GATHER_FACTOR >> 56).to(torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Unpacks [ceil(count / 8) or more] uint8 into [count] bool."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little").view(np.bool_))
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:count].bool()


def pack_positions(positions: Tensor, count: int) -> Tensor:
    """Packs `count` flags of which those at `positions` [K] int64, ascending, are one: [ceil(count / 8)] uint8."""
    if positions.device.type != "cpu":
        flags = torch.zeros(count, dtype=torch.bool, device=positions.device)
        return pack(flags.index_fill_(0, positions, True))  # an indexed assignment would copy the True from the host
    at, packed = positions.numpy(), np.empty(packed_bytes(count, 1), np.uint8)
    starts = range(0, count, BLOCK)
    edges = np.searchsorted(at, [*starts, count])
    ones = np.zeros(BLOCK, np.bool_)
    for start, first, last in zip(starts, edges[:-1], edges[1:], strict=True):
        here = at[first:last] - start
        ones[here] = True
        size = min(BLOCK, count - start)
        packed[start // 8 : packed_bytes(start + size, 1)] = np.packbits(ones[:size], bitorder="little")
        ones[:size] = False
    return torch.from_numpy(packed)


def positions(flags: Tensor, known: int | None = None) -> Tensor:
    """Returns the positions of the flags [N] bool that are set: [K] int64, ascending. known: K, if it is known; without
    it, and before torch 2.7, the host waits for a GPU."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    # torch 2.6 has nonzero_static only for the CPU; up to 2.9 it fails on a GPU without any flags (pytorch #162473)
    if known is None or not flags.numel() or torch.__version__ < "2.7":
        return flags.nonzero().view(-1)
    return flags.nonzero_static(size=known).view(-1)


def one_positions(packed: Tensor, count: int) -> Tensor:
    """Returns the positions below `count` of the bits that are one: [K] int64, ascending. The host waits for a GPU."""
    return positions(unpack(packed, count))


def zero_positions(packed: Tensor, count: int, known: int) -> Tensor:
    """Returns the positions below `count` of the bits that are zero: [known] int64, ascending. known: how many there
    are."""
    return positions(unpack(packed.bitwise_not(), count), known)


def packed_bytes(count: int, width: int) -> int:
    """Returns how many bytes `count` numbers of `width` bits each take."""
    return -(-count * width // 8)


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """Packs numbers [N], integers in [0, 2^width), into [ceil(N width / 8)] uint8. width: 0 to 40."""
    count, device = numbers.numel(), numbers.device
    if width == 0 or count == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if width == 1:
        return pack(numbers.bool())
    if width <= 8:
        octets = numbers.to(torch.uint8)
        if width == 8:
            return octets.contiguous()
        words = _join_octets(torch.nn.functional.pad(octets, (0, -count % 8)), width)
        return words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)[: packed_bytes(count, width)]
    shifts = torch.arange(width, device=device)
    pieces = [pack((piece[:, None] >> shifts & 1).view(-1).bool()) for piece in numbers.split(PIECE)]
    return torch.cat(pieces)


def _join_octets(octets: Tensor, width: int) -> Tensor:
    """Packs each group of eight numbers into one word, octets [8 N] uint8 -> [N] int64, in three steps that each join
    pairs."""
    for size, wider in ((1, torch.int16), (2, torch.int32), (4, torch.int64)):
        octets = octets.view(wider)
        mask = (1 << size * width) - 1
        octets = (octets & mask) | (octets >> (8 - width) * size & mask << size * width)
    return octets


def _split_octets(words: Tensor, width: int) -> Tensor:
    """The inverse of `_join_octets`."""
    for size, narrower in ((4, torch.int32), (2, torch.int16), (1, torch.uint8)):
        mask = (1 << size * width) - 1
        words = ((words & mask) | (words & mask << size * width) << (8 - width) * size).view(narrower)
    return words


def unpack_numbers(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_numbers`: [count], uint8 for widths of 1 to 8, else int64."""
    device = packed.device
    if width == 0 or count == 0:
        return torch.zeros(count, dtype=torch.int64, device=device)
    if width == 8:
        return packed[:count]
    if width == 1:
        return unpack(packed, count).to(torch.uint8)
    if width < 8:
        groups = -(-count // 8)
        words = torch.zeros(groups, 8, dtype=torch.uint8, device=device)
        part = packed[: packed_bytes(count, width)]
        words[:, :width] = torch.nn.functional.pad(part, (0, groups * width - part.numel())).view(-1, width)
        return _split_octets(words.view(-1).view(torch.int64), width)[:count]
    out = torch.empty(count, dtype=torch.int64, device=device)
    for start in range(0, count, PIECE):
        stop = min(count, start + PIECE)
        bits = unpack(packed[start * width // 8 :], (stop - start) * width).view(-1, width)
        total = out[start:stop].zero_()
        for bit in range(width):
            total += bits[:, bit].to(torch.int64) << bit
    return out
