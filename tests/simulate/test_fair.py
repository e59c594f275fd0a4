"""Max-min fair shares: against their definition, and against a simulation in small steps of time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentnode.simulate.timeline import fluid
from decentnode.simulate.timeline.fair import fair_rates
from decentnode.simulate.timeline.fluid import FairSharing, Fluid


@st.composite
def networks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    resources, flows = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    uses = draw(st.lists(st.lists(st.integers(-1, resources - 1), min_size=2, max_size=2, unique=True),
                         min_size=flows, max_size=flows))  # fmt: skip
    capacity = draw(st.lists(st.floats(0.5, 8), min_size=resources, max_size=resources))
    most = draw(st.lists(st.one_of(st.just(np.inf), st.floats(0.1, 4)), min_size=flows, max_size=flows))
    return np.array(uses), np.array(capacity), np.array(most)


@given(networks())
def test_every_flow_is_limited_by_its_own_maximum_or_a_full_resource_on_which_no_flow_has_more(
    network: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    uses, capacity, most = network
    rates = fair_rates(uses, capacity, most)
    load = np.zeros(capacity.size)
    for flow, resources_of_flow in enumerate(uses):
        for r in resources_of_flow[resources_of_flow >= 0]:
            load[r] += rates[flow]
    assert (load <= capacity * (1 + 1e-6)).all()
    for flow, resources_of_flow in enumerate(uses):
        held = rates[flow] >= most[flow] * (1 - 1e-6)
        for r in resources_of_flow[resources_of_flow >= 0]:
            others = rates[(uses == r).any(axis=1)]
            held |= load[r] >= capacity[r] * (1 - 1e-6) and rates[flow] >= others.max() * (1 - 1e-6)
        assert held or (resources_of_flow < 0).all()


def ends_in_small_time_steps(
    uses: np.ndarray, capacity: np.ndarray, work: np.ndarray, begins: np.ndarray
) -> np.ndarray:
    left, ends, now, step = work.copy(), np.full(work.size, np.nan), 0.0, 2e-4
    while np.isnan(ends).any():
        active = np.flatnonzero((begins <= now + 1e-12) & (left > 0))
        if active.size:
            rate = fair_rates(uses[active], capacity, np.full(active.size, np.inf))
            left[active] -= rate * step
            ends[active[left[active] <= 0]] = now + step
        now += step
    return ends


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(4))
def test_flows_that_begin_at_different_times_end_as_in_a_simulation_in_small_steps(seed: int) -> None:
    draws = np.random.default_rng(seed)
    uses = np.stack([draws.integers(0, 2, 6), draws.integers(2, 4, 6)], axis=1)
    capacity, work, begins = draws.uniform(5, 20, 4), draws.uniform(0.5, 2, 6), draws.uniform(0, 0.3, 6)
    found = FairSharing(uses, capacity, work, np.full(6, np.inf)).ends(begins)
    assert found == pytest.approx(ends_in_small_time_steps(uses, capacity, work, begins), abs=3e-3)


def test_two_flows_share_one_resource_while_both_last() -> None:
    sharing = FairSharing(np.array([[0], [0]]), np.array([1.0]), np.array([1.0, 1.0]), np.full(2, np.inf))
    assert sharing.ends(np.array([0.0, 0.5])).tolist() == pytest.approx([1.5, 2.0])
    assert sharing.ends(np.array([7.0, 7.5])).tolist() == pytest.approx([8.5, 9.0])  # as before, later
    assert sharing.ends(np.array([0.0, np.inf])).tolist() == [1.0, np.inf]


def test_flows_that_share_no_resource_do_not_delay_each_other() -> None:
    sharing = FairSharing(np.array([[0], [1], [-1]]), np.array([2.0, np.inf]), np.array([4.0, 4.0, 0.0]),
                          np.array([np.inf, 8.0, np.inf]))  # fmt: skip
    assert sharing.ends(np.array([1.0, 1.0, 1.0])).tolist() == [3.0, 1.5, 1.0]


def test_the_approximation_for_large_sets_of_flows_is_close_to_the_exact_ends(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = np.random.default_rng(3)
    uses = np.stack([draws.integers(0, 20, 200), 20 + draws.integers(0, 20, 200)], axis=1)
    arguments = uses, draws.uniform(1, 5, 40), np.ones(200), np.full(200, np.inf)
    exact = FairSharing(*arguments).ends(np.zeros(200))
    monkeypatch.setattr(fluid, "EXACT_FLOWS", 10)
    coarse = FairSharing(*arguments).ends(np.zeros(200))
    assert coarse.max() == pytest.approx(exact.max(), rel=0.05)
    assert np.abs(coarse / exact - 1).mean() < 0.1


@pytest.mark.slow
@given(networks(), st.lists(st.floats(0.1, 5), min_size=12, max_size=12), st.lists(st.floats(0, 3), min_size=12,
       max_size=12), st.lists(st.floats(0, 6), max_size=4))  # fmt: skip
def test_advancing_in_several_steps_gives_the_same_ends_as_in_one(
    network: tuple[np.ndarray, np.ndarray, np.ndarray], work: list[float], begins: list[float], stops: list[float]
) -> None:
    uses, capacity, most = network
    n = len(uses)
    found = np.full((2, n), np.nan)
    with pytest.MonkeyPatch.context() as patch:
        for row, times in enumerate([[np.inf], [*sorted(stops), np.inf]]):
            patch.setattr(fluid, "SINGLE_SET_FLOWS", 0 if row else 100)  # by clocks of their own, or by one
            followed = Fluid(2)
            followed.add(uses, np.array(work[:n]), most, np.array(begins[:n]), np.arange(n))
            for until in times:
                keys, ends = followed.advance(until, capacity)
                assert np.isnan(found[row, keys]).all() and (ends <= followed.now).all()
                found[row, keys] = ends
    assert found[1] == pytest.approx(found[0])
    for r in range(capacity.size):
        on = (uses == r).any(axis=1)
        if on.any():
            span = found[0, on].max() - np.array(begins[:n])[on].min()
            assert np.array(work[:n])[on].sum() <= capacity[r] * span * (1 + 1e-6)


@pytest.mark.parametrize("begin", [0.0, 1e3, 1e4, 1e6])
def test_short_flows_end_also_at_late_times(begin: float) -> None:
    """The rest of a flow may take less time than the last digit of the clock."""
    rng, capacity = np.random.default_rng(0), np.full(3, 1.25e9)
    for _ in range(50):
        followed = Fluid(1)
        work, begins = rng.uniform(5e4, 2e5, 6), begin + rng.uniform(0, 2e-4, 6)
        followed.add(rng.integers(0, 3, (6, 1)), work, np.full(6, np.inf), begins, np.arange(6))
        keys, ends = followed.advance(np.inf, capacity)
        assert sorted(keys) == [*range(6)]
        assert (ends[np.argsort(keys)] >= begins - 1e-9 * (1 + begin)).all()  # begins so close together are one
