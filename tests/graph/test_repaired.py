"""Repaired graphs: edges are added where the members of a generation are not connected without the absent nodes."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decentnode.graph.base import Graph, parts
from decentnode.graph.growing import Growing
from decentnode.graph.repaired import Repair, Repaired, examined_rounds
from tests.graph.contract import make

CASES: list[tuple[str, dict[str, object]]] = [
    ("ring", {"nodes": 12}), ("torus", {"nodes": 12}), ("star", {"nodes": 9}), ("line", {"nodes": 8}),
    ("tree", {"nodes": 10, "branching": 3}), ("regular", {"nodes": 12, "degree": 3}),
    ("erdos_renyi", {"nodes": 12, "probability": 0.3}), ("exponential", {"nodes": 9}),
    ("one_peer_exponential", {"nodes": 8}), ("directed_one_peer_exponential", {"nodes": 11}),
    ("alternating_ring", {"nodes": 8}), ("base_k_plus_1", {"nodes": 7}), ("random_matching", {"nodes": 9}),
]  # fmt: skip
GRAPHS = {f"{name}-{options['nodes']}": make(name, **options) for name, options in CASES}
REPAIRS: list[Repair] = ["ring", "random"]


def connected_parts(graph: Graph, members: list[int]) -> list[set[int]]:
    """Returns the strongly connected components over the examined rounds, as networkx finds them."""
    union = nx.DiGraph()
    union.add_nodes_from(members)
    for round in range(examined_rounds(graph)):
        union.add_edges_from((uid, other) for uid in members for other in graph.neighbors(uid, round, members))
    return sorted(map(set, nx.strongly_connected_components(union)), key=min)


def matrix(graph: Graph, members: list[int], round: int) -> np.ndarray:
    """Returns the mixing matrix among the members alone."""
    w = np.zeros((len(members), len(members)))
    for row, uid in enumerate(members):
        for source, weight in graph.weights(uid, round, members).items():
            w[row, members.index(source)] = weight
    return w


@st.composite
def _graphs_with_members(draw: st.DrawFn) -> tuple[str, list[int]]:
    name = draw(st.sampled_from(sorted(GRAPHS)))
    uids = range(GRAPHS[name].num_nodes)
    return name, sorted(draw(st.sets(st.sampled_from(uids), min_size=1)))


@pytest.mark.sampled(one=["how"])
@pytest.mark.parametrize("how", REPAIRS)
@settings(max_examples=80, deadline=None)
@example(("ring-12", [0, 1, 2, 5, 6, 8]))
@example(("star-9", [*range(1, 9)]))
@given(case=_graphs_with_members())
def test_members_are_connected_whichever_nodes_are_absent(how: Repair, case: tuple[str, list[int]]) -> None:
    name, members = case
    graph = GRAPHS[name]
    made = Repaired(graph, how, seed=3)
    components = parts(graph, members, examined_rounds(graph))
    assert components == connected_parts(graph, members)
    assert len(connected_parts(made, members)) == 1
    assert bool(made.edges(members)) == (len(components) > 1), "no edge is added to a connected graph"
    assert made.edges(frozenset(members)) == Repaired(graph, how, seed=3).edges(tuple(members)), "the same for all"
    for i, j in made.edges(members):
        assert not any({i, j} <= part for part in components), "added edges join different parts"
    for round in range(examined_rounds(graph)):
        before, after = matrix(graph, members, round), matrix(made, members, round)
        for uid in members:
            assert set(graph.neighbors(uid, round, members)) <= set(made.neighbors(uid, round, members))
            assert set(graph.sources(uid, round, members)) <= set(made.sources(uid, round, members))
            assert set(made.weights(uid, round, members)) <= {uid, *made.sources(uid, round, members)}
            assert all(uid in made.sources(other, round, members) for other in made.neighbors(uid, round, members))
            out = made.out_weights(uid, round, members)
            assert set(out) == {uid, *made.neighbors(uid, round, members)} and abs(sum(out.values()) - 1) < 1e-12
            assert min(out.values()) > 0
        assert (after >= -1e-15).all()
        np.testing.assert_allclose(after.sum(1), 1, atol=1e-12)
        np.testing.assert_allclose(after.sum(0), before.sum(0), atol=1e-12, err_msg="the mean must be kept as before")


@pytest.mark.parametrize("how", REPAIRS)
@pytest.mark.parametrize("name", ["ring-12", "star-9", "torus-12", "line-8", "tree-10"])
def test_models_reach_consensus_over_added_edges(how: Repair, name: str) -> None:
    graph = GRAPHS[name]
    absent = graph.neighbors(5, 0)[:4] if name == "torus-12" else (0, 3, 6)
    members = [uid for uid in range(graph.num_nodes) if uid not in absent]
    mixed = np.linalg.matrix_power(matrix(Repaired(graph, how, seed=1), members, 0), 400)
    np.testing.assert_allclose(mixed, 1 / len(members), atol=1e-3)
    assert len(parts(graph, members, 1)) > 1


@settings(max_examples=60, deadline=None)
@given(case=_graphs_with_members())
def test_the_least_eigenvalue_is_not_lower_than_with_all_nodes(case: tuple[str, list[int]]) -> None:
    name, members = case
    graph = GRAPHS[name]
    made = Repaired(graph, "ring", seed=3, keeps_eigenvalues=True)
    if graph.directed or graph.period != 1:
        return
    least = np.linalg.eigvalsh(graph.matrix(0))[0]
    eigenvalues = np.linalg.eigvalsh(matrix(made, members, 0))
    assert eigenvalues[0] >= least - 1e-12
    if len(members) > 1:
        assert eigenvalues[-2] < 1 - 1e-9, "the members are connected"


def test_a_ring_without_some_nodes_is_repaired_to_a_ring_with_weights_of_a_third() -> None:
    made, members = Repaired(GRAPHS["ring-12"], "ring", seed=1), [0, 1, 2, 4, 6, 7, 8, 10]
    assert [len(made.neighbors(uid, 0, members)) for uid in members] == [2] * 8
    leaves = [*range(1, 9)]
    star = matrix(Repaired(GRAPHS["star-9"], "ring", seed=1), leaves, 0)
    np.testing.assert_allclose(star[star > 0], 1 / 3, atol=1e-12)


def test_random_repairs_are_trees_that_depend_on_the_seed() -> None:
    leaves = [*range(1, 9)]
    drawn = {tuple(Repaired(GRAPHS["star-9"], "random", seed).edges(leaves)) for seed in range(6)}
    assert len(drawn) > 1 and {len(edges) for edges in drawn} == {7}


def test_with_all_nodes_present_no_edges_are_added() -> None:
    graph = GRAPHS["ring-12"]
    made = Repaired(graph, "ring", seed=1)
    assert made.weights(3, 0) == graph.weights(3, 0) and made.neighbors(3, 0, range(12)) == (2, 4)
    assert made.edges(range(12)) == [] and made.partners(3) is None


def test_a_growing_graph_is_repaired_together_with_its_newcomers() -> None:
    grown = Growing(make("ring", nodes=4), lambda count: make("ring", nodes=count))
    made = Repaired(grown, "ring", seed=1)
    assert parts(grown, (0, 1, 3, 5), 1) == [{0, 1, 5}, {3}]
    assert made.edges((0, 1, 3, 5)) == [(1, 3), (3, 5)], "the nodes that lost neighbors close the ring again"
