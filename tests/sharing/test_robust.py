"""Rules that tolerate attackers: the effect of a few arbitrary models, and the formulas of the papers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.experiment.crosschecks.sharing import unmet_requirements
from decentnode.graph.base import view
from decentnode.payload import Payload
from decentnode.sharing.clipped_gossip import ClippedGossipConfig, clipped_weights, distances_from
from decentnode.sharing.trimmed_mean import _ranked
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.test_requirements import QUICKSTART

ROBUST: list[dict[str, Any]] = [
    {"name": "clipped_gossip"}, {"name": "clipped_gossip", "form": "he"}, {"name": "clipped_gossip", "form": "nearest"},
    {"name": "trimmed_mean"},
]  # fmt: skip

def distance(x: Tensor, y: Tensor) -> float:
    return distances_from(x, [y])[0]


ARBITRARY_VALUES = st.sampled_from([0.0, 1.0, -3.0, 6e4, 1e30, -1e38, math.inf, -math.inf, math.nan])
N, SIZE = 7, 5


def mixed_by_node_0(options: dict[str, Any], models: list[Tensor]) -> Tensor:
    """Returns the model of node 0 after it has mixed in those of all others, on a complete graph."""
    robust = set_up_rules(rule(**options), models)[0]
    round_view = view(make("complete", nodes=len(models)), 0, 0)
    mixed = models[0].clone()
    received = {uid: robust.unpack(Payload({"x": models[uid]}), uid, round_view) for uid in round_view.sources}
    robust.mix(mixed, received, round_view)
    return mixed


@pytest.mark.parametrize("options", ROBUST, ids=str)
@given(sent=st.lists(ARBITRARY_VALUES, min_size=2 * SIZE, max_size=2 * SIZE), seed=st.integers(0, 9),
       dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))  # fmt: skip
def test_two_attackers_move_a_model_by_no_more_than_twice_the_distances_between_honest_models(
    options: dict[str, Any], sent: list[float], seed: int, dtype: torch.dtype
) -> None:
    """Whatever two of six neighbors send."""
    draws = torch.Generator().manual_seed(seed)
    models = [torch.randn(SIZE, generator=draws) for _ in range(N - 2)]
    models += [torch.tensor(sent[:SIZE]), torch.tensor(sent[SIZE:])]
    models = [model.to(dtype) for model in models]
    mixed = mixed_by_node_0({**options, "byzantine": 2}, models)
    farthest = max(distance(models[0], model) for model in models[: N - 2])
    assert bool(mixed.isfinite().all())
    assert distance(models[0], mixed) <= 2 * farthest


def test_one_attacker_moves_full_arbitrarily_far_and_robust_rules_a_little() -> None:
    models = [*random_models(N - 1, SIZE), torch.full((SIZE,), 1e6)]
    assert distance(models[0], mixed_by_node_0({"name": "full"}, models)) > 1e5
    for options in ROBUST:
        assert distance(models[0], mixed_by_node_0(options, models)) < 10


@pytest.mark.parametrize("byzantine", [1, 2])
def test_trimmed_mean_computes_the_mean_of_the_middle_values_of_every_entry(byzantine: int) -> None:
    """BRIDGE-T, entry by entry in NumPy."""
    models = random_models(N, 40, torch.float64)
    expected = []
    for entry in np.stack([model.numpy() for model in models]).T:
        middle = sorted(entry[1:])[byzantine : N - 1 - byzantine]
        expected.append((entry[0] + sum(middle)) / (len(middle) + 1))
    mixed = mixed_by_node_0({"name": "trimmed_mean", "byzantine": byzantine}, models)
    torch.testing.assert_close(mixed, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_trimmed_mean_with_byzantine_most_averages_its_own_value_and_the_median_of_the_others() -> None:
    """With an even number of neighbors, its own value and the two middle ones."""
    models = [torch.tensor([value]) for value in (0.0, 1.0, 2.0, 50.0)]
    assert mixed_by_node_0({"name": "trimmed_mean", "byzantine": "most"}, models).item() == (0 + 2) / 2
    models.append(torch.tensor([4.0]))
    assert mixed_by_node_0({"name": "trimmed_mean", "byzantine": "most"}, models).item() == (0 + 2 + 4) / 3


def test_a_node_that_received_too_few_models_keeps_its_own() -> None:
    """As in a round in which payloads were lost."""
    models = random_models(4, SIZE)
    for options in ({"name": "trimmed_mean"}, {"name": "clipped_gossip"}):
        robust = set_up_rules(rule(**options), models)[0]  # type: ignore[arg-type]
        round_view = view(make("complete", nodes=4), 0, 0).without(frozenset({2, 3}))
        mixed = models[0].clone()
        robust.mix(mixed, {1: Payload({"x": models[1]})}, round_view)
        assert torch.equal(mixed, models[0])


def weights_of_the_paper(form: str, byzantine: int, distances: list[float], weights: list[float]) -> list[float]:
    """Returns the weights of the neighbors after clipping, for equal weights before (cs_plus and nearest: CS+ and GTS
    of arXiv 2410.10418; he: arXiv 2202.01545)."""
    order = sorted(range(len(distances)), key=lambda j: distances[j])
    nearest, bound_ = order[: len(order) - byzantine], byzantine * weights[0]
    if form == "nearest":
        return [weights[j] if j in nearest else 0.0 for j in range(len(distances))]
    if form == "he":
        radius = math.sqrt(sum(weights[j] * distances[j] ** 2 for j in nearest) / bound_)
    else:
        radius = distances[order[len(order) - 2 * byzantine - 1]]
    return [w * min(1.0, radius / d) for w, d in zip(weights, distances, strict=True)]


@pytest.mark.parametrize("form", ["cs_plus", "he", "nearest"])
@pytest.mark.parametrize("byzantine", [1, 2])
@given(distances=st.lists(st.floats(0.1, 10), min_size=6, max_size=6, unique=True))
def test_clipped_weights_are_those_of_the_papers(form: str, byzantine: int, distances: list[float]) -> None:
    config = ClippedGossipConfig(name="clipped_gossip", form=form, byzantine=byzantine)  # type: ignore[arg-type]
    weights = dict.fromkeys(range(6), 1 / 7)
    clipped = clipped_weights(dict(enumerate(distances)), weights, config)
    assert [*clipped.values()] == pytest.approx(weights_of_the_paper(form, byzantine, distances, [1 / 7] * 6))


@given(distances=st.lists(st.floats(0, 1e30), min_size=1, max_size=8), weights=st.lists(st.floats(.01, .12), min_size=8,
       max_size=8), form=st.sampled_from(["cs_plus", "he", "nearest"]), byzantine=st.integers(0, 4))  # fmt: skip
def test_clipping_never_increases_a_weight(
    distances: list[float], weights: list[float], form: Any, byzantine: int
) -> None:
    """With unequal weights, too."""
    config = ClippedGossipConfig(name="clipped_gossip", form=form, byzantine=byzantine)
    unclipped = dict(enumerate(weights[: len(distances)]))
    clipped = clipped_weights(dict(enumerate(distances)), unclipped, config)
    assert all(0 <= clipped[uid] <= weight * (1 + 1e-9) for uid, weight in unclipped.items())


@pytest.mark.parametrize("form", ["cs_plus", "he", "nearest"])
def test_a_neighbor_of_weight_zero_does_not_change_the_clipping_radius(form: Any) -> None:
    """A neighbor that reports no samples has weight zero (`node.quorum.weights`). Here another one attacks."""
    config = ClippedGossipConfig(name="clipped_gossip", form=form)
    distances, weights = {1: 1.0, 2: 2.0, 3: 3.0, 4: 1e9}, dict.fromkeys(range(1, 5), 0.2)
    clipped = clipped_weights({**distances, 5: 1e12}, {**weights, 5: 0.0}, config)
    assert clipped == clipped_weights(distances, weights, config) and clipped[4] < 1e-8


def test_a_configured_radius_limits_the_step_toward_a_neighbor() -> None:
    models = [torch.zeros(2, dtype=torch.float64), torch.tensor([30.0, 40.0]).double()]
    mixed = mixed_by_node_0({"name": "clipped_gossip", "radius": 5.0}, models)
    torch.testing.assert_close(mixed, torch.tensor([1.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("options", ROBUST, ids=str)
@pytest.mark.parametrize("family", [{"name": "complete", "nodes": 8}, {"name": "torus", "nodes": 16},
                                    {"name": "regular", "nodes": 16, "degree": 5},
                                    {"name": "random_regular", "nodes": 16, "degree": 5}], ids=str)  # fmt: skip
def test_honest_nodes_reach_consensus_without_gradients(options: dict[str, Any], family: dict[str, Any]) -> None:
    """With default options on graphs with enough neighbors; no entry leaves the range of the first models. On a torus,
    groups of nodes with trimmed means of four neighbors stay apart."""
    if options["name"] == "trimmed_mean" and family["name"] == "torus":
        pytest.skip("the graph is too sparse: groups of nodes stay apart, as the rule's docstring says")
    graph = make(**family)
    models = random_models(graph.num_nodes, 6, torch.float64)
    before = torch.stack(models)
    rules = set_up_rules(rule(**options), models)
    for r in range(150):
        run_round(rules, models, graph, r, pull=0.0)
    after = torch.stack(models)
    assert float((after - after.mean(0)).norm() / (before - before.mean(0)).norm()) < 0.05
    assert bool((after <= before.amax(0) + 1e-9).all() and (after >= before.amin(0) - 1e-9).all())


def test_graphs_with_too_few_neighbors_are_refused() -> None:
    for options, least in (({"name": "clipped_gossip", "byzantine": 2}, 5), ({"name": "trimmed_mean"}, 3),
                           ({"name": "clipped_gossip", "form": "nearest"}, 2)):  # fmt: skip
        needs = rule(**options)().requirements  # type: ignore[arg-type]
        assert needs.min_neighbors == least
        assert not list(unmet_requirements(needs, make("regular", nodes=12, degree=6)))
    with pytest.raises(ConfigError, match=r"trimmed_mean needs at least 3 neighbors of every node in every round, "
                       r"node 0 has 2 in round 0; use \{name: regular, nodes: 16, degree: 4\}"):  # fmt: skip
        load(QUICKSTART, ["sharing=trimmed_mean", "graph={name: ring, nodes: 16}"])
    with pytest.raises(ConfigError, match="trimmed_mean uses no weights, got samples; use weights: neighbors"):
        load(QUICKSTART, ["sharing=trimmed_mean", "node.quorum={share: 0.5, weights: samples}",
                          "node.missing=return_weight"])  # fmt: skip
    with pytest.raises(ConfigError, match="has 1 in round 0"):
        load(QUICKSTART, ["sharing=clipped_gossip", "graph={name: one_peer_exponential, nodes: 16}"])


@pytest.mark.parametrize("count", range(1, 11))
def test_values_are_ranked_by_minima_and_maxima_alone(count: int) -> None:
    """A network that sorts all columns of zeros and ones sorts everything (Knuth 3, 5.3.4, theorem Z)."""
    columns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=count))).T
    for first, last in itertools.combinations(range(count + 1), 2):
        ranked = _ranked(list(columns.unbind()), first, last)
        assert torch.equal(ranked, columns.sort(0).values[first:last]), (first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nan_and_infinity_are_ranked_as_sort_does(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[2, 5] = rows[3, 5] = rows[6, 8] = math.nan
    rows[0, 7], rows[1, 7] = math.inf, -math.inf
    before = rows.clone()
    for changed in (rows, rows.nan_to_num(0)):
        expected = changed.sort(0).values[1:6]
        assert torch.allclose(_ranked(list(changed.unbind()), 1, 6), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.allclose(rows, before, rtol=0, atol=0, equal_nan=True)
