"""Samplers decide which points are run, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from decentnode.errors import EnvironmentFault
from decentnode.sweeps.point import Point
from decentnode.sweeps.samplers import Halving, Listed, Optuna, Sampler, budgets
from decentnode.sweeps.space import Settings, axes


def run_sampler(sampler: Sampler, value: Callable[[Point], float | None], jobs: int = 1) -> list[Point]:
    """Returns all points in the order in which the sampler gives them, with `jobs` of them running at a time."""
    found: list[Point] = []
    running: list[Point] = []
    while True:
        while len(running) < jobs and (point := sampler.ask()) is not None:
            running.append(point)
            found.append(point)
        if not running:
            return found
        done = running.pop(0)
        sampler.tell(done, value(done))


def candidates(count: int) -> list[Settings]:
    return [(("x", str(number)),) for number in range(count)]


def x_value(point: Point) -> float:
    return float(point.settings[0][1])


def test_a_list_asks_for_every_seed_of_every_point() -> None:
    sampler = Listed(candidates(2), [1, 2])
    assert sampler.remaining() == [None] * 4
    found = run_sampler(sampler, lambda _: None)
    assert [(x_value(point), point.seed) for point in found] == [(0, 1), (0, 2), (1, 1), (1, 2)]


@pytest.mark.parametrize(("rounds", "count", "eta", "least", "expected"), [
    (60, 9, 3, 1, [7, 20, 60]), (60, 8, 3, 1, [20, 60]), (60, 2, 3, 1, [60]), (60, 1000, 4, 10, [15, 60]),
    (1, 9, 3, 1, [1]), (2, 100, 2, 1, [1, 2]), (81, 81, 3, 1, [1, 3, 9, 27, 81]),
])  # fmt: skip
def test_budgets_of_rungs_grow_by_eta_up_to_all_rounds(
    rounds: int, count: int, eta: int, least: int, expected: Sequence[int]
) -> None:
    assert budgets(rounds, count, eta, least) == expected


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_halving_promotes_the_candidates_with_the_best_mean_over_seeds(jobs: int) -> None:
    """The mean over two seeds counts: that of x = 5 is best although one of its seeds is not."""
    sampler = Halving(candidates(9), [1, 2], [1, 3, 9], 3)
    left = len(sampler.remaining())

    def value(point: Point) -> float:
        assert point.seed is not None
        return abs(x_value(point) - 5) + (0.4 if point.seed == 1 else -0.4)

    found = run_sampler(sampler, value, jobs)
    assert len(found) == left == 2 * (9 + 3 + 1)
    by_rung = {rounds: sorted({x_value(point) for point in found if point.rounds == rounds}) for rounds in (1, 3, 9)}
    assert by_rung == {1: [*range(9)], 3: [4, 5, 6], 9: [5]}
    last = found[-1]
    assert sampler.previous(last) == Point(last.settings, last.seed, 3)
    assert sampler.previous(found[0]) is None and sampler.remaining() == []


def test_halving_never_promotes_a_candidate_with_a_failed_seed() -> None:
    sampler = Halving(candidates(9), [1, 2], [1, 3, 9], 3)
    found = run_sampler(sampler, lambda point: None if x_value(point) < 8 and point.seed == 2 else x_value(point))
    assert [(x_value(point), point.rounds) for point in found[18:]] == [(8, 3), (8, 3), (8, 9), (8, 9)]
    all_fail = run_sampler(Halving(candidates(9), [1], [1, 3], 3), lambda _: None)
    assert len(all_fail) == 9, "after a rung in which every candidate failed, the sampler ends"


def test_optuna_repeats_the_trials_of_its_file_and_then_proposes_new_ones(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = axes(["x=log(1e-4,1)", "y=a,b"])
    study = tmp_path / "study.jsonl"

    def value(point: Point) -> float | None:
        settings = dict(point.settings)
        if settings["y"] == "b":
            return None
        return abs(math.log10(float(settings["x"])) + 2)

    first = run_sampler(Optuna(space, [1, 2], 10, 1, study), value)
    assert len(first) == 20 and [point.seed for point in first] == [1, 2] * 10
    more = run_sampler(Optuna(space, [1, 2], 25, 1, study), value, jobs=3)
    assert more[:20] == first, "known trials come first, so that they are among the results"
    assert len(more) == 50 and len(study.read_text().splitlines()) == 25
    study.write_text(study.read_text() + '{"params": {"x"')
    assert run_sampler(Optuna(space, [1, 2], 26, 1, study), value)[:50] == more, "a truncated line is no trial"
    again = run_sampler(Optuna(space, [1, 2], 10, 1, tmp_path / "other.jsonl"), value)
    assert again == first, "the same seed gives the same proposals"
    longer = run_sampler(Optuna(space, [1, 2], 27, 1, study), value)
    assert longer[:52] == run_sampler(Optuna(space, [1, 2], 26, 1, study), value)


def test_optuna_proposes_values_near_the_best_more_often(tmp_path: Path) -> None:
    """The mean distance of uniform random draws from the optimum is 1."""
    pytest.importorskip("optuna")

    def distance(point: Point) -> float:
        return abs(math.log10(x_value(point)) + 2)

    found = run_sampler(Optuna(axes(["x=log(1e-4,1)"]), [None], 40, 1, tmp_path / "study.jsonl"), distance)
    assert sum(map(distance, found[20:])) / 20 < 0.7


def test_a_point_that_optuna_proposes_twice_is_run_once(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = run_sampler(Optuna(axes(["y=a,b"]), [None], 12, 1, tmp_path / "study.jsonl"), lambda _: 0.0, jobs=2)
    assert len(found) == 2 and len((tmp_path / "study.jsonl").read_text().splitlines()) == 12


def test_without_optuna_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'decentnode\[optuna\]'"):
        Optuna(axes(["y=a,b"]), [None], 2, 1, tmp_path / "study.jsonl")
