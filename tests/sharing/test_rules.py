"""What rules promise beside each other, the learning rate that they see, and which graphs they refuse."""

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
from tests.sharing.contract import draw, one_round, rule
from tests.sharing.helpers import quadratics

ROOT = Path(__file__).parents[2]
RING = make("ring", nodes=16)


@pytest.mark.slow
def test_bias_is_corrected_on_a_ring() -> None:
    """Plain gossip is biased, the correcting rules go to the optimum (docs/explanation/algorithms.rst, "Known
    errors")."""
    ring = make("ring", nodes=8)
    plain = quadratics("full", ring, 600, 0.05)
    assert plain > 1e-3
    for name in ("d2", "gradient_tracking"):
        assert quadratics(name, ring, 600, 0.05) < 1e-10, name
    assert quadratics("momentum_tracking", ring, 600, 0.01, momentum=0.8) < 1e-10
    lam = [quadratics("decentlam", ring, 600, lr, momentum=0.5) for lr in (0.02, 0.01)]
    assert lam[1] < lam[0] < plain


@pytest.mark.slow
def test_tracking_works_on_one_peer_sequences_and_d2_is_refused_there() -> None:
    sequence = make("one_peer_exponential", nodes=16)
    assert quadratics("gradient_tracking", sequence, 400, 0.05) < 1e-9
    assert quadratics("momentum_tracking", sequence, 1000, 0.01, momentum=0.8) < 1e-9
    assert quadratics("qg_momentum", sequence, 400, 0.05) < quadratics("full", sequence, 400, 0.05)
    for name in ("d2", "decentlam"):
        diverged = quadratics(name, sequence, 600, 0.05)
        assert not diverged < 1e-3, "this is why it is refused"


def run(name: str, rounds: int, **options: object) -> list[Tensor]:
    models = draw(6, 10, torch.float64)
    rules = [rule(name, **options)() for _ in models]
    for r in range(rounds):
        one_round(rules, models, make("complete", nodes=6), r)
    return models


def test_infrequent_rules_reduce_to_each_other() -> None:
    def close(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.allclose(x, y) for x, y in zip(a, b, strict=True))

    assert close(run("local_sgd", 7, every=1), run("full", 7))
    assert close(run("slowmo", 8, every=4, outer_lr=1.0, outer_momentum=0.0), run("local_sgd", 8, every=4))
    assert close(run("diloco", 8, every=2, outer_lr=1.0, outer_momentum=0.0), run("local_sgd", 8, every=2))
    assert not close(run("diloco", 8, every=2), run("slowmo", 8, every=2, outer_lr=0.7, outer_momentum=0.9))
    assert close(run("ac", 5, factor=1.0, final=1.0), run("full", 5))
    rested = run("local_sgd", 3, every=4)
    alone = [m - (1 - 0.9**3) * (m - float(uid)) for uid, m in enumerate(draw(6, 10, torch.float64))]
    assert close(rested, alone)


@pytest.mark.parametrize(("sharing", "graph", "says"), [
    ("d2", "{name: one_peer_exponential, nodes: 8}", "static graph.*name: ring"),
    ("relaysgd", "{name: ring, nodes: 8}", "needs a tree, got 8 edges for 8 nodes"),
    ("decentlam", "{name: random_matching, nodes: 8}", "static"),
])  # fmt: skip
def test_a_graph_that_does_not_suit_is_refused_with_one_that_would(sharing: str, graph: str, says: str) -> None:
    sets = [f"sharing={{name: {sharing}}}", f"graph={graph}", "mapping.nodes_per_machine=8"]
    with pytest.raises(ConfigError, match=says):
        load(ROOT / "configs" / "quickstart.yaml", sets)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in AMONG_EQUALS if name != "full"])
def test_every_rule_trains_the_quickstart_on_a_ring(name: str) -> None:
    """With default options; relays are refused on a ring and take a line, robust rules a graph of more neighbors."""
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
    # Elastic averaging lets every node explore: its local models have taken whole local steps since the last pull.
    which = "accuracy_merged" if name == "elastic" else "accuracy"
    accuracy = float(np.mean([node.figures()[which] for node in nodes]))  # type: ignore[arg-type]
    assert accuracy > 0.8, accuracy


def test_the_table_of_rules_is_sorted_by_file() -> None:
    for name, target in SHARINGS.items():
        found: Callable[..., object] = load_class(name, SHARINGS, "sharing")
        assert found.__module__ == target.partition(":")[0] and (found.__doc__ or "").strip(), name


class Told(Full):
    """Notes what it is told of the learning rate, and by which hook."""

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.rates: list[tuple[str, float]] = []

    def begin(self, model: Tensor, view: RoundView) -> None:
        self.rates.append(("begin", view.lr))

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        self.rates.append(("adjust", view.lr))

    def finish(self, model: Tensor, view: RoundView) -> None:
        self.rates.append(("finish", view.lr))


def test_rules_learn_the_rate_of_the_round(tmp_path: Path) -> None:
    records: list[dict[str, object]] = []
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", [
        "sharing={name: 'tests.sharing.test_rules:Told'}", "graph={name: ring, nodes: 4}",
        "mapping.nodes_per_machine=4", "node={rounds: 5, evaluate_every: 0}",
        "training.lr_schedule={name: multistep, milestones: [2, 4], gamma: 0.1, warmup: 1, warmup_factor: 0.0}",
    ]), lambda uid, record: records.append(record) if uid == 0 else None)  # fmt: skip
    step_all(nodes)
    trained = [float(r["lr"]) for r in records if r["kind"] == "round"]  # type: ignore[arg-type]
    assert trained == pytest.approx([0.0, 0.1, 0.1, 0.01, 0.01])
    told = nodes[0].sharing.rates  # type: ignore[attr-defined]
    assert told == [(hook, lr) for lr in trained for hook in ("begin", "adjust", "finish")]


@pytest.mark.slow
@pytest.mark.sampled(one=["sharing", "least"])
@pytest.mark.parametrize(("sharing", "least"), [
    ("{name: qg_momentum}", 0.8), ("{name: slowmo}", 0.8), ("{name: decentlam}", 0.8),
    ("{name: gradient_tracking}", 0.8), ("{name: gradient_tracking, form: dsgt}", 0.5),
    ("{name: momentum_tracking, form: atc}", 0.8),
])  # fmt: skip
def test_a_rate_of_zero_and_a_rate_that_falls_by_a_hundred_in_a_whole_run(sharing: str, least: float) -> None:
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", [
        f"sharing={sharing}", "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4",
        "node={rounds: 40, evaluate_every: 0}", "training.optimizer={name: sgd, lr: 0.1}",
        "training.lr_schedule={name: multistep, milestones: [20], gamma: 0.01, warmup: 2, warmup_factor: 0.0}",
    ]))  # fmt: skip
    step_all(nodes)
    assert all(bool(node.training.model.parameters.isfinite().all()) for node in nodes)
    assert float(nodes[0].figures()["accuracy_mean"]) > least
