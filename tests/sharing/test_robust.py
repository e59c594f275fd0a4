"""Rules that tolerate attackers: what a few arbitrary models can do, and what the papers' formulas give."""

from __future__ import annotations

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
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, one_round, rule
from tests.sharing.test_requirements import QUICKSTART

ROBUST: list[dict[str, Any]] = [
    {"name": "clipped_gossip"}, {"name": "clipped_gossip", "form": "he"}, {"name": "clipped_gossip", "form": "nearest"},
    {"name": "trimmed_mean"},
]  # fmt: skip

def distance(x: Tensor, y: Tensor) -> float:
    return distances_from(x, [y])[0]


ARBITRARY = st.sampled_from([0.0, 1.0, -3.0, 1e30, -1e38, math.inf, -math.inf, math.nan])
N, SIZE = 7, 5


def mixed_at_0(options: dict[str, Any], models: list[Tensor]) -> Tensor:
    """What node 0 makes of its neighbors' models on a complete graph."""
    each = bound(rule(**options), models)[0]
    seen = view(make("complete", nodes=len(models)), 0, 0)
    found = models[0].clone()
    each.mix(found, {uid: each.unpack(Payload({"x": models[uid]}), uid, seen) for uid in seen.sources}, seen)
    return found


@pytest.mark.parametrize("options", ROBUST, ids=str)
@given(sent=st.lists(ARBITRARY, min_size=2 * SIZE, max_size=2 * SIZE), seed=st.integers(0, 9))
def test_two_attackers_can_do_little(options: dict[str, Any], sent: list[float], seed: int) -> None:
    """Whatever two of six neighbors send: the model stays within a few times the distances between honest models."""
    draws = torch.Generator().manual_seed(seed)
    models = [torch.randn(SIZE, generator=draws) for _ in range(N - 2)]
    models += [torch.tensor(sent[:SIZE]), torch.tensor(sent[SIZE:])]
    found = mixed_at_0({**options, "byzantine": 2}, models)
    farthest = max(distance(models[0], model) for model in models[: N - 2])
    assert bool(found.isfinite().all())
    assert distance(models[0], found) <= 2 * farthest


def test_full_is_moved_by_one_attacker() -> None:
    """The reason for these rules."""
    models = [*draw(N - 1, SIZE), torch.full((SIZE,), 1e6)]
    assert distance(models[0], mixed_at_0({"name": "full"}, models)) > 1e5
    for options in ROBUST:
        assert distance(models[0], mixed_at_0(options, models)) < 10


@pytest.mark.parametrize("byzantine", [1, 2])
def test_trimmed_means_are_those_of_sorted_values(byzantine: int) -> None:
    """BRIDGE-T, entry by entry in NumPy; attackers' infinities are never in them."""
    models = draw(N, 40, torch.float64)
    wanted = []
    for entry in np.stack([model.numpy() for model in models]).T:
        middle = sorted(entry[1:])[byzantine : N - 1 - byzantine]
        wanted.append((entry[0] + sum(middle)) / (len(middle) + 1))
    found = mixed_at_0({"name": "trimmed_mean", "byzantine": byzantine}, models)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-12, rtol=0)


def test_the_most_that_can_be_trimmed_leaves_the_median() -> None:
    models = [torch.tensor([each]) for each in (0.0, 1.0, 2.0, 50.0)]
    assert mixed_at_0({"name": "trimmed_mean", "byzantine": "most"}, models).item() == (0 + 2) / 2
    models.append(torch.tensor([4.0]))
    assert mixed_at_0({"name": "trimmed_mean", "byzantine": "most"}, models).item() == (0 + 2 + 4) / 3


def test_a_node_with_too_few_models_keeps_its_own() -> None:
    """As after payloads that did not come."""
    models = draw(4, SIZE)
    for options in ({"name": "trimmed_mean"}, {"name": "clipped_gossip"}):
        each = bound(rule(**options), models)[0]  # type: ignore[arg-type]
        seen = view(make("complete", nodes=4), 0, 0).without(frozenset({2, 3}))
        found = models[0].clone()
        each.mix(found, {1: Payload({"x": models[1]})}, seen)
        assert torch.equal(found, models[0])


def by_the_paper(form: str, byzantine: int, distances: list[float], weights: list[float]) -> list[float]:
    """The factors of the neighbors' differences with equal weights (arXiv 2410.10418: CS+, GTS; 2202.01545)."""
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
def test_weights_are_those_of_the_papers(form: str, byzantine: int, distances: list[float]) -> None:
    config = ClippedGossipConfig(name="clipped_gossip", form=form, byzantine=byzantine)  # type: ignore[arg-type]
    weights = dict.fromkeys(range(6), 1 / 7)
    found = clipped_weights(dict(enumerate(distances)), weights, config)
    assert [*found.values()] == pytest.approx(by_the_paper(form, byzantine, distances, [1 / 7] * 6))


@given(distances=st.lists(st.floats(0, 1e30), min_size=1, max_size=8), weights=st.lists(st.floats(.01, .12), min_size=8,
       max_size=8), form=st.sampled_from(["cs_plus", "he", "nearest"]), byzantine=st.integers(0, 4))  # fmt: skip
def test_no_weight_grows(distances: list[float], weights: list[float], form: Any, byzantine: int) -> None:
    """With unequal weights, too: clipping takes weight from neighbors and never gives any."""
    config = ClippedGossipConfig(name="clipped_gossip", form=form, byzantine=byzantine)
    given_ = dict(enumerate(weights[: len(distances)]))
    found = clipped_weights(dict(enumerate(distances)), given_, config)
    assert all(0 <= found[uid] <= weight * (1 + 1e-9) for uid, weight in given_.items())


@pytest.mark.parametrize("form", ["cs_plus", "he", "nearest"])
def test_a_neighbor_without_weight_sets_no_radius(form: Any) -> None:
    """Such as one that says it has trained on no samples (`node.quorum.weights`), while another attacks."""
    config = ClippedGossipConfig(name="clipped_gossip", form=form)
    distances, weights = {1: 1.0, 2: 2.0, 3: 3.0, 4: 1e9}, dict.fromkeys(range(1, 5), 0.2)
    found = clipped_weights({**distances, 5: 1e12}, {**weights, 5: 0.0}, config)
    assert found == clipped_weights(distances, weights, config) and found[4] < 1e-8


def test_a_radius_limits_the_step() -> None:
    models = [torch.zeros(2, dtype=torch.float64), torch.tensor([30.0, 40.0]).double()]
    found = mixed_at_0({"name": "clipped_gossip", "radius": 5.0}, models)
    torch.testing.assert_close(found, torch.tensor([1.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("options", ROBUST, ids=str)
@pytest.mark.parametrize("family", [{"name": "complete", "nodes": 8}, {"name": "torus", "nodes": 16},
                                    {"name": "regular", "nodes": 16, "degree": 5},
                                    {"name": "random_regular", "nodes": 16, "degree": 5}], ids=str)  # fmt: skip
def test_honest_nodes_agree_without_gradients(options: dict[str, Any], family: dict[str, Any]) -> None:
    """The default on graphs with enough neighbors: nobody is left out, and no model leaves the range of all. On a
    torus, trimmed means of four neighbors leave groups of nodes apart."""
    if options["name"] == "trimmed_mean" and family["name"] == "torus":
        pytest.skip("the graph is too sparse: groups of nodes stay apart, as the rule's docstring says")
    graph = make(**family)
    models = draw(graph.num_nodes, 6, torch.float64)
    before = torch.stack(models)
    rules = bound(rule(**options), models)
    for r in range(150):
        one_round(rules, models, graph, r, pull=0.0)
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
