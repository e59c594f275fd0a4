"""The sampler cyclon: in-degrees, connectivity and randomness of the views, dead nodes, checkpoints, bad messages."""

from __future__ import annotations

import numpy as np
import pytest

from decentnode.errors import PeerFault
from decentnode.samplers.base import Entry, Shuffle, Surroundings
from decentnode.samplers.cyclon import Cyclon, CyclonConfig
from decentnode.samplers.messages import shuffle_of, tables_of
from tests.samplers.population import Population, connected


@pytest.fixture(scope="module")
def shuffled() -> Population:
    """200 nodes on a circle, after 40 rounds."""
    population = Population(200, CyclonConfig(name="cyclon", view=12, exchange=6))
    population.run(40)
    return population


@pytest.mark.slow
def test_every_node_is_known_to_about_the_same_number_of_nodes(shuffled: Population) -> None:
    """In a random graph the standard deviation would be the root of the mean, 3.5."""
    degrees = shuffled.in_degrees()
    assert degrees.mean() > 11.5 and degrees.std() < 2.5 and degrees.min() >= 4
    assert shuffled.most_entries == 6


@pytest.mark.slow
def test_the_targets_of_three_rounds_connect_all_nodes(shuffled: Population) -> None:
    assert connected(shuffled.targets(3))
    one, two = shuffled.targets(1), shuffled.targets(2)
    assert {len(each) for each in one.values()} == {4} and all(uid not in each for uid, each in one.items())
    assert sum(one[uid] == two[uid][4:] for uid in one) < 5


@pytest.mark.slow
def test_views_become_random(shuffled: Population) -> None:
    """The mean distance on the circle to a random one of 200 nodes is a quarter of 200. At the beginning views have
    direct neighbors only."""
    apart = [min((uid - other) % 200, (other - uid) % 200)
             for uid, sampler in shuffled.samplers.items() for other in sampler.known()]  # fmt: skip
    assert np.mean(apart) == pytest.approx(50, abs=3)


@pytest.mark.slow
def test_dead_nodes_disappear_from_the_views_and_the_living_stay_connected() -> None:
    population = Population(120, CyclonConfig(name="cyclon", view=12, exchange=6))
    population.run(25)
    population.kill(range(0, 120, 2))
    assert population.dead_share() > 0.4
    population.run(30)
    assert population.undelivered > 0 and population.dead_share() < 0.02
    assert connected({uid: tuple(sampler.known()) for uid, sampler in population.samplers.items()})


def test_a_node_whose_view_is_empty_asks_its_first_contacts() -> None:
    sampler = Cyclon(CyclonConfig(name="cyclon"), Surroundings(0, 9, (3, 4), 1))
    asked = {uid for r in range(5) for uid in sampler.begin(r)}  # nobody answers
    assert asked == {3, 4}


@pytest.mark.slow
def test_a_run_that_continues_from_saved_states_equals_an_uninterrupted_one(shuffled: Population) -> None:
    again = Population(200, shuffled.config)
    again.run(20)
    for uid, sampler in again.samplers.items():
        copy = Cyclon(again.config, sampler.around)
        copy.load_state_dict(sampler.state_dict())
        again.samplers[uid] = copy
    again.run(20)
    for uid, sampler in again.samplers.items():
        assert sampler.known().keys() == shuffled.samplers[uid].known().keys()
        assert sampler.targets(40) == shuffled.samplers[uid].targets(40)


def test_an_unrequested_reply_does_not_change_the_view() -> None:
    sampler = Cyclon(CyclonConfig(name="cyclon", view=2, exchange=2), Surroundings(0, 9, (3, 4), 1))
    assert sampler.receive(5, Shuffle(True, (Entry(5, 0), Entry(6, 0))), 0) is None
    assert set(sampler.known()) == {3, 4}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry(k, 0) for k in range(9)], "at most 8"), ([Entry(1, 0), Entry(1, 3)], "different nodes"),
        ([Entry(20, 0)], "below 20"), ([Entry(-1, 0)], "below 20"), ([Entry(1, -1)], "ages"),
        ([Entry(1, 1 << 40)], "ages"), ([Entry(1, 0, np.ones(3, np.float32))], "profiles"),
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(entries: list[Entry], message: str) -> None:
    sampler = Cyclon(CyclonConfig(name="cyclon"), Surroundings(0, 20, (1,), 1))
    with pytest.raises(PeerFault, match=message):
        shuffle_of(sampler, tables_of(entries, len(entries[0].profile)), reply=False)


def test_exchange_larger_than_view_is_refused() -> None:
    with pytest.raises(ValueError, match="at most view"):
        CyclonConfig(name="cyclon", view=4, exchange=5)
