"""Orthogonal discrete wavelet transforms of 1-D tensors on any device, without a wavelet library."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def daubechies(moments: int) -> list[float]:
    """Returns the low-pass filter [2 moments] with this many vanishing moments: the minimum-phase factor (Daubechies
    1988, 4.B)."""
    # P(y) = sum_k C(p-1+k, k) y^k with y = (2 - z - 1/z) / 4; the roots inside the unit circle make the filter
    p = moments
    ys = np.roots([math.comb(p - 1 + k, k) for k in reversed(range(p))])
    zs = []
    for y in ys:
        b = 1 - 2 * y
        root = b - np.sqrt(b * b - 1 + 0j)
        zs.append(root if abs(root) < 1 else 1 / root)
    poly = np.real(np.poly(zs)) if zs else np.ones(1)
    for _ in range(p):
        poly = np.convolve(poly, [1.0, 1.0])
    return list((poly * math.sqrt(2) / poly.sum()).tolist())


WAVELETS: dict[str, int] = {
    "haar": 1, "db1": 1, "db2": 2, "db3": 3, "db4": 4, "db5": 5, "db6": 6, "db7": 7, "db8": 8, "sym2": 2, "sym3": 3,
}  # fmt: skip
"""Vanishing moments by name; sym2 and sym3 equal db2 and db3."""

PIECE = 1 << 15
"""Coefficients computed at a time on a CPU; few enough to stay in a core's cache through all taps."""


class DWT:
    """`level` steps of an orthogonal filter pair on a periodic signal; coarse coefficients first.

    A signal is padded with zeros to a multiple of 2^level. The transform is orthogonal: it keeps the norm.
    """

    def __init__(self, wavelet: str, level: int) -> None:
        self.level = level
        self.low = daubechies(WAVELETS[wavelet])
        self.high = [(-1) ** k * h for k, h in enumerate(reversed(self.low))]

    def coefficients(self, elements: int) -> int:
        return -(-elements // (1 << self.level)) << self.level

    def forward(self, signal: Tensor) -> Tensor:
        """Returns the coefficients [C] of signal [P], C = `coefficients(P)`, in float32, or float64 for float64."""
        dtype = torch.float64 if signal.dtype == torch.float64 else torch.float32
        out = torch.zeros(self.coefficients(signal.numel()), dtype=dtype, device=signal.device)
        out[: signal.numel()] = signal
        reach = len(self.low) - 2
        size = out.numel()
        for _ in range(self.level):
            size //= 2
            around = out[: 2 * size].repeat(1 + reach // (2 * size))[:reach]
            x = torch.cat([out[: 2 * size], around])
            piece = PIECE if out.device.type == "cpu" else size
            for start in range(0, size, piece):
                stop = min(size, start + piece)
                pairs = x[2 * start : 2 * stop + reach].view(-1, 2)
                halves = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
                for taps, at in ((self.low, 0), (self.high, size)):
                    part = out[at + start : at + stop]
                    torch.mul(halves[0][: stop - start], taps[0], out=part)
                    for t, tap in enumerate(taps[1:], 1):  # sum_t taps[t] x[2 k + t]
                        part.add_(halves[t % 2][t // 2 : t // 2 + stop - start], alpha=tap)
        return out

    def inverse(self, coefficients: Tensor, elements: int) -> Tensor:
        """Returns the signal [elements] of coefficients [C] that `forward` returned."""
        out = coefficients.clone()
        size = out.numel() >> self.level
        for _ in range(self.level):
            low, high = out[:size].clone(), out[size : 2 * size].clone()
            for parity in (0, 1):
                part = torch.zeros_like(low)
                for t in range(parity, len(self.low), 2):
                    _add_rolled(part, low, t // 2, self.low[t])
                    _add_rolled(part, high, t // 2, self.high[t])
                out[parity : 2 * size : 2] = part
            size *= 2
        return out[:elements]


def _add_rolled(out: Tensor, x: Tensor, shift: int, scale: float) -> None:
    """out[k] += scale * x[(k - shift) mod n], without making the rolled tensor."""
    n = x.numel()
    shift %= n
    if shift == 0:
        out.add_(x, alpha=scale)
        return
    out[shift:].add_(x[: n - shift], alpha=scale)
    out[:shift].add_(x[n - shift :], alpha=scale)
