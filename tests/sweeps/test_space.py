"""Keys of a sweep take lists and distributions, of which grid and draws make points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml

from decentnode.errors import UsageError
from decentnode.sweeps.space import Axis, Distribution, axes, draws, grid, parse_axis, short_names, short_values


def test_values_are_split_at_commas_outside_of_brackets_and_quotes() -> None:
    text = "sharing={name: topk, keep: 0.1}, full ,{name: stc, of: [1, 2]},'a,b'"
    assert parse_axis(text) == Axis("sharing", ("{name: topk, keep: 0.1}", "full", "{name: stc, of: [1, 2]}", "'a,b'"))


@pytest.mark.parametrize(("text", "message"), [
    ("lr", "KEY=VALUE"), ("=1", "KEY=VALUE"), ("a..b=1", "KEY=VALUE"), ("lr=", "must not be empty"),
    ("lr=1,,2", "must not be empty"), ("lr=1,1", "be given once"), ("lr=[1,2", "left open"), ("lr='1", "left open"),
    ("lr=lgo(1,2)", "did you mean 'log'"), ("lr=log(0,1)", "above 0"), ("lr=log(1)", "two numbers"),
    ("lr=uniform(2,1)", "lower number to a higher"), ("lr=int(1,2.5)", "whole numbers"),
    ("lr=uniform(1,inf)", "lower number to a higher"),
])  # fmt: skip
def test_text_that_is_neither_a_list_nor_a_distribution_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_axis(text)


def test_keys_that_change_together_have_a_list_for_each_combination() -> None:
    rule, rate = "sharing.name", "training.optimizer.lr"
    found = axes([f"{rule}, {rate}=[full,.1],[ choco , .05 ]", "graph.name=ring,star"])
    assert found[0].keys == (rule, rate) and found[0].values == ("[full, .1]", "[choco, .05]")
    assert grid(found)[1:3] == [((rule, "full"), (rate, ".1"), ("graph.name", "star")),
                                ((rule, "choco"), (rate, ".05"), ("graph.name", "ring"))]  # fmt: skip
    section, = grid(axes(["sharing,seed=[{name: topk, of: [1, 2]}, 3]"]))
    assert section == (("sharing", "{name: topk, of: [1, 2]}"), ("seed", "3"))
    from_program = axes({(rule, rate): [("full", 0.1), ("choco", 0.05)], "graph.name": ["ring", "star"]})
    assert [[yaml.safe_load(value) for _, value in each] for each in grid(from_program)[:2]] == [
        ["full", 0.1, "ring"], ["full", 0.1, "star"]]  # fmt: skip
    assert {each[0][1:] + each[1][1:] for each in draws(found, 30, 1)} == {("full", ".1"), ("choco", ".05")}


@pytest.mark.parametrize(("text", "message"), [
    ("a,b=[1,2],[3]", r"a list of 2, one for every key, got \[3\], which has 1"), ("a,b=1,2", "list of 2.*got '1'"),
    ("a,b=[1,2,3]", "which has 3"), ("a,b=[1,]", "must not be empty"), ("a,b=log(1,2)", "list of 2"),
    ("a,b=[1,2],[1, 2]", "be given once"), ("a,=[1,2]", "KEY,KEY="), ("a,a=[1,2]", "given twice"),
    ("a,a.b=[1,2]", "sets what"),
])  # fmt: skip
def test_lists_that_do_not_fit_the_keys_that_change_together_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        axes([text])
    if text == "a,b=[1,2],[3]":
        with pytest.raises(UsageError, match=message):
            axes({("a", "b"): [(1, 2), (3,)]})


def test_axes_that_set_the_same_key_are_refused() -> None:
    with pytest.raises(UsageError, match="sets what"):
        axes(["sharing={name: full},{name: choco}", "sharing.name=full,choco"])
    with pytest.raises(UsageError, match="given twice"):
        axes(["seed=1", "seed=2"])


def test_axes_from_a_program_take_values_of_any_plain_type() -> None:
    found = axes({"a.lr": np.array([0.1, 1e-5]), "b": [None, True, "1", {"name": "x"}], "c": "int(1, 3)"})
    assert [yaml.safe_load(value) for value in found[0].values] == [0.1, 1e-5]
    assert [yaml.safe_load(value) for value in found[1].values] == [None, True, "1", {"name": "x"}]
    assert found[2].distribution == Distribution("int", 1, 3)
    for wrong in ([object()], [], [1, 1], 3, {"x": 1}):
        with pytest.raises(UsageError, match="grid"):
            axes({"a": wrong})


def test_a_grid_has_every_combination_once() -> None:
    found = grid(axes(["a=1,2", "b=x,y,z"]))
    assert found[:4] == [(("a", "1"), ("b", "x")), (("a", "1"), ("b", "y")), (("a", "1"), ("b", "z")),
                         (("a", "2"), ("b", "x"))]  # fmt: skip
    assert len({*found}) == len(found) == 6 and grid(()) == [()]
    with pytest.raises(UsageError, match="is a distribution"):
        grid(axes(["a=log(1,2)"]))


@pytest.mark.parametrize("text", ["uniform(-2,3)", "log(1e-4,10)", "int(-1,2)", "logint(1,100)"])
def test_draws_lie_in_their_bounds_and_reach_them(text: str) -> None:
    dist = parse_axis(f"a={text}").distribution
    assert dist is not None
    rng = np.random.default_rng(1)
    values = [float(yaml.safe_load(dist.draw(rng))) for _ in range(2000)]
    assert dist.low <= min(values) and max(values) <= dist.high
    spread = math.log(dist.high / dist.low) if dist.kind.startswith("log") else dist.high - dist.low
    edge = math.log(min(values) / dist.low) if dist.kind.startswith("log") else min(values) - dist.low
    assert edge <= 0.02 * spread
    if dist.kind.endswith("int"):
        assert {dist.low, dist.high} <= {*values} and all(value == round(value) for value in values)


def test_an_int_distribution_draws_every_number_equally_often() -> None:
    dist, rng = Distribution("int", 1, 4), np.random.default_rng(1)
    counts = np.bincount([int(dist.draw(rng)) for _ in range(4000)])[1:]
    assert counts.min() > 900


def test_the_median_of_a_log_distribution_is_the_geometric_mean_of_its_bounds() -> None:
    assert float(Distribution("log", 1e-4, 1.0).text(0.5)) == pytest.approx(1e-2)


def test_more_draws_of_the_same_seed_begin_with_the_same_points() -> None:
    space = axes(["a=log(1e-3,1)", "b=x,y"])
    few, many = draws(space, 5, seed=3), draws(space, 50, seed=3)
    assert many[: len(few)] == few and draws(space, 5, seed=4) != few
    assert len(draws(axes(["b=x,y"]), 20, seed=1)) == 2, "a repeated draw is no new point"


def test_short_names_of_keys_are_the_shortest_that_differ() -> None:
    keys = ["training.optimizer.lr", "graph.name", "data.partition.name", "a.lr.b", "data.name"]
    assert short_names(keys) == {"training.optimizer.lr": "lr", "graph.name": "graph", "a.lr.b": "b",
                                 "data.partition.name": "partition", "data.name": "data"}  # fmt: skip
    assert short_names(["a.lr", "b.lr"]) == {"a.lr": "a.lr", "b.lr": "b.lr"}


def test_short_values_of_sections_show_the_name_and_the_keys_that_differ() -> None:
    values = ["{name: full}", "{name: topk, fraction: 0.1}", "{name: topk, fraction: .2, full_from: 1}", "choco", ".1"]
    names = ["full", "topk fraction=0.1", "topk fraction=0.2 full_from=1", "choco", ".1"]
    assert short_values(values) == dict(zip(values, names, strict=True))
    assert short_values(["{lr: 1}", "{lr: 2}"]) == {"{lr: 1}": "lr=1", "{lr: 2}": "lr=2"}
    alike = ["full", "{name: full}"]
    assert short_values(alike) == dict(zip(alike, alike, strict=True)), "no two values get one name"
