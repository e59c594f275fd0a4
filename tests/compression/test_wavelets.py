"""The wavelet transform against its definition, and against PyWavelets where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decentnode.compression.wavelets import DWT, WAVELETS, daubechies


@pytest.mark.parametrize("name", WAVELETS)
def test_filters_are_orthonormal_with_vanishing_moments(name: str) -> None:
    h = np.array(daubechies(WAVELETS[name]))
    for shift in range(0, len(h), 2):
        assert np.dot(h[shift:], h[: len(h) - shift]) == pytest.approx(1.0 if shift == 0 else 0.0, abs=1e-7)
    g = [(-1) ** k * c for k, c in enumerate(h[::-1])]
    for moment in range(WAVELETS[name]):
        assert abs(sum(c * k**moment for k, c in enumerate(g))) < 1e-4 * (1 + len(h) ** moment)


@pytest.mark.parametrize("name", WAVELETS)
@pytest.mark.parametrize("elements", [1, 2, 15, 16, 17, 1000])
def test_the_transform_is_invertible_and_keeps_the_norm(name: str, elements: int) -> None:
    x = torch.randn(elements, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dwt = DWT(name, 4)
    c = dwt.forward(x)
    assert c.shape == (dwt.coefficients(elements),) and dwt.coefficients(elements) % 16 == 0
    torch.testing.assert_close(dwt.inverse(c, elements), x, atol=1e-8, rtol=0)
    torch.testing.assert_close(c.norm(), x.norm(), atol=1e-8, rtol=1e-8)


def test_fine_coefficients_of_a_polynomial_are_zero() -> None:
    x = torch.linspace(-1, 1, 64, dtype=torch.float64)
    fine = DWT("db3", 1).forward(3 * x * x - x + 2)[32:]
    assert float(fine[:-2].abs().max()) < 1e-8, "only those that wrap around the end may differ from zero"


@pytest.mark.parametrize("name", ["haar", "sym2", "sym3", "db4", "db8"])
def test_coefficients_are_those_of_pywavelets(name: str) -> None:
    """Of its periodic transform, which is shifted by half a filter."""
    pywt = pytest.importorskip("pywt")
    x = np.random.default_rng(1).standard_normal(256)
    ours = DWT(name, 1).forward(torch.from_numpy(np.roll(x, WAVELETS[name] - 1))).numpy()
    low, high = pywt.dwt(x, name, mode="periodization")
    np.testing.assert_allclose(ours[:128], low, atol=1e-6)
    np.testing.assert_allclose(ours[128:], high, atol=1e-6)
