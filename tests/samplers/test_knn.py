"""Nodes that look for others like them."""

from __future__ import annotations

import numpy as np
import pytest

from decentnode.errors import PeerFault
from decentnode.samplers.base import Entry
from decentnode.samplers.knn import Knn, KnnConfig, similarities
from decentnode.samplers.messages import shuffle_of, tables_of
from tests.samplers.population import Population, connected

CLASSES, NODES = 10, 100


def _population(**options: object) -> Population:
    """Of 100 nodes, each with samples of one label and a few of others; node u's label is u modulo 10."""
    every, draws = np.arange(NODES), np.random.default_rng(1)
    profiles = 0.1 * draws.dirichlet(np.ones(CLASSES), NODES)
    profiles[every, every % CLASSES] += 0.9
    config = KnnConfig.model_validate({"name": "knn", "view": 10, "exchange": 6, "refresh": 5, **options})
    return Population(NODES, config, Knn, profiles.astype(np.float32), (1, 12, 33))


def _alike(population: Population) -> float:
    """The share of targets with the node's own label."""
    pairs = [(uid, other) for uid, others in population.targets(1).items() for other in others]
    return float(np.mean([uid % CLASSES == other % CLASSES for uid, other in pairs]))


@pytest.fixture(scope="module")
def settled() -> Population:
    """After 20 rounds."""
    population = _population()
    population.run(20)
    return population


@pytest.mark.slow
def test_nodes_find_those_with_their_label(settled: Population) -> None:
    """Three of four targets; the fourth is drawn, and one of ten has the label by chance."""
    assert _alike(_population()) < 0.2 and _alike(settled) > 0.75
    assert connected(settled.targets(10)) and settled.longest == 6


@pytest.mark.slow
@pytest.mark.parametrize(("options", "low", "high"), [({"prefer": "dissimilar"}, 0, 0.05),
                                                      ({"measure": "distance", "random": 0}, 0.95, 1)])  # fmt: skip
def test_or_by_other_measures_or_those_without_it(options: dict[str, object], low: float, high: float) -> None:
    population = _population(**options)
    population.run(12)
    assert low <= _alike(population) <= high


@pytest.mark.slow
def test_targets_that_are_not_drawn_stay_between_two_refreshes(settled: Population) -> None:
    chosen = {uid: set(each[:4]) & set(each[4:]) for uid, each in settled.targets(2).items()}
    assert {len(each) for each in chosen.values()} <= {3, 4}


@pytest.mark.slow
def test_the_dead_are_looked_for_no_more() -> None:
    population = _population(oldest=6)
    population.run(10)
    population.kill([uid for uid in population.samplers if uid % 3 == 0])
    assert population.dead_share() > 0.2
    population.run(24)
    assert population.dead_share() < 0.01 and population.lost > 0


@pytest.mark.slow
def test_the_state_is_all_that_there_is(settled: Population) -> None:
    other = _population()
    other.run(17)
    for uid, sampler in other.samplers.items():
        copy = Knn(other.config, sampler.around)
        copy.load_state_dict(sampler.state_dict())
        copy.profile = sampler.profile
        other.samplers[uid] = copy
    other.run(3)
    assert other.targets(3) == settled.targets(3)


def test_profiles_that_are_no_numbers_are_refused() -> None:
    sampler = _population().samplers[0]
    entry = Entry(1, 0, np.full(CLASSES, np.nan, np.float32))
    with pytest.raises(PeerFault, match="finite"):
        shuffle_of(sampler, tables_of([entry], CLASSES), reply=False)


def test_likeness() -> None:
    profiles = np.array([[1, 0], [0, 2], [3, 3]], np.float32)
    own = np.array([2, 0], np.float32)
    np.testing.assert_allclose(similarities(profiles, own, "cosine"), [1, 0, 2**-0.5], atol=1e-6)
    np.testing.assert_allclose(similarities(profiles, own, "distance"), [-1, -(8**0.5), -(10**0.5)], atol=1e-6)


def test_some_target_is_left_to_choose() -> None:
    with pytest.raises(ValueError, match="random must be below degree"):
        KnnConfig(name="knn", degree=2, random=2)
