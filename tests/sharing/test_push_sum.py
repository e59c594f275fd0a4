"""Properties of push_sum beyond the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.payload import Payload
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round
from tests.sharing.helpers import error_on_quadratics

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["directed_one_peer_exponential", "exponential", "star"])
def test_push_sum_keeps_the_weighted_sum_and_reaches_the_mean_on_directed_and_irregular_graphs(family: str) -> None:
    graph, models = make(family, nodes=8), random_models(8, 11, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("push_sum")() for _ in models]
    for r in range(60):
        run_round(rules, models, graph, r, pull=0.0)
        total = sum(m * each.weight for m, each in zip(models, rules, strict=True))  # type: ignore[attr-defined]
        assert sum(each.weight for each in rules) == pytest.approx(8)  # type: ignore[attr-defined]
        torch.testing.assert_close(total / 8, mean)
    for model in models:
        torch.testing.assert_close(model, mean, atol=1e-6, rtol=0)


def test_push_sum_takes_back_the_share_of_an_undelivered_payload() -> None:
    graph, models = make("ring", nodes=4), random_models(4, 5, torch.float64)
    rules = [rule("push_sum")() for _ in models]
    views = [view(graph, uid, 0) for uid in range(4)]
    sent = [each.outgoing(model, round_view) for each, model, round_view in zip(rules, models, views, strict=True)]
    copies = [{to: Payload({"x": p.tensors["x"].clone()}, p.scalars) for to, p in out.items()} for out in sent]
    mean = torch.stack(models).mean(0)
    rules[1].undelivered(2, copies[1][2])
    for uid, each in enumerate(rules):
        received = {j: copies[j][uid] for j in views[uid].sources if (j, uid) != (1, 2)}
        each.mix(models[uid], received, views[uid])
    total = sum(m * each.weight for m, each in zip(models, rules, strict=True))  # type: ignore[attr-defined]
    torch.testing.assert_close(total / 4, mean)


@pytest.mark.slow
def test_the_bias_of_push_sum_on_an_irregular_graph_vanishes_with_the_learning_rate() -> None:
    """If updates were scaled by the nodes' weights, the models would not tend to the optimum."""
    star = make("star", nodes=8)
    errors = [error_on_quadratics("push_sum", star, rounds, lr) for rounds, lr in ((500, 0.02), (1500, 0.005))]
    assert errors[1] < errors[0] / 4


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ring", "directed_one_peer_exponential", "star"])
def test_overlapped_push_sum_learns(graph: str) -> None:
    sets = ["sharing={name: push_sum}", f"graph={{name: {graph}, nodes: 8}}", "mapping.nodes_per_machine=8",
            "weights={name: uniform}", "node={rounds: 40, evaluate_every: 0, schedule: overlapped}"]  # fmt: skip
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(nodes)
    assert sum(node.sharing.weight for node in nodes) == pytest.approx(8)  # type: ignore[attr-defined]
    assert float(nodes[0].figures()["accuracy_mean"]) > 0.8
