from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from decentnode.config.component import load_class
from decentnode.data import PARTITIONS
from decentnode.data.base import Partition
from decentnode.errors import DataError
from decentnode.experiment import load

from .contract import check_seed_matters, check_split


def make(name: str, **keys: Any) -> Partition:
    chosen = load_class(name, PARTITIONS, "partition")
    found: Partition = chosen(chosen.Config.model_validate({"name": name, **keys}))
    return found


def labels(count: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count)


CHECKED: list[tuple[str, dict[str, Any], Callable[[int], bool]]] = [
    *((name, {}, lambda n: True) for name in PARTITIONS if name != "k_classes"),
    ("k_classes", {}, lambda n: n * 2 >= 10),
    ("dirichlet", {"balanced": False}, lambda n: True),
    ("by_key", {"even": "keys"}, lambda n: True),
    ("by_key", {"even": "keys", "order": "ascending"}, lambda n: True),
    ("by_key", {"keys_per_node": 2}, lambda n: n * 2 >= 40),
]
"""(name, keys of the section, whether it deals all samples to n nodes), for samples of 10 classes and 40 keys."""
FIXED = {"ordered"}
"""Partitions that do not depend on the seed."""


def test_all_partitions_are_checked() -> None:
    assert {name for name, _, _ in CHECKED} == set(PARTITIONS)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 16])
@pytest.mark.parametrize("name, section, covers", CHECKED, ids=lambda value: None if callable(value) else str(value))
def test_contract(name: str, section: dict[str, Any], covers: Callable[[int], bool], num_nodes: int) -> None:
    targets, keys = labels(1437), labels(1437, 40, seed=1)
    check_split(make(name, **section), targets, num_nodes, covers(num_nodes), keys)
    if num_nodes > 1 and name not in FIXED and "order" not in section:
        check_seed_matters(make(name, **section), targets, num_nodes, keys)


@pytest.mark.parametrize("name", PARTITIONS)
def test_too_few_samples_are_an_error_that_names_the_empty_node(name: str) -> None:
    with pytest.raises(DataError, match="node 5 would get no training sample: 5 samples for 6 nodes; use fewer nodes"):
        make(name).split(labels(5), 6, np.random.default_rng(0), np.arange(5))


@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_partitions_of_any_sizes_are_valid(num_nodes: int, count: int, classes: int, seed: int) -> None:
    assume(count >= num_nodes)
    targets = labels(count, classes, seed)
    sizes = [len(part) for part in check_split(make("iid"), targets, num_nodes)]
    assert max(sizes) - min(sizes) <= 1
    check_split(make("shards", shards=1), targets, num_nodes)
    if count > 5 * num_nodes:  # otherwise a Dirichlet may find no draw that gives every node something
        check_split(make("dirichlet", alpha=1.0, min_samples=1), targets, num_nodes)
    keys = labels(count, 30, seed + 1)
    if len(np.unique(keys)) >= num_nodes:
        check_split(make("by_key"), targets, num_nodes, keys=keys)


def test_shards_give_each_node_few_classes() -> None:
    targets = np.repeat(np.arange(10), 100)
    parts = check_split(make("shards", shards=2), targets, 10)
    assert {len(part) for part in parts} == {100}
    assert all(len(np.unique(targets[part])) <= 2 for part in parts)
    with pytest.raises(DataError, match=r"partition\.shards must be at most 2 .*, got 3"):
        make("shards", shards=3).split(labels(10), 4, np.random.default_rng(0))


@pytest.mark.parametrize("num_nodes, each", [(16, 2), (10, 1), (7, 3), (3, 10), (100, 2)])
def test_k_classes_gives_each_node_exactly_k_classes(num_nodes: int, each: int) -> None:
    targets = np.repeat(np.arange(10), 60)
    parts = check_split(make("k_classes", classes=each), targets, num_nodes, covers=num_nodes * each >= 10)
    held = np.array([np.bincount(targets[part], minlength=10) > 0 for part in parts])
    assert (held.sum(1) == each).all()
    assert np.ptp(held.sum(0)) <= 1
    with pytest.raises(DataError, match=r"partition\.classes must be at most 10, .* got 11"):
        make("k_classes", classes=11).split(targets, num_nodes, np.random.default_rng(0))


def test_k_classes_with_a_rare_class_names_the_empty_node() -> None:
    targets = np.array([0] * 50 + [1])
    with pytest.raises(DataError, match=r"node \d+ would get no training sample; .* raise partition\.classes"):
        make("k_classes", classes=1).split(targets, 8, np.random.default_rng(0))


