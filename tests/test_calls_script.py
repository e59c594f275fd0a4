"""eval/benchmarks/calls.py: it runs, and its fit recovers known costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "eval" / "benchmarks"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import calls

    found: ModuleType = calls
    return found


def test_the_fit_recovers_the_costs_of_which_times_were_made(calls: ModuleType) -> None:
    def times(call: float, peer: float, hop: float) -> list[tuple[str, int, float]]:
        rows = [("batch", d) for d in (1, 2, 3)] + [("all_reduce", d) for d in (1, 2, 3)]
        return [(name, d, sum(n * cost for n, cost in zip(calls.terms(name, d), (call, peer, hop), strict=True)))
                for name, d in rows]  # fmt: skip

    assert calls.fitted(times(1e-4, 2e-5, 3e-5)) == pytest.approx([1e-4, 2e-5, 3e-5])
    found = calls.fitted(times(1e-4, -2e-5, 3e-5))
    assert found[1] == 0 and (found >= 0).all() and found[0] > 0


@pytest.mark.slow
def test_the_script_measures_gloo_and_prints_the_keys_for_a_simulation() -> None:
    command = [sys.executable, str(BENCHMARKS / "calls.py"), "--ranks", "2", "3", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    number = r"[\d.e+-]+"
    keys = rf"calls: \{{call_seconds: {number}, peer_seconds: {number}, hop_seconds: {number}\}}"
    assert re.search(keys, done.stdout)
    assert done.stdout.count("GB/s") == 5
