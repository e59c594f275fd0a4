"""Rules, schedules and optimizers give the results of an independent NumPy simulation, on real data."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "eval" / "benchmarks"
AFTER_20_ROUNDS = {
    "ring_central": (44.8889, 44.8889, 0.0), "ring_central_adam": (40.2222, 40.2222, 0.0),
    "ring_dsgd": (36.0556, 56.6667, 0.773609), "hypercube_dsgd": (27.9167, 65.7778, 0.441631),
    "ring_dsgdm": (25.1111, 37.7778, 0.790835), "hypercube_qg_momentum": (17.3333, 16.0, 0.051058),
    "hypercube_dsgt": (53.1111, 66.6667, 0.336298), "ring_momentum_tracking": (30.2778, 39.7778, 0.517223),
    "ring_d2": (64.5139, 68.8889, 0.306630), "ring_edm": (44.9167, 46.0, 0.147852),
    "ring_dadam": (17.3333, 18.4444, 0.279383), "hypercube_accumadam": (17.6389, 18.4444, 0.121124),
}  # fmt: skip
"""Local and merged accuracy in percent and absolute consensus distance of the simulation in float64, seed 0. Its
tracking rules mix y after x has used it, as here (and in Pu and Nedic 2021), so that one exchange suffices for both."""


@pytest.mark.sampled(one=["arm"])
@pytest.mark.parametrize("arm", AFTER_20_ROUNDS)
def test_twenty_rounds_equal_the_numpy_simulation(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    local, merged, distance = importlib.import_module("digits_table").run(arm, 0, 20)
    expected_local, expected_merged, expected_distance = AFTER_20_ROUNDS[arm]
    assert local == pytest.approx(expected_local, abs=0.1)
    assert merged == pytest.approx(expected_merged, abs=0.5), "at most two of the 450 images"
    assert distance == pytest.approx(expected_distance, rel=1e-4, abs=1e-5)
