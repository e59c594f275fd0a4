"""Paired t-tests of two settings over the same seeds, and the correction for several comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paired:
    """A paired t-test (Student, 1908) of one setting against another, over the seeds that both have."""

    seeds: int
    mean: float
    """Mean of the differences, in the unit of the values."""
    low: float
    high: float
    """The ends of the 95 % confidence interval of the mean."""
    p: float
    """Two-sided p-value: the probability, if the settings did not differ, of a mean difference at least as far from
    0."""


def p_text(p: float | None) -> str:
    """Returns a p-value as tables show it: never as 0.000, since no probability by chance is zero."""
    if p is None:
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def paired(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> Paired | None:
    """Compares values by seed, ours minus theirs. Returns None for fewer than two common seeds."""
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(differences) < 2:
        return None
    mean, freedom = statistics.fmean(differences), len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return Paired(len(differences), mean, mean, mean, 1.0 if mean == 0 else 0.0)
    half = quantile(0.975, freedom) * error
    return Paired(len(differences), mean, mean - half, mean + half, two_sided(mean / error, freedom))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Returns p-values corrected for several comparisons (Holm, 1979); None stays None."""
    order = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for place, (value, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * value))
        corrected[index] = largest
    return corrected


def two_sided(t: float, freedom: int) -> float:
    """Returns the probability that a t-distributed value is farther from 0 than `t`."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def quantile(share: float, freedom: int) -> float:
    """Returns the quantile of Student's t-distribution at `share`, in (0.5, 1), by bisection."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > 2 * (1 - share):
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > 2 * (1 - share) else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Returns the regularized incomplete beta function I_x(a, b), for x in [0, 1]: its continued fraction (Abramowitz
    and Stegun, 26.5.8), evaluated by Lentz's method, which converges quickly for x < (a + 1) / (a + b + 2)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    factor = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny, value, c, d = 1e-300, 1.0, 1.0, 0.0
    for step in range(400):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        d = 1.0 / (1.0 + term * d or tiny)
        c = 1.0 + term / c or tiny
        value *= c * d
        if step and abs(1.0 - c * d) < 1e-14:
            break
    return factor * (value - 1.0)
