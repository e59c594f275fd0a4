"""What scripts do with a wrapped model: average it, write into it, raise in it, run parts of it twice."""

from __future__ import annotations

import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.work import scripting


def test_averages_reverting_and_writing_between_steps() -> None:
    results = run_ranks(4, scripting.features)
    for found in results:
        assert found["averaged"] == pytest.approx(results[0]["averaged"]) and found["reverted"]
        assert found["still_averaged"] and found["went_on"] == 5 and found["distance"] > 0
        assert found["stays"] < 1e-6
        assert found["d2c"] == pytest.approx(found["off_center"], rel=1e-4) and found["d2c"] > 0
        assert found["written"][0] > 6.5 and found["written"][1] < 7.5


@pytest.mark.parametrize("where", [0, 2])
def test_an_exception_in_the_backward_pass_costs_no_later_step(where: int) -> None:
    for steps, difference in run_ranks(2, scripting.exception, where):
        assert steps == 4 and difference == 0.0


def test_a_backward_pass_with_others_inside_is_one_step() -> None:
    for steps, difference in run_ranks(2, scripting.checkpointed):
        assert steps == [3, 3] and difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_what_a_script_writes_is_never_lost(n: int) -> None:
    for found in run_ranks(n, scripting.writes):
        for way, (gained, difference) in found.items():
            assert gained == pytest.approx(3.0 / n, abs=1e-3) and difference < 1e-5, way
