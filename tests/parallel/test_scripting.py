"""What scripts do with a wrapped model: average it, write into it, raise in its backward pass, use checkpoints."""

from __future__ import annotations

import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.work import scripting


def test_averages_are_reverted_or_kept_and_written_parameters_are_mixed() -> None:
    results = run_ranks(4, scripting.use_every_feature)
    for result in results:
        assert result["averaged"] == pytest.approx(results[0]["averaged"]) and result["reverted"]
        assert result["still_averaged"] and result["went_on"] == 5 and result["distance"] > 0
        assert result["stays"] < 1e-6
        assert result["d2c"] == pytest.approx(result["off_center"], rel=1e-4) and result["d2c"] > 0
        assert result["written"][0] > 6.5 and result["written"][1] < 7.5


@pytest.mark.parametrize("where", [0, 2])
def test_an_exception_in_the_backward_pass_does_not_change_later_steps(where: int) -> None:
    for steps, difference in run_ranks(2, scripting.raise_in_backward, where):
        assert steps == 4 and difference == 0.0


def test_a_backward_pass_through_activation_checkpoints_is_one_step() -> None:
    for steps, difference in run_ranks(2, scripting.train_with_checkpoints):
        assert steps == [3, 3] and difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_what_a_script_writes_into_parameters_is_never_lost(n: int) -> None:
    for results in run_ranks(n, scripting.write_in_every_way):
        for way, (gained, difference) in results.items():
            assert gained == pytest.approx(3.0 / n, abs=1e-3) and difference < 1e-5, way
