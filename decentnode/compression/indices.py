"""Codes ascending indices in few bytes: as Rice-coded gaps or as a bitmap, whichever is smaller, or as "all of them".

The gap before an index is the number of indices left out. Rice's code of a gap with parameter k is gap >> k ones, a
zero, and the k low bits (Rice and Plaunt 1971, IEEE Trans. Commun. 19). The ones and zeros form one stream and the low
bits another, so that both are coded without a loop over gaps. If more than half of all indices are present, the missing
ones are coded instead. The size is within 5 % of the entropy of random positions for densities .001 to .999.

`encode_fixed` pads the first stream to the most bits that so many indices can need, so that both ends know the size
(the code of Elias 1974, J. ACM 21, and Fano 1971): .95 bytes per index at density .02, where the entropy is .88.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decentnode.compression import bits
from decentnode.errors import PeerFault
from decentnode.tensors import moved

HEADER_BYTES = 8
"""Bytes of the header: kind, Rice parameter, and the number of indices in six bytes, little-endian."""
ALL, BITMAP, RICE, LEFT_OUT = 0, 1, 2, 3
"""Kinds of code: no body; a bit per index; Rice-coded gaps of the indices, or of those that are left out."""
MAX_PARAMETER = 40
BLOCK = 1 << 16
"""Indices coded at a time; few enough to stay in a core's cache from one pass to the next."""


