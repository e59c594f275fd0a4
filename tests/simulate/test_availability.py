"""When nodes are present, compared with a simulation in steps of a hundredth of a second."""

from __future__ import annotations

import numpy as np
import pytest

from decentnode.errors import DataError
from decentnode.experiment.virtual_time import ChurnConfig
from decentnode.simulate.timeline.availability import Availability, Intervals, draw_availability

STEP = 0.01
NODES: list[Intervals] = [[(0.0, 1.0), (2.0, 2.5)], [(0.5, 4.0)], [(0.0, 3.0)], [(1.0, 1.25), (1.5, 2.0), (2.75, 3.0)]]
PERIODS = [3.0, 4.0, 3.0, 3.5]


def is_present(node: int, time: float) -> bool:
    within = time % PERIODS[node]
    return any(a <= within < b for a, b in NODES[node])


def finish_work(node: int, begin: float, seconds: float) -> float:
    """Returns when a node finishes work of so many seconds, which rests while the node is away."""
    tick = round(begin / STEP)
    left = seconds
    while left > 1e-9:
        left -= STEP * is_present(node, (tick + 0.5) * STEP)
        tick += 1
    return tick * STEP


@pytest.mark.parametrize("begin", [0.0, 0.3, 0.99, 1.0, 2.2, 7.13, 25.5])
@pytest.mark.parametrize("seconds", [0.2, 1.0, 1.5, 3.5, 11.3])
def test_work_proceeds_only_while_a_node_is_present(begin: float, seconds: float) -> None:
    found = Availability(NODES, PERIODS).finish_work(np.full(4, begin), np.full(4, seconds))
    assert found.tolist() == pytest.approx([finish_work(node, begin, seconds) for node in range(4)], abs=2 * STEP)


def test_present_and_next_available_agree_with_the_intervals() -> None:
    availability = Availability(NODES, PERIODS)
    for time in np.arange(0.005, 15, 0.13):
        times = np.full(4, time)
        assert availability.present(times).tolist() == [is_present(node, time) for node in range(4)]
        back = availability.next_available(times)
        for node in range(4):
            if is_present(node, time):
                assert back[node] == time
            else:
                assert is_present(node, back[node] + 1e-6) and not is_present(node, back[node] - 1e-6)
                assert back[node] > time


def test_work_of_zero_seconds_takes_no_time_and_a_node_that_is_never_present_is_refused() -> None:
    assert Availability(NODES, PERIODS).finish_work(np.full(4, 1.7), np.zeros(4)).tolist() == [1.7] * 4
    with pytest.raises(DataError, match="node 1 is never available"):
        Availability([[(0, 1)], [(5, 6)]], [3, 3])


def test_drawn_times_have_their_means_and_repeat_with_the_seed() -> None:
    found = draw_availability(ChurnConfig(up_seconds=30, away_seconds=10), 200, seed=3)
    times = np.random.default_rng(0).uniform(0, 1e5, 60)
    share = np.mean([found.present(np.full(200, time)).mean() for time in times])
    assert share == pytest.approx(0.75, abs=0.03)
    again = draw_availability(ChurnConfig(up_seconds=30, away_seconds=10), 200, seed=3)
    assert (found.present(np.full(200, 7.0)) == again.present(np.full(200, 7.0))).all()
