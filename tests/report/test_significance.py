"""Paired t-tests, against tables of Student's distribution and an independent integral."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decentnode.report.reading.significance import holm, incomplete_beta, paired, quantile, two_sided

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}
"""Degrees of freedom -> the .975 quantile, as printed tables have it."""


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_equal_those_of_printed_tables(freedom: int) -> None:
    assert quantile(0.975, freedom) == pytest.approx(TABLE[freedom], abs=6e-4)
    assert two_sided(quantile(0.975, freedom), freedom) == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 5, 40])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 8.0])
def test_probabilities_are_the_integral_of_the_density(freedom: int, t: float) -> None:
    x = np.linspace(-t, t, 200_001)
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log - (freedom + 1) / 2 * np.log1p(x * x / freedom))
    inside = float(np.trapezoid(density, x)) if hasattr(np, "trapezoid") else float(np.trapz(density, x))
    assert two_sided(t, freedom) == pytest.approx(1 - inside, abs=1e-7)
    assert two_sided(-t, freedom) == two_sided(t, freedom)


def test_the_beta_function_is_symmetric_and_bounded() -> None:
    assert incomplete_beta(2, 3, 0) == 0 and incomplete_beta(2, 3, 1) == 1
    for x in (0.1, 0.5, 0.9):
        assert incomplete_beta(2, 3, x) == pytest.approx(1 - incomplete_beta(3, 2, 1 - x), abs=1e-13)
        assert incomplete_beta(1, 1, x) == pytest.approx(x, abs=1e-13)


def test_paired_differences_are_taken_by_seed() -> None:
    """Seeds differ far more than settings do: only pairs show it."""
    ours = {seed: 10.0 * seed + 1 + 0.01 * seed for seed in (1, 2, 3, 4)}
    theirs = {4: 40.0, 2: 20.0, 1: 10.0, 3: 30.0, 9: 5.0}
    found = paired(ours, theirs)
    assert found is not None and found.seeds == 4 and found.mean == pytest.approx(1.025)
    assert found.low < 1.025 < found.high and found.high - found.low == pytest.approx(
        2 * 3.18245 * np.std([0.01, 0.02, 0.03, 0.04], ddof=1) / 2, rel=1e-4)  # fmt: skip
    assert found.p < 1e-4
    assert paired({1: 1.0}, {1: 2.0}) is None and paired({1: 1.0, 2: 1.0}, {2: 2.0, 3: 1.0}) is None


def test_paired_differences_without_variance() -> None:
    same = paired({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0})
    shifted = paired({1: 2.0, 2: 3.0}, {1: 1.0, 2: 2.0})
    assert same is not None and shifted is not None
    assert (same.p, same.mean) == (1.0, 0.0) and (shifted.p, shifted.mean, shifted.low) == (0.0, 1.0, 1.0)


def test_holm_corrects_for_several_comparisons() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.9, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.slow
def test_p_is_below_5_percent_in_5_percent_of_equal_samples() -> None:
    rng = np.random.default_rng(0)
    found = [paired(dict(enumerate(rng.normal(size=5))), dict(enumerate(rng.normal(size=5)))) for _ in range(2000)]
    share = sum(each.p < 0.05 for each in found if each is not None) / len(found)
    assert 0.035 < share < 0.065
