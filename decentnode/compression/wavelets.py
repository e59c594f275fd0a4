"""Orthogonal discrete wavelet transforms of 1-D tensors on any device, without a wavelet library."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def daubechies(moments: int) -> list[float]:
    """Low-pass filter [2 moments] with that many vanishing moments: the minimum-phase factor (Daubechies 1988, 4.B)."""
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
"""Name -> vanishing moments; sym2 and sym3 are db2 and db3."""


class DWT:
    """`level` steps of an orthogonal filter pair on a periodic signal; coarse coefficients first.

    A signal is padded with zeros to a multiple of 2^level. The norm is kept: the inverse is the transpose.
    """

    def __init__(self, wavelet: str, level: int) -> None:
        self.level = level
        self.low = daubechies(WAVELETS[wavelet])
        self.high = [(-1) ** k * h for k, h in enumerate(reversed(self.low))]

    def coefficients(self, elements: int) -> int:
        return -(-elements // (1 << self.level)) << self.level

    def forward(self, signal: Tensor) -> Tensor:
        """signal: [P] -> [C] of float32 (float64 stays), C = `coefficients(P)`."""
        dtype = torch.float64 if signal.dtype == torch.float64 else torch.float32
        out = torch.zeros(self.coefficients(signal.numel()), dtype=dtype, device=signal.device)
        out[: signal.numel()] = signal
        size = out.numel()
        for _ in range(self.level):
            size //= 2
            even, odd = out[0 : 2 * size : 2].clone(), out[1 : 2 * size : 2].clone()
            self._analyze(even, odd, out[:size], self.low)
            self._analyze(even, odd, out[size : 2 * size], self.high)
        return out

    @staticmethod
    def _analyze(even: Tensor, odd: Tensor, out: Tensor, taps: list[float]) -> None:
        """out[k] = sum_t taps[t] x[2k + t], around the end."""
        out.zero_()
        for t, tap in enumerate(taps):
            _add_rolled(out, odd if t % 2 else even, -(t // 2), tap)

    def inverse(self, coefficients: Tensor, elements: int) -> Tensor:
        """[elements] from `forward`'s result."""
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
