"""Predictions of Decent-DP's published iteration times from link speeds alone (arXiv 2410.11998, figure 6)."""

from __future__ import annotations

import pytest

from decentnode.simulate.data_parallel import Cluster, iteration_seconds

MODEL_BYTES = 4 * 63e6
"""Transformer base with a vocabulary of 37,120, in float32."""
SPREAD = 0.1
"""Spread of compute times between iterations, as batches of 25,000 tokens differ in their lengths. The same for all
clusters."""
FIXED_SECONDS = 0.03
"""The part of an iteration that more nodes do not shorten, estimated from the published times on 8 and 16 A100."""

# cluster: (Gbit/s, accelerators per machine, {nodes: (all-reduce, alternating exponential ring) in ms})
PUBLISHED = {
    "T4": (100, 8, {16: (372.5, 312.3), 32: (225.5, 178.8)}),
    "A100": (100, 4, {8: (73.0, 61.7), 16: (54.8, 45.8), 32: (51.5, 43.7)}),
    "A40": (25, 4, {8: (166.1, 122.0), 16: (195.5, 78.9), 32: (188.5, 67.9)}),
}
UNEXPLAINED = {
    ("A100", 32): "the published graph time stops falling at 43.7 ms, as something beside links and compute bounds it",
    ("A40", 16): "the published graph time is below what the model's bytes take on its link, 80.6 ms",
    ("A40", 8): "the published all-reduce over two machines takes longer than one exchange of the model",
}
"""Where the prediction is more than 5 percentage points off, and why."""
CASES = [(name, nodes) for name, (_, _, rows) in PUBLISHED.items() for nodes in rows]


def predicted_and_published_change(name: str, nodes: int) -> tuple[float, float]:
    """(predicted, published) change of an iteration's time by the graph. The compute time of a node is scaled from the
    smallest cluster of its kind, whose exchange over the graph is hidden."""
    gbit, per_machine, rows = PUBLISHED[name]
    least = min(rows)
    share = (rows[least][1] / 1e3 / 1.03 - FIXED_SECONDS) * least
    cluster = Cluster(nodes, per_machine, gbit)
    compute = FIXED_SECONDS + share / nodes
    reduced = iteration_seconds(cluster, MODEL_BYTES, compute, spread=SPREAD)
    over_graph = iteration_seconds(cluster, MODEL_BYTES, compute, spread=SPREAD, method="alternating_exponential_ring")
    published = rows[nodes]
    return over_graph / reduced - 1, published[1] / published[0] - 1


@pytest.fixture(scope="module")
def changes() -> dict[tuple[str, int], tuple[float, float]]:
    return {case: predicted_and_published_change(*case) for case in CASES}


EXPLAINED = [case for case in CASES if case not in UNEXPLAINED]


@pytest.mark.parametrize("case", EXPLAINED, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.slow
def test_the_predicted_change_is_within_five_points_of_the_published_one(
    case: tuple[str, int], changes: dict[tuple[str, int], tuple[float, float]]
) -> None:
    predicted, published = changes[case]
    assert predicted == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize("case", UNEXPLAINED, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.slow
def test_where_links_do_not_explain_the_published_change_the_prediction_is_five_to_twenty_points_off(
    case: tuple[str, int], changes: dict[tuple[str, int], tuple[float, float]]
) -> None:
    predicted, published = changes[case]
    assert predicted < 0 and 0.05 < abs(predicted - published) < 0.2


@pytest.mark.slow
def test_predicted_gains_grow_with_the_number_of_nodes_and_on_slower_links(
    changes: dict[tuple[str, int], tuple[float, float]]
) -> None:
    predicted = {case: each[0] for case, each in changes.items()}
    assert all(each < -0.1 for each in predicted.values())
    for nodes in (16, 32):  # the slower link gains more, and the more, the more nodes there are
        assert predicted["A40", nodes] < 2 * predicted["A100", nodes]
    assert predicted["A40", 32] < predicted["A40", 16] < predicted["A40", 8]
    assert min(predicted.values()) == pytest.approx(-0.64, abs=0.05)
