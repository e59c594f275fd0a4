"""Which points are run in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from decentnode.errors import EnvironmentFault
from decentnode.sweeps.point import Point
from decentnode.sweeps.samplers import Halving, Listed, Optuna, Sampler, budgets
from decentnode.sweeps.space import Settings, axes


def walk(sampler: Sampler, value: Callable[[Point], float | None], jobs: int = 1) -> list[Point]:
    """All points in the order in which they are asked for, `jobs` of them at a time."""
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


def x_of(point: Point) -> float:
    return float(point.settings[0][1])


def test_a_list_has_all_seeds_of_all_points() -> None:
    sampler = Listed(candidates(2), [1, 2])
    assert sampler.remaining() == [None] * 4
    assert [(x_of(point), point.seed) for point in walk(sampler, lambda _: None)] == [(0, 1), (0, 2), (1, 1), (1, 2)]


@pytest.mark.parametrize(("rounds", "count", "eta", "least", "expected"), [
    (60, 9, 3, 1, [7, 20, 60]), (60, 8, 3, 1, [20, 60]), (60, 2, 3, 1, [60]), (60, 1000, 4, 10, [15, 60]),
    (1, 9, 3, 1, [1]), (2, 100, 2, 1, [1, 2]), (81, 81, 3, 1, [1, 3, 9, 27, 81]),
])  # fmt: skip
def test_rungs(rounds: int, count: int, eta: int, least: int, expected: Sequence[int]) -> None:
    assert budgets(rounds, count, eta, least) == expected


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_halving_lets_the_best_go_on(jobs: int) -> None:
    """Of two seeds the mean counts; here that of x = 5 is best, though one of its seeds is not."""
    sampler = Halving(candidates(9), [1, 2], [1, 3, 9], 3)
    left = len(sampler.remaining())

    def value(point: Point) -> float:
        assert point.seed is not None
        return abs(x_of(point) - 5) + (0.4 if point.seed == 1 else -0.4)

    found = walk(sampler, value, jobs)
    assert len(found) == left == 2 * (9 + 3 + 1)
    by_rung = {rounds: sorted({x_of(point) for point in found if point.rounds == rounds}) for rounds in (1, 3, 9)}
    assert by_rung == {1: [*range(9)], 3: [4, 5, 6], 9: [5]}
    last = found[-1]
    assert sampler.previous(last) == Point(last.settings, last.seed, 3)
    assert sampler.previous(found[0]) is None and sampler.remaining() == []


def test_a_candidate_that_fails_goes_no_further_and_all_others_may() -> None:
    sampler = Halving(candidates(9), [1, 2], [1, 3, 9], 3)
    found = walk(sampler, lambda point: None if x_of(point) < 8 and point.seed == 2 else x_of(point))
    assert [(x_of(point), point.rounds) for point in found[18:]] == [(8, 3), (8, 3), (8, 9), (8, 9)]
    assert len(walk(Halving(candidates(9), [1], [1, 3], 3), lambda _: None)) == 9, "none is left: it ends"


def test_optuna_learns_from_what_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = axes(["x=log(1e-4,1)", "y=a,b"])
    kept = tmp_path / "study.jsonl"

    def value(point: Point) -> float | None:
        settings = dict(point.settings)
        if settings["y"] == "b":
            return None
        return abs(math.log10(float(settings["x"])) + 2)

    first = walk(Optuna(space, [1, 2], 10, 1, kept), value)
    assert len(first) == 20 and [point.seed for point in first] == [1, 2] * 10
    more = walk(Optuna(space, [1, 2], 25, 1, kept), value, jobs=3)
    assert more[:20] == first, "what is known comes first, so that it is among the results"
    assert len(more) == 50 and len(kept.read_text().splitlines()) == 25
    kept.write_text(kept.read_text() + '{"params": {"x"')
    assert walk(Optuna(space, [1, 2], 26, 1, kept), value)[:50] == more, "a line that was cut off is no trial"
    again = walk(Optuna(space, [1, 2], 10, 1, tmp_path / "other.jsonl"), value)
    assert again == first, "one seed proposes the same"
    assert walk(Optuna(space, [1, 2], 27, 1, kept), value)[:52] == walk(Optuna(space, [1, 2], 26, 1, kept), value)


def test_optuna_proposes_what_is_better_more_often(tmp_path: Path) -> None:
    """Of random draws the mean distance is 1."""
    pytest.importorskip("optuna")

    def distance(point: Point) -> float:
        return abs(math.log10(x_of(point)) + 2)

    found = walk(Optuna(axes(["x=log(1e-4,1)"]), [None], 40, 1, tmp_path / "study.jsonl"), distance)
    assert sum(map(distance, found[20:])) / 20 < 0.7


def test_what_optuna_proposes_twice_is_run_once(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = walk(Optuna(axes(["y=a,b"]), [None], 12, 1, tmp_path / "study.jsonl"), lambda _: 0.0, jobs=2)
    assert len(found) == 2 and len((tmp_path / "study.jsonl").read_text().splitlines()) == 12


def test_without_optuna_the_word_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'decentnode\[optuna\]'"):
        Optuna(axes(["y=a,b"]), [None], 2, 1, tmp_path / "study.jsonl")
