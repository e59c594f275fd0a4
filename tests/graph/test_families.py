"""Families of graphs: the contract of all, and what single families promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import GraphError
from decentnode.graph import GRAPHS
from decentnode.graph.base import view, view_without_exchange
from decentnode.graph.spectrum import contraction, diameter
from tests.graph import contract

CHECKS = [contract.check_lists, contract.check_weights, contract.check_connected, contract.check_partners,
          contract.check_members]  # fmt: skip


@pytest.mark.parametrize("case", contract.CASES, ids=lambda c: f"{c[0]}-{c[1]['nodes']}")
def test_every_family_fulfills_the_contract(case: tuple[str, dict[str, object]]) -> None:
    graph = contract.make(case[0], **case[1])
    for check in CHECKS:
        if check is not contract.check_members or graph.num_nodes > 1:
            check(graph)
    contract.check_same_everywhere(graph, contract.make(case[0], **case[1]))


def test_every_family_has_a_case_in_the_contract() -> None:
    assert {name for name, _ in contract.CASES} == set(GRAPHS) - {"file"}


@pytest.mark.parametrize("name", ["regular", "small_world", "erdos_renyi", "random_matching", "random_regular",
                                  "d_equistatic", "u_equistatic", "od_equidyn", "ou_equidyn"])
def test_a_seed_gives_the_same_graph_again_and_another_seed_another_graph(name: str) -> None:
    lists = [contract.make(name, seed=seed, nodes=16).lists(3) for seed in (1, 1, 2, 3)]
    assert lists[0] == lists[1] and (lists[0] != lists[2] or lists[0] != lists[3])
    # the seed in the graph's own section has precedence over that of the experiment
    of_seed_5 = contract.make(name, seed=5, nodes=16).lists(0)
    graph = contract.make(name, seed=9, nodes=16)
    assert type(graph)(graph.config.model_copy(update={"seed": 5}), seed=9).lists(0) == of_seed_5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hypercube", {"nodes": 12}, "8 or 16 nodes"),
        ("one_peer_exponential", {"nodes": 6}, "base_k_plus_1"),
        ("alternating_ring", {"nodes": 5}, "even number"),
        ("alternating_exponential_ring", {"nodes": 4, "nodes_per_machine": 4}, "two or more machines"),
        ("regular", {"nodes": 5, "degree": 3}, "even number"),
        ("regular", {"nodes": 4, "degree": 4}, "degree 3"),
        ("regular", {"nodes": 6, "degree": 1}, "degree 2"),
        ("erdos_renyi", {"nodes": 30, "probability": 0.0}, "not connected"),
        ("torus", {"nodes": 12, "rows": 5}, "rows must divide"),
        ("small_world", {"nodes": 4}, "k_over_2"),
    ],
)
def test_impossible_numbers_are_refused_with_advice(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        contract.make(name, **options)


@given(st.integers(1, 12), st.integers(0, 6), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_regular_graphs_are_regular_and_connected_or_refused(n: int, degree: int, seed: int) -> None:
    try:
        graph = contract.make("regular", seed=seed, nodes=n, degree=degree)
    except GraphError:
        assert degree >= n or n * degree % 2 or degree < 2
        return
    assert {len(neighbors) for neighbors in graph.lists(0)} == {degree} and diameter(graph.lists(0)) is not None


def test_contraction_rates_are_the_known_ones() -> None:
    """Of the ring with weights 1/3, and 1 - 2 / (tau + 1) of the static exponential graph (docs/explanation/graphs.rst,
    "Rates")."""
    for n, rate in ((8, 0.805), (16, 0.949), (32, 0.987)):
        assert contraction(contract.make("ring", nodes=n)) == pytest.approx(rate, abs=6e-4)
    for n, tau in ((8, 3), (16, 4), (32, 5)):
        assert contraction(contract.make("exponential", nodes=n)) == pytest.approx(1 - 2 / (tau + 1))
    assert contraction(contract.make("alternating_ring", nodes=16)) == pytest.approx(np.cos(2 * np.pi / 16), rel=0.002)


def test_views_of_all_nodes_share_one_tuple_of_members() -> None:
    graph = contract.make("ring", nodes=9)
    assert view(graph, 3, 0).members is view(graph, 5, 1).members is view_without_exchange(graph, 7, 2).members
    assert view(graph, 3, 0).members == tuple(range(9))
