"""Groups of nodes: graphs that join whole groups, and which graphs can be used with groups."""

from __future__ import annotations

import re

import numpy as np
import pytest

from decentnode.errors import GraphError
from decentnode.graph.groups import Groups, problem_of
from tests.graph.contract import make


def consecutive_groups(n: int, size: int) -> Groups:
    return Groups(tuple(tuple(range(start, start + size)) for start in range(0, n, size)))


@pytest.mark.parametrize("between", [
    {"name": "ring", "nodes": 5}, {"name": "star", "nodes": 4}, {"name": "exponential", "nodes": 6},
    {"name": "one_peer_exponential", "nodes": 4}, {"name": "directed_one_peer_exponential", "nodes": 4},
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3])
def test_a_grouped_graph_is_the_kronecker_product_with_the_mean_of_a_group(
    between: dict[str, object], size: int
) -> None:
    outer = make(**between)  # type: ignore[arg-type]
    graph = make("grouped", nodes=outer.num_nodes * size, between=between)
    assert graph.period == outer.period and graph.directed == outer.directed
    groups = consecutive_groups(graph.num_nodes, size)
    assert groups.describe_mismatch(graph) == ""
    for r in range(outer.period or 3):
        np.testing.assert_allclose(graph.matrix(r), np.kron(outer.matrix(r), np.full((size, size), 1 / size)))
        for uid in range(graph.num_nodes):
            row, at = groups.row(graph.weights(uid, r)), groups.place(uid)[0]
            assert row == pytest.approx({g: w for g, w in enumerate(outer.matrix(r)[at]) if w})
            same_rank = tuple(g * size + uid % size for g in outer.neighbors(at, r))
            assert groups.same_rank_nodes(uid, groups.of(graph.neighbors(uid, r))) == same_rank


def test_a_grouped_graph_needs_a_multiple_of_the_number_of_groups() -> None:
    with pytest.raises(GraphError, match="multiple of 4, got 10"):
        make("grouped", nodes=10, between={"name": "ring", "nodes": 4})


@pytest.mark.parametrize(("name", "options", "size"), [
    ("torus", {"nodes": 12, "rows": 3}, 4), ("hypercube", {"nodes": 16}, 4), ("complete", {"nodes": 6}, 2),
    ("one_peer_exponential", {"nodes": 8}, 2), ("ring", {"nodes": 8}, 1), ("ring", {"nodes": 4}, 4),
    ("alternating_exponential_ring", {"nodes": 12, "nodes_per_machine": 3}, 3),
])  # fmt: skip
def test_graphs_that_fit_the_groups_have_no_misfit(name: str, options: dict[str, object], size: int) -> None:
    """If models are averaged in each group before W (the matrix P), they are equal in each group after it: W P = P W
    P."""
    graph = make(name, **options)
    assert consecutive_groups(graph.num_nodes, size).describe_mismatch(graph) == ""
    for r in range(graph.period or 1):
        p = np.kron(np.eye(graph.num_nodes // size), np.full((size, size), 1 / size))
        np.testing.assert_allclose(graph.matrix(r) @ p, p @ graph.matrix(r) @ p, atol=1e-12)


@pytest.mark.parametrize(("name", "size"), [("ring", 2), ("star", 4), ("random_matching", 2), ("exponential", 4)])
def test_a_misfit_names_two_nodes_of_a_group_with_different_weights(name: str, size: int) -> None:
    mismatch = consecutive_groups(8, size).describe_mismatch(make(name, nodes=8))
    weights = r"give weights [\d.]+ and [\d.]+ to nodes [\d, ]+"
    assert re.match(rf"nodes \d and \d of one group {weights} in round \d+$", mismatch)


@pytest.mark.parametrize(("members", "message"), [
    ([[0, 1], [2, 3]], ""), ([[3, 0], [2, 1]], ""), ([[0, 1], [2, 4]], "got 4 of 4 nodes"),
    ([[0, 1], [1, 2, 3]], "node 1 twice"), ([[0, 1], [2]], "got none with node 3"),
    ([[0, 1, 2], [3]], "must have one size, got 1 (nodes 3) and 3 (nodes 0, 1, 2)"),
])  # fmt: skip
def test_groups_that_do_not_partition_the_nodes_evenly_are_refused(members: list[list[int]], message: str) -> None:
    problem = problem_of(members, 4)
    assert (problem == "") if not message else message in problem