def test_dirichlet_skew_follows_alpha() -> None:
    targets = np.repeat(np.arange(10), 600)

    def skew(alpha: float) -> float:
        """Mean share of a node's most frequent class."""
        parts = check_split(make("dirichlet", alpha=alpha), targets, 20)
        assert min(len(part) for part in parts) >= 10
        return float(np.mean([np.bincount(targets[part]).max() / len(part) for part in parts]))

    skews = [skew(alpha) for alpha in (0.05, 0.5, 5.0, 500.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.6 and skews[-1] < 0.13


def test_balanced_dirichlet_bounds_the_share_of_a_node() -> None:
    """A node above N/n gets no more, so that none exceeds N/n by more than one class."""
    targets = np.repeat(np.arange(10), 100)
    for seed in range(20):
        parts = make("dirichlet", alpha=0.1, min_samples=1).split(targets, 8, np.random.default_rng(seed))
        assert max(len(part) for part in parts) <= 1000 / 8 + 100


def test_dirichlet_with_extreme_alphas() -> None:
    targets = np.repeat(np.arange(10), 100)
    check_split(make("dirichlet", alpha=1e-9, min_samples=1), targets, 4)
    check_split(make("dirichlet", alpha=1e9), targets, 16)


def test_impossible_dirichlet_partitions_are_refused() -> None:
    with pytest.raises(DataError, match=r"partition\.min_samples must be at most 6 .* got 7"):
        make("dirichlet", min_samples=7).split(labels(100), 16, np.random.default_rng(0))
    message = r"node \d+ would get \d+ training samples, .*raise partition\.alpha \(now 0\.01\)"
    with pytest.raises(DataError, match=message):
        make("dirichlet", alpha=0.01, min_samples=6).split(np.repeat([0, 1], 50), 16, np.random.default_rng(0))
    with pytest.raises(pydantic.ValidationError, match="greater than 0"):
        make("dirichlet", alpha=0)


def test_by_key_keeps_keys_whole_and_shares_even() -> None:
    keys = np.repeat(np.arange(100) * 7, 10)
    parts = check_split(make("by_key"), labels(1000), 9, keys=keys)
    owners = [set(keys[part]) for part in parts]
    assert sum(map(len, owners)) == 100 == len(set.union(*owners))
    assert np.ptp([len(part) for part in parts]) <= 10
    with pytest.raises(DataError, match="node 3 would get no training sample: 3 keys for 5 nodes"):
        make("by_key").split(labels(30), 5, np.random.default_rng(0), np.arange(30) % 3)


def test_by_key_deals_equal_numbers_of_keys() -> None:
    keys = np.repeat(np.arange(10), [1, 50, 1, 1, 1, 1, 1, 1, 1, 1])
    parts = check_split(make("by_key", even="keys"), labels(59), 3, keys=keys)
    assert sorted(len(set(keys[part])) for part in parts) == [3, 3, 4]
    parts = check_split(make("by_key", even="keys", order="ascending"), labels(59), 3, keys=keys)
    assert [sorted(set(keys[part])) for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    parts = check_split(make("by_key", keys_per_node=2), labels(59), 3, covers=False, keys=keys)
    assert [len(set(keys[part])) for part in parts] == [2, 2, 2]
    parts = check_split(make("by_key", keys_per_node=1, order="ascending"), labels(59), 3, covers=False, keys=keys)
    assert [set(keys[part]) for part in parts] == [{0}, {1}, {2}]
    with pytest.raises(DataError, match=r"node 2 would .* 10 keys for 3 nodes with partition\.keys_per_node = 4; use "):
        make("by_key", keys_per_node=4).split(labels(59), 3, np.random.default_rng(0), keys)
    with pytest.raises(pydantic.ValidationError, match="must have even: keys, or keys_per_node, with order: ascending"):
        make("by_key", order="ascending")


def test_only_local_deals_all_samples_on_every_machine_alike() -> None:
    partition = make("only_local", within={"name": "dirichlet", "alpha": 0.5})
    partition.set_machines([(0, 1, 2), (3, 4, 5), (6, 7)])
    targets = labels(600)
    parts = partition.split(targets, 8, np.random.default_rng(3))
    for uids in ([0, 1, 2], [3, 4, 5], [6, 7]):
        assert np.array_equal(np.sort(np.concatenate([parts[uid] for uid in uids])), np.arange(600))
    assert all(np.array_equal(parts[uid], parts[uid + 3]) for uid in range(3))
    alone = make("dirichlet", alpha=0.5).split(targets, 3, np.random.default_rng(3))
    assert all(np.array_equal(a, b) for a, b in zip(parts, alone, strict=False))
    partition.set_machines([(0, 1)])
    with pytest.raises(DataError, match="only_local needs a mapping of 8 nodes, got one of 2"):
        partition.split(targets, 8, np.random.default_rng(3))


def test_only_local_follows_the_mapping() -> None:
    overrides = ["data.partition=only_local", "graph={name: ring, nodes: 4}",
                 "mapping={machines: 2, nodes_per_machine: 2, addresses: [127.0.0.1, 127.0.0.2]}"]  # fmt: skip
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    parts = load(quickstart, overrides).open_data().shares()
    assert [len(parts[uid]) for uid in range(4)] == [719, 718] * 2 and np.array_equal(parts[1], parts[3])


def test_fractions_and_ordered_give_the_requested_sizes() -> None:
    parts = check_split(make("fractions", fractions=[0.5, 0.3, 0.2]), labels(999), 3)
    assert [len(part) for part in parts] == [500, 299, 200]  # ends at 499.5, 799.2 and 999
    thirds = check_split(make("fractions", fractions=[1 / 3] * 3), labels(100), 3)
    assert sum(map(len, thirds)) == 100  # 3 / 3 is .9999 in floats, and yet nothing is left out
    some = check_split(make("fractions", fractions=[0.1, 0.2]), labels(100), 2, covers=False)
    assert [len(part) for part in some] == [10, 20]
    ordered = check_split(make("ordered", fractions=[0.25, 0.5]), labels(100), 2, covers=False)
    assert np.array_equal(np.concatenate(ordered), np.arange(75)) and len(ordered[0]) == 25
    equal = check_split(make("ordered"), labels(10), 3)
    assert [part.tolist() for part in equal] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("fractions, problem", [
    ([0.5, 0.5], "must name 3 fractions, one per node, got 2"),
    ([0.5, 0.5, 0.1], r"must add up to at most 1, got 1\.1"),
    ([0.5, 0.001, 0.4], r"node 1 would get no training sample; its fraction is too small: raise it in partition\.frac"),
])
def test_invalid_fractions_are_refused(fractions: list[float], problem: str) -> None:
    for name in ("fractions", "ordered"):
        with pytest.raises(DataError, match=problem):
            make(name, fractions=fractions).split(labels(20), 3, np.random.default_rng(0))


def deal_as_hsu(alpha: float, num_nodes: int, generator: np.random.Generator) -> np.ndarray:
    """Returns counts [nodes, classes] as Hsu et al. deal 10 classes of 5,000: each node draws its class shares."""
    left, size = np.full(10, 5000), 50_000 // num_nodes
    counts = np.zeros((num_nodes, 10), np.int64)
    for mine in counts:
        wanted = generator.dirichlet(np.full(10, alpha))
        while (missing := size - mine.sum()) > 0:
            shares = np.where(left > 0, wanted, 0.0)
            shares = shares if shares.sum() > 0 else (left > 0).astype(float)
            taken = np.minimum(generator.multinomial(missing, shares / shares.sum()), left)
            mine += taken
            left -= taken
    return counts


@pytest.mark.slow
def test_the_table_in_the_docs_compares_dirichlet_with_hsu() -> None:
    """Checks the table in docs/howto/data.rst: the total variation distance of a node's labels from all labels."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "data.rst").read_text()
    targets = np.repeat(np.arange(10), 5000)

    def skew(counts: np.ndarray) -> float:
        return float(np.abs(counts / counts.sum(1, keepdims=True) - 0.1).sum(1).mean() / 2)

    for alpha in (0.1, 0.5, 1.0):
        found = []
        for balanced in (True, False):
            skews, smallest, largest = [], [], []
            for seed in range(20):
                parts = make("dirichlet", alpha=alpha, balanced=balanced, min_samples=1).split(
                    targets, 16, np.random.default_rng(seed))
                skews.append(skew(np.array([np.bincount(targets[part], minlength=10) for part in parts])))
                smallest.append(min(map(len, parts)))
                largest.append(max(map(len, parts)))
            found.append(float(np.mean(skews)))
            row = f"{found[-1]:.2f}         {np.median(smallest):,.0f} to {np.median(largest):,.0f}"
            assert row in page, (alpha, balanced, row)
        hsu = float(np.mean([skew(deal_as_hsu(alpha, 16, np.random.default_rng(seed))) for seed in range(20)]))
        assert f"{hsu:.2f}         3,125 to 3,125" in page
        assert abs(found[0] - hsu) < 0.03 < hsu - found[1] + 0.01
