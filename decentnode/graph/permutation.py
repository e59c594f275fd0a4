"""A random permutation whose values can be computed one at a time."""

from __future__ import annotations

import math

import numpy as np

STAGES = 8
"""Number of rounds of the Feistel network. Four are enough that a network of random functions cannot be distinguished
from a random permutation by few of its values (Luby and Rackoff 1988); small permutations, all of whose values are
seen, need more."""
_GOLDEN, _FIRST, _SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _scramble(x: np.ndarray) -> np.ndarray:
    """Returns x scrambled by the finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit of the result depends
    on all bits of x."""
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    found: np.ndarray = x ^ (x >> _31)
    return found


class RandomPermutation:
    """A permutation of 0 .. size - 1 chosen by a few random words; computing a value costs the same for every size.

    It is a Feistel network on pairs (a, b), a < rows, b < columns, of which there are only slightly more than `size`. A
    result that is not below `size` is put through the network again until it is (cycle walking, Black and Rogaway
    2002).
    """

    def __init__(self, size: int, draws: np.random.Generator) -> None:
        self._size = np.uint64(size)
        rows = math.isqrt(max(size - 1, 0)) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-size // rows))
        self._keys = draws.integers(0, 2**64, STAGES, np.uint64)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Returns the image of each value under the permutation. values and result: int64."""
        return self._cycle_walk(values, self._forward)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Returns the preimage of each value under the permutation. values and result: int64."""
        return self._cycle_walk(values, self._backward)

    def _cycle_walk(self, values: np.ndarray, permute: object) -> np.ndarray:
        assert callable(permute)
        found: np.ndarray = permute(values.astype(np.uint64))
        while (too_large := found >= self._size).any():
            found[too_large] = permute(found[too_large])
        return found.astype(np.int64)

    def _forward(self, x: np.ndarray) -> np.ndarray:
        a, b = x // self._columns, x % self._columns
        for stage in range(0, STAGES, 2):
            a = (a + self._shift(stage, b, self._rows)) % self._rows
            b = (b + self._shift(stage + 1, a, self._columns)) % self._columns
        return a * self._columns + b

    def _backward(self, x: np.ndarray) -> np.ndarray:
        a, b = x // self._columns, x % self._columns
        for stage in reversed(range(0, STAGES, 2)):
            b = (b + self._columns - self._shift(stage + 1, a, self._columns)) % self._columns
            a = (a + self._rows - self._shift(stage, b, self._rows)) % self._rows
        return a * self._columns + b

    def _shift(self, stage: int, half: np.ndarray, below: np.uint64) -> np.ndarray:
        shift: np.ndarray = _scramble(self._keys[stage] + (half + np.uint64(1)) * _GOLDEN) % below
        return shift
