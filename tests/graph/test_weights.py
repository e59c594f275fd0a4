"""Rules of mixing weights, and matrices of weights from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decentnode.config.component import load_class
from decentnode.errors import GraphError
from decentnode.graph import WEIGHTS, build
from decentnode.graph.base import averaging_group_of
from decentnode.graph.families import Ring
from decentnode.graph.star import Star
from decentnode.graph.weights import FileWeights, FileWeightsConfig, check
from tests.graph.contract import make


def weights(name: str, base_dir: Path = Path(), **options: object) -> object:
    rule = load_class(name, WEIGHTS, "weights")
    return rule(rule.Config.model_validate({"name": name, **options}), base_dir)


def test_metropolis_hastings_weights_of_a_star() -> None:
    w = make("star", nodes=4).matrix(0)
    np.testing.assert_allclose(w[0], 1 / 4)
    np.testing.assert_allclose(np.diag(w)[1:], 3 / 4)
    assert np.array_equal(w, w.T)


def test_uniform_rows_sum_to_one_but_columns_need_not() -> None:
    w = make("star", nodes=4, weights=weights("uniform")).matrix(0)
    np.testing.assert_allclose(w.sum(1), 1)
    assert w.sum(0)[0] == pytest.approx(1 / 4 + 3 / 2)


@pytest.mark.parametrize("name", ["laplacian", "max_degree"])
def test_laplacian_weights_are_i_minus_epsilon_l(name: str) -> None:
    w = make("star", nodes=5, weights=weights(name)).matrix(0)
    laplacian = np.diag([4, 1, 1, 1, 1]) - np.array([[0, 1, 1, 1, 1]] + [[1, 0, 0, 0, 0]] * 4)
    np.testing.assert_allclose(w, np.eye(5) - laplacian / 5)
    with pytest.raises(GraphError, match="node 0"):
        make("star", nodes=5, weights=weights(name, step=0.5)).matrix(0)


def test_lazy_weights_have_no_negative_eigenvalue() -> None:
    plain = make("ring", nodes=8).matrix(0)
    lazy = make("ring", nodes=8, weights=weights("metropolis_hastings", lazy=True)).matrix(0)
    np.testing.assert_allclose(lazy, (plain + np.eye(8)) / 2)
    assert np.linalg.eigvalsh(lazy).min() > 0 > np.linalg.eigvalsh(plain).min()


@pytest.mark.parametrize("suffix", [".txt", ".npy"])
def test_weights_are_read_from_a_file(tmp_path: Path, suffix: str) -> None:
    w = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    path = tmp_path / f"w{suffix}"
    if suffix == ".npy":
        np.save(path, w)
    else:
        np.savetxt(path, w)
    np.testing.assert_allclose(make("ring", nodes=3, weights=weights("file", tmp_path, path=path.name)).matrix(0), w)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5 0.5 0\n0.5 0.5 0\n0 0 0.9\n", "row 2 .* must sum to 1, got 0.9"),
        ("0 1 0\n0 1 0\n0 0 1\n", "column 0 .* must sum to 1, got 0"),
        ("1 0\n0 1\n", "must have 3 x 3 numbers"), ("a b c\n", "not a matrix"),
        ("2 -1 0\n-1 2 0\n0 0 1\n", "must not be negative: row 0 .* has -1 for node 1"),
        ("1 0 0\n0 1 0\n0 nan 1\n", "must be finite: row 2 .* has nan for node 1"),
        ("1 0 0\n0 inf 0\n0 0 1\n", "must be finite: row 1 .* has inf for node 1"),
        ("1 0 0\n0 1 0\n0 0 0.9999998\n", "row 2 .* must sum to 1, got 0.9999998"),
    ],
)  # fmt: skip
def test_errors_in_a_matrix_name_the_node(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.txt").write_text(text)
    with pytest.raises(GraphError, match=message):
        make("complete", nodes=3, weights=weights("file", tmp_path, path="w.txt"))


def test_a_weight_between_nodes_without_an_edge_is_refused(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "w.txt", np.full((4, 4), 0.25))
    with pytest.raises(GraphError, match="node 0 has a weight for node 2"):
        make("ring", nodes=4, weights=weights("file", tmp_path, path="w.txt"))


def test_rules_for_undirected_graphs_are_refused_for_directed_ones() -> None:
    with pytest.raises(GraphError, match="undirected"):
        make("exponential", nodes=6, weights=weights("metropolis_hastings"))


def test_check_accepts_row_stochastic_matrices_only_with_doubly_false() -> None:
    w = np.array([[0.0, 1.0], [0.0, 1.0]])
    check(w, doubly=False)
    with pytest.raises(GraphError, match="column 0"):
        check(w)


def test_a_graph_is_built_from_its_section_and_that_of_the_weights() -> None:
    graph = build(Ring.Config(name="ring", nodes=5), None, seed=1)
    assert graph.num_nodes == 5
    graph = build(Star.Config(name="star", nodes=5), UNIFORM, seed=1)
    assert graph.weights(1, 0)[0] == pytest.approx(1 / 2)


UNIFORM = load_class("uniform", WEIGHTS, "weights").Config(name="uniform")


def test_nodes_form_an_averaging_group_only_if_each_has_equal_weights_for_the_others(tmp_path: Path) -> None:
    """In the first matrix node 0 has equal weights, its neighbors do not. If nodes decided differently, some would wait
    in a collective that the others never enter."""
    np.savetxt(tmp_path / "w.txt", [[0.4, 0.3, 0.3], [0.3, 0.5, 0.2], [0.3, 0.2, 0.5]])
    unequal = make("complete", nodes=3, weights=FileWeights(FileWeightsConfig(path="w.txt"), tmp_path))
    assert [averaging_group_of(unequal, uid, 0) for uid in range(3)] == [()] * 3
    np.savetxt(tmp_path / "w.txt", [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]])
    equal = make("complete", nodes=3, weights=FileWeights(FileWeightsConfig(path="w.txt"), tmp_path))
    assert [averaging_group_of(equal, uid, 0) for uid in range(3)] == [(0, 1, 2)] * 3
