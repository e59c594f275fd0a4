"""How often the host waits for the GPU in a round, as eval/benchmarks/gpu.py counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
BENCHMARKS = Path(__file__).parents[2] / "eval" / "benchmarks"


def test_a_round_waits_only_once_for_its_loss_and_the_check_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_waits import host

    (row,) = host(True)
    if row.value is None:
        pytest.skip(row.note)
    assert row.value <= 1, row
