"""Rules compared with each other, the learning rate that they see, and which graphs they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.config.component import load_class
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.graph.base import RoundView
from decentnode.sharing import AMONG_EQUALS, SHARINGS
from decentnode.sharing.full import Full
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round
from tests.sharing.helpers import error_on_quadratics

ROOT = Path(__file__).parents[2]
RING = make("ring", nodes=16)


@pytest.mark.slow
def test_on_a_ring_full_is_biased_and_bias_correcting_rules_find_the_optimum() -> None:
    """docs/explanation/algorithms.rst, "Known errors"."""
    ring = make("ring", nodes=8)
    plain = error_on_quadratics("full", ring, 600, 0.05)
    assert plain > 1e-3
    for name in ("d2", "gradient_tracking"):
        assert error_on_quadratics(name, ring, 600, 0.05) < 1e-10, name
    assert error_on_quadratics("momentum_tracking", ring, 600, 0.01, momentum=0.8) < 1e-10
    decentlam = [error_on_quadratics("decentlam", ring, 600, lr, momentum=0.5) for lr in (0.02, 0.01)]
    assert decentlam[1] < decentlam[0] < plain


@pytest.mark.slow
def test_on_one_peer_graphs_tracking_finds_the_optimum_and_d2_and_decentlam_do_not() -> None:
    sequence = make("one_peer_exponential", nodes=16)
    assert error_on_quadratics("gradient_tracking", sequence, 400, 0.05) < 1e-9
    assert error_on_quadratics("momentum_tracking", sequence, 1000, 0.01, momentum=0.8) < 1e-9
    assert error_on_quadratics("qg_momentum", sequence, 400, 0.05) < error_on_quadratics("full", sequence, 400, 0.05)
    for name in ("d2", "decentlam"):
        error = error_on_quadratics(name, sequence, 600, 0.05)  # may be NaN
        assert not error < 1e-3, "this rule converges, so that it need not be refused"


def train(name: str, rounds: int, **options: object) -> list[Tensor]:
    models = random_models(6, 10, torch.float64)
    rules = [rule(name, **options)() for _ in models]
    for r in range(rounds):
        run_round(rules, models, make("complete", nodes=6), r)
    return models


def test_rules_equal_each_other_with_options_that_switch_their_differences_off() -> None:
    def close(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.allclose(x, y) for x, y in zip(a, b, strict=True))

    assert close(train("local_sgd", 7, every=1), train("full", 7))
    assert close(train("slowmo", 8, every=4, outer_lr=1.0, outer_momentum=0.0), train("local_sgd", 8, every=4))
    assert close(train("diloco", 8, every=2, outer_lr=1.0, outer_momentum=0.0), train("local_sgd", 8, every=2))
    assert not close(train("diloco", 8, every=2), train("slowmo", 8, every=2, outer_lr=0.7, outer_momentum=0.9))
    assert close(train("ac", 5, factor=1.0, final=1.0), train("full", 5))
    before_first_exchange = train("local_sgd", 3, every=4)
    alone = [m - (1 - 0.9**3) * (m - float(uid)) for uid, m in enumerate(random_models(6, 10, torch.float64))]
    assert close(before_first_exchange, alone)


@pytest.mark.parametrize(("sharing", "graph", "message"), [
    ("d2", "{name: one_peer_exponential, nodes: 8}", "static graph.*name: ring"),
    ("relaysgd", "{name: ring, nodes: 8}", "needs a tree, got 8 edges for 8 nodes"),
    ("decentlam", "{name: random_matching, nodes: 8}", "static"),
])  # fmt: skip
def test_a_graph_that_a_rule_cannot_use_is_refused_with_advice(sharing: str, graph: str, message: str) -> None:
    sets = [f"sharing={{name: {sharing}}}", f"graph={graph}", "mapping.nodes_per_machine=8"]
    with pytest.raises(ConfigError, match=message):
        load(ROOT / "configs" / "quickstart.yaml", sets)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in AMONG_EQUALS if name != "full"])
def test_every_rule_trains_the_quickstart(name: str) -> None:
    """With default options on a ring. There relaysgd is refused and takes a line, and robust rules are refused and take
    a graph with more neighbors."""
    sets = [f"sharing={{name: {name}}}", "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8",
            "node={rounds: 30, evaluate_every: 0}"]  # fmt: skip
    if name == "relaysgd":
        with pytest.raises(ConfigError, match="needs a tree"):
            load(ROOT / "configs" / "quickstart.yaml", sets)
        sets[1] = "graph={name: line, nodes: 8}"
    if name in ("clipped_gossip", "trimmed_mean"):
        with pytest.raises(ConfigError, match="needs at least 3 neighbors"):
            load(ROOT / "configs" / "quickstart.yaml", sets)
        sets[1] = "graph={name: regular, nodes: 8, degree: 4}"
    experiment = load(ROOT / "configs" / "quickstart.yaml", sets)
    nodes = build_in_process(experiment)
    step_all(nodes)
    # Nodes of elastic averaging explore: their models have taken all local steps since they were last pulled together.
    figure = "accuracy_merged" if name == "elastic" else "accuracy"
    accuracy = float(np.mean([node.figures()[figure] for node in nodes]))  # type: ignore[arg-type]
    assert accuracy > 0.8, accuracy


def test_every_rule_is_defined_in_the_module_that_the_table_names_and_has_a_docstring() -> None:
    for name, target in SHARINGS.items():
        rule_class: Callable[..., object] = load_class(name, SHARINGS, "sharing")
        assert rule_class.__module__ == target.partition(":")[0] and (rule_class.__doc__ or "").strip(), name


class RecordsLearningRates(Full):
    """Records the learning rate that each hook gets."""

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.rates: list[tuple[str, float]] = []

    def begin(self, model: Tensor, view: RoundView) -> None:
        self.rates.append(("begin", view.lr))

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        self.rates.append(("adjust", view.lr))

    def finish(self, model: Tensor, view: RoundView) -> None:
        self.rates.append(("finish", view.lr))


def test_every_hook_of_a_rule_gets_the_learning_rate_of_the_round(tmp_path: Path) -> None:
    records: list[dict[str, object]] = []
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", [
        "sharing={name: 'tests.sharing.test_rules:RecordsLearningRates'}", "graph={name: ring, nodes: 4}",
        "mapping.nodes_per_machine=4", "node={rounds: 5, evaluate_every: 0}",
        "training.lr_schedule={name: multistep, milestones: [2, 4], gamma: 0.1, warmup: 1, warmup_factor: 0.0}",
    ]), lambda uid, record: records.append(record) if uid == 0 else None)  # fmt: skip
    step_all(nodes)
    trained = [float(r["lr"]) for r in records if r["kind"] == "round"]  # type: ignore[arg-type]
    assert trained == pytest.approx([0.0, 0.1, 0.1, 0.01, 0.01])
    recorded = nodes[0].sharing.rates  # type: ignore[attr-defined]
    assert recorded == [(hook, lr) for lr in trained for hook in ("begin", "adjust", "finish")]


@pytest.mark.slow
@pytest.mark.sampled(one=["sharing", "least"])
@pytest.mark.parametrize(("sharing", "least"), [
    ("{name: qg_momentum}", 0.8), ("{name: slowmo}", 0.8), ("{name: decentlam}", 0.8),
    ("{name: gradient_tracking}", 0.8), ("{name: gradient_tracking, form: dsgt}", 0.5),
    ("{name: momentum_tracking, form: atc}", 0.8),
])  # fmt: skip
def test_runs_learn_with_a_learning_rate_that_begins_at_zero_and_later_falls_to_a_hundredth(
    sharing: str, least: float
) -> None:
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", [
        f"sharing={sharing}", "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4",
        "node={rounds: 40, evaluate_every: 0}", "training.optimizer={name: sgd, lr: 0.1}",
        "training.lr_schedule={name: multistep, milestones: [20], gamma: 0.01, warmup: 2, warmup_factor: 0.0}",
    ]))  # fmt: skip
    step_all(nodes)
    assert all(bool(node.training.model.parameters.isfinite().all()) for node in nodes)
    assert float(nodes[0].figures()["accuracy_mean"]) > least