def largest_bytes(elements: int) -> int:
    """Returns the most bytes that `encode` returns for indices below `elements`."""
    return HEADER_BYTES + -(-elements // 8)


def _header(kind: int, parameter: int, count: int, device: torch.device) -> Tensor:
    raw = bytes((kind, parameter)) + count.to_bytes(6, "little")
    return moved(torch.frombuffer(bytearray(raw), dtype=torch.uint8), device)


def encode(indices: Tensor, elements: int) -> Tensor:
    """Encodes indices [K] int64, strictly ascending, in [0, elements), as uint8 [at most `largest_bytes`].

    The host waits for a GPU twice: for the last index, which determines the parameter, and for the length of the code.
    It does not wait if all indices are present, or none.
    """
    count, device = indices.numel(), indices.device
    if count == elements:
        return _header(ALL, 0, count, device)
    if count == 0:
        return _header(RICE, 0, 0, device)
    if 2 * count > elements:
        kind, coded = LEFT_OUT, bits.zero_positions(bits.pack_positions(indices, elements), elements, elements - count)
    else:
        kind, coded = RICE, indices
    parameter = _rice_parameter(coded.numel(), int(coded[-1]) + 1 - coded.numel())
    ends, low = _rice_streams(coded, parameter)
    unary = int(ends[-1]) + 1
    if -(-unary // 8) + bits.packed_bytes(coded.numel(), parameter) >= -(-elements // 8):
        return torch.cat([_header(BITMAP, 0, count, device), bits.pack_positions(indices, elements)])
    return torch.cat(
        [_header(kind, parameter, count, device), bits.pack_positions(ends, unary), bits.pack_numbers(low, parameter)]
    )


def _rice_streams(indices: Tensor, parameter: int) -> tuple[Tensor, Tensor]:
    """Returns, for each gap, where its ones end in the stream [K] int64, and its low bits [K]."""
    count, device = indices.numel(), indices.device
    if parameter == 0:
        return indices, indices
    ends = torch.empty_like(indices)
    low = torch.empty(count, dtype=torch.uint8 if parameter <= 8 else torch.int64, device=device)
    mask, before, end = (1 << parameter) - 1, -1, -1
    size = BLOCK if device.type == "cpu" else count
    for part, where, rest in zip(indices.split(size), ends.split(size), low.split(size), strict=True):
        torch.sub(part[1:], part[:-1], out=where[1:])
        where[0] = part[0] - before
        where.add_(mask)  # the gap, which is one less, and 2^parameter: same low bits, quotient one more
        rest.copy_(where).bitwise_and_(mask)
        where.bitwise_right_shift_(parameter)
        where[0] += end
        where.cumsum_(0)
        before, end = part[-1], where[-1]
    return ends, low


def _rice_parameter(count: int, total: int) -> int:
    """Returns the Rice parameter that gives the fewest bits for `count` geometric gaps whose sum is `total`."""
    left_out = total / (total + count)

    def bits_per_gap(k: int) -> float:
        return 1 + k + left_out ** (1 << k) / (1 - left_out ** (1 << k)) if left_out else 1 + k

    guess = round(math.log2(max(1.0, math.log(2) * (total / count + 1))))
    return min((k for k in (guess - 1, guess, guess + 1) if k >= 0), key=bits_per_gap)


def decode(stream: Tensor, elements: int) -> Tensor:
    """Returns the indices [K] int64 that `encode` coded. Raises PeerFault("malformed_payload") for bytes that it never
    returns.

    Memory is bounded by `elements` and the length of the stream, whatever the bytes say. The host waits for a GPU
    twice, for the header and to learn whether the bytes are valid; once if all indices are present.
    """
    if stream.dtype != torch.uint8 or stream.numel() < HEADER_BYTES:
        raise PeerFault("malformed_payload", f"indices of {stream.numel()} bytes")
    head = bytes(stream[:HEADER_BYTES].tolist())
    kind, parameter, count = head[0], head[1], int.from_bytes(head[2:], "little")
    body = stream[HEADER_BYTES:]
    if count > elements:
        raise PeerFault("malformed_payload", f"{count} indices below {elements}")
    if kind == ALL and count == elements and not body.numel():
        return torch.arange(elements, device=stream.device)
    if kind == BITMAP and body.numel() == -(-elements // 8):
        found = bits.one_positions(body, elements)
    elif kind == RICE:
        found = _decode_rice(body, parameter, count, elements)
    elif kind == LEFT_OUT:
        left_out = _decode_rice(body, parameter, elements - count, elements)
        found = bits.zero_positions(bits.pack_positions(left_out, elements), elements, count)
    else:
        raise PeerFault("malformed_payload", f"indices of kind {kind} in {body.numel()} bytes")
    if found.numel() != count:
        raise PeerFault("malformed_payload", f"{found.numel()} indices instead of {count}")
    return found


def _decode_rice(body: Tensor, parameter: int, count: int, elements: int) -> Tensor:
    """Returns the Rice-coded indices of a body: [count] int64, ascending, in [0, elements). Raises PeerFault.

    An encoder's parameter is near the logarithm of the mean gap, at most twice elements / count (`_rice_parameter`).
    With that bound no sum of gaps exceeds int64, and if the last sum is below `elements`, all earlier ones are
    ascending.
    """
    if parameter > MAX_PARAMETER or count << parameter > 2 * elements:
        raise PeerFault("malformed_payload", f"{count} gaps with parameter {parameter} below {elements}")
    low_bytes = bits.packed_bytes(count, parameter)
    unary_bytes = body.numel() - low_bytes
    if unary_bytes < -(-count // 8) or unary_bytes > -(-((elements >> parameter) + count) // 8):
        raise PeerFault("malformed_payload", f"{body.numel()} bytes for {count} indices")
    flags = bits.unpack(body[:unary_bytes], 8 * unary_bytes)
    ends = bits.positions(flags, count)
    if ends.numel() != count:
        raise PeerFault("malformed_payload", f"{ends.numel()} indices instead of {count}")
    found = _from_rice_streams(ends, body[unary_bytes:], parameter)
    ones = flags.sum() if flags.is_cuda else torch.tensor(count)  # on a GPU `positions` returns `count` in any case
    gaps, *last = torch.stack([ones, *found[-1:]]).tolist()
    if gaps != count or not all(0 <= each < elements for each in last):
        raise PeerFault("malformed_payload", f"{gaps} indices instead of {count}, below {elements}")
    return found


def _from_rice_streams(ends: Tensor, packed_low: Tensor, parameter: int) -> Tensor:
    """Inverts `_rice_streams`, from packed low bits: returns [K] int64. ends: [K], may be overwritten."""
    count = ends.numel()
    if parameter == 0 or not count:
        return ends
    # end of gap i = sum of quotients up to i, plus i; index i = sum of gaps up to i, plus i, where a gap is its
    # quotient and low bits: (end << parameter) - i (2^parameter - 1) + sum of low bits up to i
    low, step = bits.unpack_numbers(packed_low, parameter, count), (1 << parameter) - 1
    total: int | Tensor = 0
    size = BLOCK if ends.device.type == "cpu" else count
    ramp = torch.arange(0, step * min(size, count), step, device=ends.device)
    for start, where, rest in zip(range(0, count, size), ends.split(size), low.split(size), strict=True):
        sums = rest.cumsum(0, dtype=torch.int64)
        where.bitwise_left_shift_(parameter).sub_(ramp[: where.numel()]).add_(sums).add_(total - step * start)
        total = total + sums[-1]
    return ends


# -- codes whose size both ends know


def _fixed_parameter(count: int, elements: int) -> int:
    """Returns the Rice parameter with which `count` indices take the fewest bits; 0 is a bitmap."""
    return min(range(MAX_PARAMETER), key=lambda k: count * (1 + k) + (elements - count >> k))


def _unary_bytes(count: int, elements: int, parameter: int) -> int:
    return -(-(count + (elements - count >> parameter)) // 8)


def fixed_bytes(count: int, elements: int) -> int:
    """Returns how many bytes `encode_fixed` returns for `count` indices below `elements`."""
    parameter = _fixed_parameter(count, elements)
    return _unary_bytes(count, elements, parameter) + bits.packed_bytes(count, parameter)


def encode_fixed(indices: Tensor, elements: int) -> Tensor:
    """Encodes indices [K >= 1] int64, strictly ascending, in [0, elements), as uint8 [`fixed_bytes`]. The host does not
    wait for a GPU."""
    count = indices.numel()
    parameter = _fixed_parameter(count, elements)
    ends, low = _rice_streams(indices, parameter)
    unary = bits.pack_positions(ends, 8 * _unary_bytes(count, elements, parameter))
    return torch.cat([unary, bits.pack_numbers(low, parameter)])


def decode_fixed(stream: Tensor, count: int, elements: int) -> Tensor:
    """Returns the `count` indices [K] int64 that `encode_fixed` coded. stream: uint8 [`fixed_bytes`].

    For bytes that it never returns, raises PeerFault("malformed_payload"), or returns any numbers in [0, elements): on
    a GPU, for which the host does not wait, always the latter.
    """
    parameter = _fixed_parameter(count, elements)
    size = _unary_bytes(count, elements, parameter)
    ends = bits.positions(bits.unpack(stream[:size], 8 * size), count)
    if ends.numel() != count:
        raise PeerFault("malformed_payload", f"{ends.numel()} indices instead of {count}")
    return _from_rice_streams(ends, stream[size:], parameter).clamp_(0, elements - 1)
