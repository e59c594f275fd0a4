"""The C kernel of fair sharing gives the same bits as the NumPy code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.simulate.timeline import fluid, kernel
from decentnode.simulate.timeline.fair import fair_rates
from decentnode.simulate.timeline.fluid import Fluid, connected_components

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="no C compiler")

CallTransfers = tuple[np.ndarray, ...]


@st.composite
def flows(draw: st.DrawFn) -> CallTransfers:
    """(uses, capacity, most, work, begins) of up to 60 flows, some with the same numbers, which are fixed at once."""
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, resources, each = draw(st.integers(1, 60)), draw(st.integers(1, 30)), draw(st.integers(1, 4))
    uses = draws.integers(-1, resources, (count, each))
    capacity = np.where(draws.random(resources) < 0.1, np.inf, draws.uniform(0.5, 8, resources))
    if draw(st.booleans()):
        capacity = np.ceil(capacity)
    most = np.where(draws.random(count) < 0.6, np.inf, draws.uniform(0.1, 2, count))
    work = draws.choice([0.0, 1.0, 2.5, 1e-9], count) * draws.uniform(0.5, 2, count if draw(st.booleans()) else 1)
    return uses, capacity, most, work, draws.choice([0.0, 0.5, 0.7, np.pi], count)


@given(flows())
def test_fair_rates_have_the_same_bits(world: CallTransfers) -> None:
    uses, capacity, most, *_ = world
    assert (kernel.fair_rates(uses, capacity, most) == fair_rates(uses, capacity, most)).all()


def steps_of_flows(world: CallTransfers, pace: float) -> list[tuple[list[int], list[float], float]]:
    """Returns, for every step of at least `pace` seconds, the flows that ended, their ends, and the time."""
    uses, capacity, most, work, begins = world
    made, found = Fluid(uses.shape[1]), []
    made.add(uses, work, most, begins, np.arange(work.size))
    while made._keys.size:
        keys, over = made.advance(made.now + pace, capacity)
        found.append((keys.tolist(), over.tolist(), made.now))
    return found


@settings(max_examples=20)
@given(flows(), st.sampled_from([(0, 8), (0, 1000), (1000, 1000), (24, 3)]), st.sampled_from([0.0, 0.3, np.inf]))
def test_ends_of_flows_have_the_same_bits(world: CallTransfers, few_and_exact: tuple[int, int], pace: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("SINGLE_SET_FLOWS", "EXACT_FLOWS"), few_and_exact, strict=True):
            patch.setattr(fluid, name, value)
        compiled = steps_of_flows(world, pace)
        patch.setattr(kernel, "library", lambda: None)
        assert compiled == steps_of_flows(world, pace)


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40))
def test_connected_components_have_the_same_numbers(count: int, edges: list[tuple[int, int]]) -> None:
    a, b = np.array(edges, int).reshape(-1, 2).T % count
    compiled = connected_components(count, a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "library", lambda: None)
        assert (compiled == connected_components(count, a, b)).all()
