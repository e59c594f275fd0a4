"""The sampler knn: nodes that look for others with similar profiles."""

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
    """Returns 100 nodes, each with samples mostly of one label; the label of node u is u modulo 10."""
    every, draws = np.arange(NODES), np.random.default_rng(1)
    profiles = 0.1 * draws.dirichlet(np.ones(CLASSES), NODES)
    profiles[every, every % CLASSES] += 0.9
    config = KnnConfig.model_validate({"name": "knn", "view": 10, "exchange": 6, "refresh": 5, **options})
    return Population(NODES, config, Knn, profiles.astype(np.float32), (1, 12, 33))


def _share_with_own_label(population: Population) -> float:
    """Returns the share of targets with the node's own label."""
    pairs = [(uid, other) for uid, others in population.targets(1).items() for other in others]
    return float(np.mean([uid % CLASSES == other % CLASSES for uid, other in pairs]))


@pytest.fixture(scope="module")
def settled() -> Population:
    """A population after 20 rounds."""
    population = _population()
    population.run(20)
    return population


@pytest.mark.slow
def test_nodes_find_others_with_their_label(settled: Population) -> None:
    """Three of four targets have it; the fourth is random, and has it with a probability of one tenth."""
    assert _share_with_own_label(_population()) < 0.2 and _share_with_own_label(settled) > 0.75
    assert connected(settled.targets(10)) and settled.most_entries == 6


@pytest.mark.slow
@pytest.mark.parametrize(("options", "low", "high"), [({"prefer": "dissimilar"}, 0, 0.05),
                                                      ({"measure": "distance", "random": 0}, 0.95, 1)])  # fmt: skip
def test_nodes_find_dissimilar_nodes_or_use_the_distance_as_configured(
    options: dict[str, object], low: float, high: float
) -> None:
    population = _population(**options)
    population.run(12)
    assert low <= _share_with_own_label(population) <= high


@pytest.mark.slow
def test_targets_that_are_not_random_stay_the_same_between_two_refreshes(settled: Population) -> None:
    chosen = {uid: set(each[:4]) & set(each[4:]) for uid, each in settled.targets(2).items()}
    assert {len(each) for each in chosen.values()} <= {3, 4}


@pytest.mark.slow
def test_dead_nodes_disappear_from_the_views() -> None:
    population = _population(oldest=6)
    population.run(10)
    population.kill([uid for uid in population.samplers if uid % 3 == 0])
    assert population.dead_share() > 0.2
    population.run(24)
    assert population.dead_share() < 0.01 and population.undelivered > 0


@pytest.mark.slow
def test_a_run_that_continues_from_saved_states_equals_an_uninterrupted_one(settled: Population) -> None:
    other = _population()
    other.run(17)
    for uid, sampler in other.samplers.items():
        copy = Knn(other.config, sampler.around)
        copy.load_state_dict(sampler.state_dict())
        copy.profile = sampler.profile
        other.samplers[uid] = copy
    other.run(3)
    assert other.targets(3) == settled.targets(3)


def test_profiles_with_nan_are_refused() -> None:
    sampler = _population().samplers[0]
    entry = Entry(1, 0, np.full(CLASSES, np.nan, np.float32))
    with pytest.raises(PeerFault, match="finite"):
        shuffle_of(sampler, tables_of([entry], CLASSES), reply=False)


def test_similarities_by_cosine_and_by_distance() -> None:
    profiles = np.array([[1, 0], [0, 2], [3, 3]], np.float32)
    own = np.array([2, 0], np.float32)
    np.testing.assert_allclose(similarities(profiles, own, "cosine"), [1, 0, 2**-0.5], atol=1e-6)
    np.testing.assert_allclose(similarities(profiles, own, "distance"), [-1, -(8**0.5), -(10**0.5)], atol=1e-6)


def test_as_many_random_targets_as_the_degree_are_refused() -> None:
    with pytest.raises(ValueError, match="random must be below degree"):
        KnnConfig(name="knn", degree=2, random=2)
