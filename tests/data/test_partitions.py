from __future__ import annotations

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

from .contract import check_seed_matters, check_split


def make(name: str, **keys: Any) -> Partition:
    chosen = load_class(name, PARTITIONS, "partition")
    found: Partition = chosen(chosen.Config.model_validate({"name": name, **keys}))
    return found


def labels(count: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 16])
@pytest.mark.parametrize("name", PARTITIONS)
def test_contract(name: str, num_nodes: int) -> None:
    targets, keys = labels(1437), labels(1437, 40, seed=1)
    covers = name != "k_classes" or num_nodes * 2 >= 10
    check_split(make(name), targets, num_nodes, covers, keys)
    if num_nodes > 1:
        check_seed_matters(make(name), targets, num_nodes, keys)


@pytest.mark.parametrize("name", PARTITIONS)
def test_too_few_samples_name_the_node_that_goes_empty(name: str) -> None:
    with pytest.raises(DataError, match="node 5 would get no training sample: 5 samples for 6 nodes; use fewer nodes"):
        make(name).split(labels(5), 6, np.random.default_rng(0), np.arange(5))


@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_sizes(num_nodes: int, count: int, classes: int, seed: int) -> None:
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


def test_shards_give_few_classes() -> None:
    targets = np.repeat(np.arange(10), 100)
    parts = check_split(make("shards", shards=2), targets, 10)
    assert {len(part) for part in parts} == {100}
    assert all(len(np.unique(targets[part])) <= 2 for part in parts)
    with pytest.raises(DataError, match=r"partition\.shards must be at most 2 .*, got 3"):
        make("shards", shards=3).split(labels(10), 4, np.random.default_rng(0))


@pytest.mark.parametrize("num_nodes, each", [(16, 2), (10, 1), (7, 3), (3, 10), (100, 2)])
def test_k_classes_are_exact_and_even(num_nodes: int, each: int) -> None:
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


def test_dirichlet_is_balanced() -> None:
    """A node above N/n gets no more, so that none exceeds N/n by more than one class."""
    targets = np.repeat(np.arange(10), 100)
    for seed in range(20):
        parts = make("dirichlet", alpha=0.1, min_samples=1).split(targets, 8, np.random.default_rng(seed))
        assert max(len(part) for part in parts) <= 1000 / 8 + 100


def test_dirichlet_of_the_extreme_alphas() -> None:
    targets = np.repeat(np.arange(10), 100)
    check_split(make("dirichlet", alpha=1e-9, min_samples=1), targets, 4)
    check_split(make("dirichlet", alpha=1e9), targets, 16)


def test_dirichlet_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"partition\.min_samples must be at most 6 .* got 7"):
        make("dirichlet", min_samples=7).split(labels(100), 16, np.random.default_rng(0))
    message = r"node \d+ would get \d+ training samples, .*raise partition\.alpha \(now 0\.01\)"
    with pytest.raises(DataError, match=message):
        make("dirichlet", alpha=0.01, min_samples=6).split(np.repeat([0, 1], 50), 16, np.random.default_rng(0))
    with pytest.raises(pydantic.ValidationError, match="greater than 0"):
        make("dirichlet", alpha=0)


def test_keys_stay_whole_and_even() -> None:
    keys = np.repeat(np.arange(100) * 7, 10)
    parts = check_split(make("by_key"), labels(1000), 9, keys=keys)
    owners = [set(keys[part]) for part in parts]
    assert sum(map(len, owners)) == 100 == len(set.union(*owners))
    assert np.ptp([len(part) for part in parts]) <= 10
    with pytest.raises(DataError, match="node 3 would get no training sample: 3 keys for 5 nodes"):
        make("by_key").split(labels(30), 5, np.random.default_rng(0), np.arange(30) % 3)
